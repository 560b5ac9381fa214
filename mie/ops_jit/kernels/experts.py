"""Kernels that choose experts, sort the pairs of tokens and experts, and add weighted results.

The products of experts are computed as in `linear`, over the rows of one expert at a time.
"""

import numpy as np

from mie.ops_jit.kernels.vectors import (
    everywhere,
    exp,
    first_of,
    fma,
    kernel_function,
    load_first,
    number,
    set_number,
    set_word,
    store_first,
    sum_of,
    within,
    word,
    words,
)
from mie.ops_jit.layout import BLOCK_ROWS, EXPERT_ITEM_WORDS, NUM_EXPERT_ITEMS, PAIR_WORDS, ROW_TILE

HIDDEN = np.float32(-np.inf)


@kernel_function
def best(logits, experts, above, last):
    """Return the expert with the largest logit of those after expert ``last`` with ``above``.

    The order is by falling logit, then by rising number. Without such an expert (there is a NaN),
    it is 0.
    """
    found, top = 0, HIDDEN
    is_found = False
    for expert in range(experts):
        logit = number(logits, expert)
        is_later = logit < above or (logit == above and expert > last)
        if is_later and (logit > top or not is_found):
            found, top, is_found = expert, logit, True
    return found


@kernel_function
def route(args, step, tile, scratch):
    """Write the experts of tokens and their weights [T, 2, k].

    Arguments: logits [T, E], out, E, k, whether the weights sum to 1, the word with T.
    """
    logits, out, experts, chosen, is_normalised, rows_word = words(args, 6)
    end = min(word(step, rows_word), (tile + 1) * ROW_TILE)
    for row in range(tile * ROW_TILE, end):
        own, to = logits + row * experts * 4, out + row * chosen * 8
        above, last = np.float32(np.inf), -1
        for choice in range(chosen):
            last = best(own, experts, above, last)
            above = number(own, last)
            set_number(to, choice, np.float32(last))
            set_number(to, chosen + choice, above)
        largest = everywhere(number(to, chosen))
        source, count = own, experts
        if is_normalised != 0:
            source, count = to + chosen * 4, chosen
        total = everywhere(np.float32(0))
        for i in range(0, count, 16):
            v = within(load_first(source + 4 * i, count - i), 0, count - i, HIDDEN)
            total = total + exp(v - largest)
        divisor = sum_of(total)
        for choice in range(chosen, 2 * chosen):
            weight = first_of(exp(everywhere(number(to, choice)) - largest))
            set_number(to, choice, weight / divisor)


@kernel_function
def route_by_sigmoid(args, step, tile, scratch):
    """Write the experts of tokens and their weights [T, 2, k], by sigmoids and a bias.

    Arguments: logits [T, E], bias [E], out, E, k, the word with T.
    """
    logits, bias, out, experts, chosen, rows_word = words(args, 6)
    scores, keys = scratch, scratch + 4 * experts
    one = everywhere(np.float32(1))
    end = min(word(step, rows_word), (tile + 1) * ROW_TILE)
    for row in range(tile * ROW_TILE, end):
        own, to = logits + row * experts * 4, out + row * chosen * 8
        for i in range(0, experts, 16):
            count = experts - i
            v = one / (one + exp(everywhere(np.float32(0)) - load_first(own + 4 * i, count)))
            store_first(scores + 4 * i, v, count)
            store_first(keys + 4 * i, v + load_first(bias + 4 * i, count), count)
        above, last = np.float32(np.inf), -1
        total = np.float32(0)
        for choice in range(chosen):
            last = best(keys, experts, above, last)
            above, score = number(keys, last), number(scores, last)
            set_number(to, choice, np.float32(last))
            set_number(to, chosen + choice, score)
            total += score
        for choice in range(chosen, 2 * chosen):
            set_number(to, choice, number(to, choice) / (total + np.float32(1e-6)))


@kernel_function
def sort_pairs(args, step, tile, scratch):
    """Sort the pairs by expert, and cut the rows of each expert into items.

    Word 0 of row s of ``pairs`` is the token of the pair in place s, and word 1 of row p is the
    place of pair p. An item is the expert, its first place and its number of rows.
    Arguments: routed [T, 2, k], pairs, items, E, k, the word with T.
    """
    routed, pairs, items, experts, chosen, rows_word = words(args, 6)
    num_tokens = word(step, rows_word)
    for expert in range(experts + 1):
        set_word(scratch, expert, 0)
    for token in range(num_tokens):
        for choice in range(chosen):
            expert = int(number(routed, token * 2 * chosen + choice))
            set_word(scratch, expert + 1, word(scratch, expert + 1) + 1)
    count = 0
    for expert in range(experts):
        begin, rows = word(scratch, expert), word(scratch, expert + 1)
        for first in range(begin, begin + rows, BLOCK_ROWS):
            item = items + count * EXPERT_ITEM_WORDS * 8
            set_word(item, 0, expert)
            set_word(item, 1, first)
            set_word(item, 2, min(BLOCK_ROWS, begin + rows - first))
            count += 1
        set_word(scratch, expert + 1, begin + rows)
    set_word(step, NUM_EXPERT_ITEMS, count)
    for token in range(num_tokens):
        for choice in range(chosen):
            expert = int(number(routed, token * 2 * chosen + choice))
            place = word(scratch, expert)
            set_word(scratch, expert, place + 1)
            set_word(pairs, place * PAIR_WORDS, token)
            set_word(pairs, (token * chosen + choice) * PAIR_WORDS + 1, place)


@kernel_function
def take_pairs(args, step, tile, scratch):
    """Copy the row of each pair's token.

    Arguments: x [T, D], pairs, out, D, the word with the number of pairs.
    """
    x, pairs, out, dim, rows_word = words(args, 5)
    end = min(word(step, rows_word), (tile + 1) * ROW_TILE)
    for row in range(tile * ROW_TILE, end):
        source = x + word(pairs, row * PAIR_WORDS) * dim * 4
        for i in range(0, dim, 16):
            v = load_first(source + 4 * i, dim - i)
            store_first(out + (row * dim + i) * 4, v, dim - i)


@kernel_function
def add_pairs(args, step, tile, scratch):
    """Add weighted results to a residual, in the order of a token's choices.

    Arguments: results [pairs, D], routed, pairs, residual, out, D, k, the word with T.
    """
    results, routed, pairs, residual, out, dim, chosen, rows_word = words(args, 8)
    end = min(word(step, rows_word), (tile + 1) * ROW_TILE)
    for row in range(tile * ROW_TILE, end):
        weights = routed + (row * 2 + 1) * chosen * 4
        for i in range(0, dim, 16):
            at, count = (row * dim + i) * 4, dim - i
            v = everywhere(np.float32(0))
            for choice in range(chosen):
                place = word(pairs, (row * chosen + choice) * PAIR_WORDS + 1)
                term = load_first(results + (place * dim + i) * 4, count)
                v = fma(term, everywhere(number(weights, choice)), v)
            store_first(out + at, v + load_first(residual + at, count), count)
