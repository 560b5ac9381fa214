"""Check blocks and tables, ragged batches, and drafts: exercises 3, 4 and 8."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mie.base.reprs import count
from mie.learn.probe import (
    Broken,
    Probe,
    audit,
    called,
    counted,
    numpy_with_marks,
    text_of,
    wrong_row,
)


def check_3(step: Any, solutions: Mapping[int, Any]) -> None:
    """Check the pool of step 3."""
    probe = Probe({"A": text_of("A", 20)})
    _grow(step, probe)
    _release(step, probe)
    _slots(step, probe)
    pool = step.Pool(probe, 8, 4)
    pool.free = [5, 2, 6, 0, 7, 3, 1, 4]
    seq = step.Sequence("A", text_of("A", 6), 9)
    probe.before = lambda tokens: audit(pool, [seq])
    step.generate(probe, pool, seq)
    check_tokens(probe.texts, [seq])


def _grow(step: Any, probe: Probe) -> None:
    def grown(have: int, length: int, free: int) -> tuple[Any, int, int]:
        """Return the result, the blocks of the table, and the free blocks."""
        pool, seq = counted(step.Pool)(probe, have + free, 4), step.Sequence("A", [0] * 12, 99)
        before = [pool.take() for _ in range(have)]
        seq.table = [*before]
        result = pool.grow(seq, length)
        if len(seq.table) > have and seq.table[:have] != before:
            seen = f"grow for {length} tokens made the table {seq.table} of {before}."
            raise Broken("blocks in front", seen)
        audit(pool, [seq])
        return result, len(seq.table), len(pool.free)

    for have, length, free in [
        (0, 5, 4),
        (0, 8, 4),
        (2, 8, 4),
        (2, 9, 4),
        (1, 8, 1),
        (0, 4, 1),
        (0, 24, 8),
    ]:
        right = -(-length // 4)
        result, num, _ = grown(have, length, free)
        case = f"With blocks of 4 and {have} in the table, grow for {length} tokens"
        if num < right and not result and num == have:
            rule = "last block refused" if free == right - have else "refused without need"
            raise Broken(rule, f"{case} took none: {right - have} missing, and {free} free.")
        if num != right:
            seen = f"{case} left {count(num, 'block')} in the table; {right} are needed."
            raise Broken("too few blocks" if num < right else "too many blocks", seen)
        if result is None or not result:
            raise Broken("grow returns nothing", f"{case} took the blocks and returned {result!r}.")
    case = "3 blocks were missing and 2 were free: grow"
    result, num, left = called("all or nothing", case, grown, 1, 16, 2)
    if num != 1 or left != 2:
        raise Broken("all or nothing", f"{case} took {num - 1}.")
    if result is None or result:
        raise Broken("shortage not reported", f"{case} returned {result!r}.")


def _slots(step: Any, probe: Probe) -> None:
    """Check `write` and `read` with a table in no order."""
    pool, seq = step.Pool(probe, 8, 4), step.Sequence("A", text_of("A", 10), 9)
    pool.free.clear()
    seq.table = [5, 2, 6]
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 10, 1, probe.config["head_dim"]))
    for begin, end in [(0, 3), (3, 9), (9, 10)]:
        seq.num_computed = begin
        pool.write(1, seq, k[begin:end], v[begin:end])
        if seq.num_computed != begin:
            seen = f"write has changed num_computed from {begin} to {seq.num_computed}."
            raise Broken("length changed in a pass", seen)
        if pool.k[0].any():
            raise Broken("layers mixed", "write of layer 1 has changed keys of layer 0.")
        for p in range(begin, end):
            _slot(pool, seq, p, begin, k[p], v[p])
    for length in (10, 8, 5):
        read = tuple(pool.read(1, seq, length))
        if len(read) != 2:
            raise Broken("read returns two arrays", f"read returned {len(read)} values.")
        for array, right, name in zip(read, (k, v), ("keys", "values"), strict=True):
            _gathered(np.asarray(array), right, length, name)


def _slot(pool: Any, seq: Any, p: int, begin: int, k: Any, v: Any) -> None:
    block, place = seq.table[p // 4], p % 4
    for name, array, right_row in (("key", pool.k, k), ("value", pool.v, v)):
        error = np.abs(array[1, block, place] - right_row).max()
        if 0 < error < 0.01:
            raise Broken("rounded", f"The stored {name} of position {p} differs by {error:.1e}.")
    if (pool.k[1, block, place] == k).all():
        if not (pool.v[1, block, place] == v).all():
            seen = f"The slot of position {p} holds the right key and a wrong value."
            raise Broken("keys as values", seen)
        return
    found = [
        (b, i) for b in range(pool.num_blocks) for i in range(4) if (pool.k[1, b, i] == k).all()
    ]
    right = f"block {block}, place {place}"
    if not found:
        raise Broken("key not stored", f"The key of position {p} is at no place.")
    other, at = found[0]
    seen = f"The key of position {p} was stored in block {other}, place {at}; {right} is right."
    if (other, at) == (p // 4, place):
        raise Broken("table ignored", seen)
    if begin and (other, at) == (seq.table[(p - begin) // 4], (p - begin) % 4):
        raise Broken("position restarted", seen)
    raise Broken("wrong slot", seen)


def _gathered(array: Any, right: Any, length: int, name: str) -> None:
    if array.ndim != 3 or len(array) != length:
        seen = f"read for {length} tokens returned {name} of shape {array.shape}."
        if len(array) < length and array.ndim == 3:
            seen = f"read returned {len(array)} {name} for length {length}."
        raise Broken("length of read", seen)
    error = np.abs(array - right[:length]).max()
    if 0 < error < 0.01:
        raise Broken("rounded", f"The {name} of read differ from the stored ones by {error:.1e}.")
    if (array == np.concatenate([right, 0 * right[:2]])[-length:]).all() and error:
        seen = f"read for {length} tokens returned the last {length} {name} of the blocks."
        raise Broken("length of read", seen)
    if error:
        seen = f"With the table [5, 2, 6], read returned the {name} in a wrong order."
        raise Broken("order of the table", seen)


def _release(step: Any, probe: Probe) -> None:
    pool, seq = counted(step.Pool)(probe, 4, 4), step.Sequence("A", text_of("A", 7), 9)
    pool.free, pool.num_out = [3, 1], 2
    seq.table, seq.num_computed = [2, 0], 7
    pool.release(seq)
    if not isinstance(seq.table, list):
        raise Broken("table is a list", f"After release, the table is {seq.table!r}; [] is right.")
    if seq.table and sorted(pool.free) == [0, 1, 2, 3]:
        seen = f"After release, the blocks {seq.table} are free and still in the table."
        raise Broken("table kept after release", seen)
    if seq.table:
        seen = f"The table was [2, 0], and after release it is {seq.table}."
        raise Broken("blocks kept after release", seen)
    audit(pool, [seq])
    if seq.num_computed:
        seen = f"After release, num_computed is {seq.num_computed}."
        raise Broken("computed without blocks", seen)


def check_tokens(texts: Mapping[str, list[int]], seqs: Sequence[Any]) -> None:
    """Compare the tokens of sequences with the texts."""
    for seq in seqs:
        text = texts[seq.name]
        for at, token in enumerate(seq.tokens):
            if at >= len(text) or token != text[at]:
                raise wrong_row(seq.name, token, at, texts)


def watched_pool(pool_class: Any, probe: Probe, num_blocks: int, block_size: int) -> Any:
    """Return a pool that checks how a batch writes and reads.

    ``starts`` and ``counts`` of the pool must have num_computed and the number of tokens of each
    sequence before a step.
    """

    class WatchedPool(pool_class):  # type: ignore[misc]  # the class of a solution
        def attended(self, layer: int, num: int) -> None:
            left = [name for name in self.counts if (layer, name) not in self.written]
            if left and num == sum(self.counts.values()):
                seen = f"In layer {layer}, attend returned before the keys of {', '.join(left)} "
                raise Broken("sequence left out", f"{seen}were stored.")

        def write(self, layer: int, seq: Any, k: Any, v: Any) -> None:
            self.written.add((layer, seq.name))
            if seq.num_computed != self.starts[seq.name]:
                seen = f"In layer {layer}, num_computed of {seq.name} is {seq.num_computed}, and "
                seen += f"it was {self.starts[seq.name]} when the step began."
                raise Broken("length changed in a pass", seen)
            if len(k) != self.counts[seq.name]:
                seen = f"{seq.name} computes {count(self.counts[seq.name], 'token')} in this step, "
                seen += f"and write got {count(len(k), 'key')}."
                raise Broken("rows of a sequence", seen)
            super().write(layer, seq, k, v)

        def read(self, layer: int, seq: Any, length: int) -> Any:
            right = self.starts[seq.name] + self.counts[seq.name]
            if length == self.starts[seq.name] or length > right:
                seen = f"read was called for {count(length, 'token')} of {seq.name}; {right} are "
                seen += "stored in this layer."
                raise Broken("length of read" if length > right else "new keys not read", seen)
            return super().read(layer, seq, length)

    pool = WatchedPool(probe, num_blocks, block_size)
    probe.after = pool.attended
    return pool


def check_4(step: Any, solutions: Mapping[int, Any]) -> None:
    """Check `run` of step 4."""
    step.np = numpy_with_marks()
    texts = {name: text_of(name, 20) for name in "ABC"}
    probe = Probe(texts)
    pool = watched_pool(solutions[3].Pool, probe, 12, 4)
    pool.free = [5, 2, 6, 0, 7, 3, 1, 4, 11, 9, 10, 8]
    a, b, c = (
        solutions[3].Sequence(name, text_of(name, num), most)
        for name, num, most in [("A", 5, 9), ("B", 7, 9), ("C", 2, 2)]
    )
    for batch in (
        [(a, 5)],
        [(a, 1), (b, 4)],
        [(b, 2), (a, 1)],
        [(b, 1), (a, 1)],
        [(c, 2), (a, 1), (b, 1)],
        [(b, 1), (c, 1)],
    ):
        _run(step, probe, pool, batch)


def _run(step: Any, probe: Probe, pool: Any, batch: list[tuple[Any, int]]) -> None:
    shown = ", ".join(f"({seq.name}, {num})" for seq, num in batch)
    before = {seq.name: list(seq.tokens) for seq, _ in batch}
    pool.starts = {seq.name: seq.num_computed for seq, _ in batch}
    pool.counts = {seq.name: num for seq, num in batch}
    pool.written = set()
    probe.before = lambda tokens: _line(tokens, before, pool)
    for seq, num in batch:
        assert pool.grow(seq, seq.num_computed + num)
    passes = probe.num_passes
    case = f"After the pass over the batch [{shown}], run"
    _with_logits(probe, case, step.run, probe, pool, list(batch))
    if probe.num_passes != passes + 1:
        seen = f"run called model.forward {probe.num_passes - passes} times for the batch "
        raise Broken("one pass", f"{seen}[{shown}].")
    for seq, num in batch:
        end = pool.starts[seq.name] + num
        if seq.num_computed != end:
            seen = f"After the batch [{shown}], num_computed of {seq.name} is {seq.num_computed}; "
            seen += f"{count(end, 'stored token')} would be right."
            raise Broken("computed not counted", seen)
        new = len(seq.tokens) - len(before[seq.name])
        is_whole = end == len(before[seq.name])
        if new and not is_whole:
            seen = f"{seq.name} got a new token after {end} of {len(before[seq.name])} tokens."
            raise Broken("token inside the prompt", seen)
        if new != is_whole:
            seen = f"After the batch [{shown}], {seq.name} got {count(new, 'new token')}."
            raise Broken("number of tokens", seen)
    check_tokens(probe.texts, [seq for seq, _ in batch])


def _line(tokens: list[int], texts: Mapping[str, list[int]], pool: Any) -> None:
    """Check which tokens of each sequence are in the line."""
    for name, text in texts.items():
        start, num = pool.starts[name], pool.counts[name]
        places = sorted(text.index(token) for token in tokens if token in text)
        if places != [*range(start, start + num)]:
            seen = f"{start} of {len(text)} tokens of {name} are computed, and this step computes "
            seen += f"{num} more; the line has the tokens of {name} at positions {places}."
            raise Broken("tokens of a step", seen)


def _with_logits(probe: Probe, case: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return a function's result. An IndexError after the pass is a wrong row of the logits."""
    num_ended = probe.num_ended
    try:
        return function(*args)
    except IndexError as error:
        if probe.num_ended == num_ended:
            raise
        raise Broken("row of logits", f"{case} raised IndexError: {error}.") from error


# Drafts.


def check_8(step: Any, solutions: Mapping[int, Any]) -> None:
    """Check `guess`, `verify` and `trim` of step 8."""
    _guess(step.guess)
    _verify(step, solutions)
    _trim(step, solutions)


def _guess(guess: Any) -> None:
    for tokens, most, right, rule in (
        ([1, 2, 3], 2, [], "guess without a place"),
        ([5], 3, [], "guess without a place"),
        ([8, 4, 5, 9, 4, 5], 1, [9], "no draft found"),
        ([8, 4, 9, 4], 1, [9], "one last token"),
        ([4, 9, 4], 1, [9], "first place left out"),
        ([7, 1, 2, 5, 9, 2, 6, 7, 1, 2], 1, [5], "shorter run first"),
        ([3, 1, 2, 5, 9, 7, 1, 2, 5, 8, 3, 1, 2, 5], 1, [9], "shorter run first"),
        ([7, 7], 1, [7], "nearest place"),
        ([1, 2, 9, 1, 2], 4, [9, 1, 2], "few tokens behind"),
        ([1, 1, 1, 1, 1], 3, [1], "places overlap"),
        ([6, 5, *range(10, 60), 6], 1, [5], "far place left out"),
        ([1, 2, 5, 1, 2, 6, 1, 2], 1, [6], "earliest place"),
        ([1, 2, 3, 9, 1, 2], 2, [3, 9], "drafts follow the place"),
        ([1, 1, 1, 1], 0, [], "too many drafts"),
    ):
        found = guess(given := list(tokens), most)
        if found is None or [*found] != right or given != tokens:
            if found and right and found[:most] == right:
                rule = "too many drafts"
            elif found and found[: len(right)] != right and found[0] in tokens[-2:]:
                rule = "drafts follow the place" if rule == "no draft found" else rule
            shown = f"{tokens}" if len(tokens) < 20 else f"{tokens[:4]} + … + {tokens[-2:]}"
            raise Broken(rule, f"guess({shown}, most={most}) is {found}; {right} is right.")


def _verify(step: Any, solutions: Mapping[int, Any]) -> None:
    text = text_of("A", 40)
    probe = Probe({"A": text})
    probe.drafts = True
    pool = solutions[3].Pool(probe, 12, 4)
    pool.free = [5, 2, 6, 0, 7, 3, 1, 4, 11, 9, 10, 8]
    seq = solutions[3].Sequence("A", text[:5], 30)
    wrong = [501, 502, 503]
    for num_right, wrongs in [(0, 0), (2, 1), (0, 2), (3, 0), (0, 1), (1, 2), (5, 0)]:
        known = len(seq.tokens)
        drafts = text[known : known + num_right] + wrong[:wrongs]
        if wrongs == 2:  # a draft that is right at its place, behind a wrong one
            drafts[-1] = text[known + num_right + 1]
        _verified(step, probe, pool, seq, drafts, num_right)
    _short(step, solutions)


def _short(step: Any, solutions: Mapping[int, Any]) -> None:
    """Check that a lack of blocks is reported."""
    probe = Probe({"A": text_of("A", 20)})
    pool, seq = solutions[3].Pool(probe, 1, 4), solutions[3].Sequence("A", text_of("A", 3), 9)
    rule, case = "shortage not reported", "6 tokens need 2 blocks, 1 is free, and verify"
    try:
        called(rule, case, step.verify, probe, pool, seq, probe.texts["A"][3:6])
    except Broken as broken:
        if not isinstance(broken.__cause__, MemoryError):
            raise
    else:
        raise Broken(rule, f"{case} raised nothing.")
    if seq.tokens != probe.texts["A"][:3]:
        seen = f"{case} raised MemoryError, and left {count(len(seq.tokens), 'token')} of 3."
        raise Broken("drafts left in the text", seen)


def _verified(
    step: Any, probe: Probe, pool: Any, seq: Any, drafts: list[int], num_right: int
) -> None:
    text, known = probe.texts["A"], len(seq.tokens)
    passes, given = probe.num_passes, list(drafts)
    case = f"With {len(drafts)} drafts, the first {num_right} of them right,"
    if num_right == len(drafts):
        case = f"With {count(num_right, 'right draft')}," if drafts else "Without drafts,"
    needed = len(probe.entries) + known - seq.num_computed + len(drafts)
    start = seq.num_computed

    def before(tokens: list[int]) -> None:
        if len(seq.table) * 4 < start + len(tokens):
            seen = f"{case} the pass computes token {start + len(tokens)}, and the table has "
            raise Broken("too few blocks", f"{seen}{count(len(seq.table), 'block')} of 4 tokens.")

    probe.before = before
    result = _with_logits(probe, f"{case} verify", step.verify, probe, pool, seq, given)
    if given != drafts:
        raise Broken("drafts changed", f"{case} verify changed the caller's list of drafts.")
    if probe.num_passes != passes + 1:
        seen = f"{case} verify called model.forward {probe.num_passes - passes} times."
        raise Broken("one pass", seen)
    if len(probe.entries) < needed:
        seen = f"{case} the pass left out {count(needed - len(probe.entries), 'token')}."
        raise Broken("drafts not computed", seen)
    right = text[: known + num_right + 1]
    num_new = len(seq.tokens) - known
    seen = f"{case} the sequence got {count(num_new, 'token')}; {num_right + 1} would be right."
    if len(seq.tokens) == len(right) - 1 and seq.tokens == right[:-1]:
        raise Broken("own token missing", seen)
    if num_new > num_right + 1:
        is_all = drafts and seq.tokens[known:][: len(drafts)] == drafts
        raise Broken("all drafts kept" if is_all else "wrong draft kept", seen)
    if drafts[num_right:] and seq.tokens[known + num_right :] == drafts[num_right : num_right + 1]:
        raise Broken("wrong draft kept", f"{case} the last new token is the wrong draft.")
    check_tokens(probe.texts, [seq])
    if num_new < num_right + 1:
        raise Broken("right draft dropped", seen)
    more = seq.num_computed - (known + num_right)
    if more > 0:
        rule = "wrong draft counted" if drafts else "own token counted"
    else:
        rule = "computed not counted" if -more > num_right else "right draft computed again"
    if more:
        right_num = f"{known + num_right} would be right"
        raise Broken(rule, f"{case} num_computed is {seq.num_computed}; {right_num}.")
    if result != num_right:
        raise Broken("number of right drafts", f"{case} verify returned {result!r}.")


def _trim(step: Any, solutions: Mapping[int, Any]) -> None:
    probe = Probe({"A": text_of("A", 20)})
    for num_computed in (5, 8, 16):
        tokens = text_of("A", num_computed + 1)
        pool, seq = solutions[3].Pool(probe, 6, 4), solutions[3].Sequence("A", tokens, 20)
        pool.grow(seq, 16)
        seq.num_computed = num_computed
        table = list(seq.table)
        step.trim(pool, seq)
        right = table[: -(-num_computed // 4)]
        seen = f"With {num_computed} computed tokens in blocks of 4, trim made the table "
        seen += f"{seq.table} of {table}; {right} is right."
        if len(seq.table) < len(right):
            raise Broken("block freed too early", seen)
        if seq.table == table != right and {*table[len(right) :]} <= {*pool.free}:
            raise Broken("freed and still in the table", seen)
        audit(pool, [seq])
        if seq.table != right:
            raise Broken("blocks not trimmed", seen)
