"""Check blocks and tables, ragged batches, and drafts: exercises 3, 4 and 8."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mie.base.reprs import count
from mie.learn.probe import Broken, Probe, audit, called, text_of, wrong_row


def check_3(step: Any, solutions: Mapping[int, Any]) -> None:
    """Check the pool of step 3."""
    probe = Probe({"A": text_of("A", 20)})
    _grow(step, probe)
    _release(step, probe)
    _slots(step, probe)
    pool = step.Pool(probe, 8, 4)
    pool.free = [5, 2, 6, 0, 7, 3, 1, 4]
    seq = step.Sequence("A", text_of("A", 6), 9)
    probe.before = lambda: audit(pool, [seq])
    step.generate(probe, pool, seq)
    check_tokens(probe.texts, [seq])


def _grow(step: Any, probe: Probe) -> None:
    def grown(have: int, length: int, free: int) -> tuple[Any, int, int]:
        """Return the result, the blocks of the table, and the free blocks."""
        pool, seq = step.Pool(probe, have + free, 4), step.Sequence("A", [0], 99)
        before = [pool.take() for _ in range(have)]
        seq.table = [*before]
        result = pool.grow(seq, length)
        if len(seq.table) > have and seq.table[:have] != before:
            seen = f"grow for {length} tokens made the table {seq.table} of {before}."
            raise Broken("blocks in front", seen)
        audit(pool, [seq])
        return result, len(seq.table), len(pool.free)

    for have, length, free in [(0, 5, 4), (0, 8, 4), (2, 8, 4), (2, 9, 4), (1, 8, 1), (0, 4, 1)]:
        right = -(-length // 4)
        result, num, _ = grown(have, length, free)
        case = f"With blocks of 4 and {have} in the table, grow for {length} tokens"
        if num < right and not result and free == right - have:
            raise Broken(
                "last block refused",
                f"{case} refused, although just enough blocks ({free}) are free.",
            )
        if num != right:
            raise Broken(
                "too few blocks" if num < right else "too many blocks",
                f"{case} left {count(num, 'block')} in the table; {right} are needed.",
            )
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
            raise Broken(
                "length changed in a pass",
                f"write has changed num_computed from {begin} to {seq.num_computed}.",
            )
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
    if (pool.k[1, block, place] == k).all():
        if not (pool.v[1, block, place] == v).all():
            raise Broken(
                "keys as values", f"The slot of position {p} holds the right key and a wrong value."
            )
        return
    found = [
        (b, i) for b in range(pool.num_blocks) for i in range(4) if (pool.k[1, b, i] == k).all()
    ]
    right = f"block {block}, place {place}"
    if not found:
        raise Broken("key not stored", f"The key of position {p} is in no slot.")
    other, at = found[0]
    seen = f"The key of position {p} was stored in block {other}, place {at}; {right} is right."
    if (other, at) == (p // 4, place):
        raise Broken("table ignored", seen)
    if begin and (other, at) == (seq.table[(p - begin) // 4], (p - begin) % 4):
        raise Broken("position restarted", seen)
    raise Broken("wrong slot", seen)


def _gathered(array: Any, right: Any, length: int, name: str) -> None:
    if array.ndim != 3 or len(array) != length:
        raise Broken(
            "read is not cut", f"read for {length} tokens returned {name} of shape {array.shape}."
        )
    if not (array == right[:length]).all():
        raise Broken(
            "order of the table",
            f"With the table [5, 2, 6], read returned the {name} in a wrong order.",
        )


def _release(step: Any, probe: Probe) -> None:
    pool, seq = step.Pool(probe, 4, 4), step.Sequence("A", text_of("A", 7), 9)
    pool.free = [3, 1]
    seq.table, seq.num_computed = [2, 0], 7
    pool.release(seq)
    if seq.table and sorted(pool.free) == [0, 1, 2, 3]:
        raise Broken(
            "table kept after release",
            f"After release, the blocks {seq.table} are free and still in the table.",
        )
    if seq.table:
        raise Broken(
            "blocks kept after release",
            f"The table was [2, 0], and after release it is {seq.table}.",
        )
    audit(pool, [seq])
    if seq.num_computed:
        raise Broken(
            "computed without blocks", f"After release, num_computed is {seq.num_computed}."
        )


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
        def write(self, layer: int, seq: Any, k: Any, v: Any) -> None:
            if seq.num_computed != self.starts[seq.name]:
                raise Broken(
                    "length changed in a pass",
                    f"In layer {layer}, num_computed of {seq.name} is {seq.num_computed}, and it "
                    f"was {self.starts[seq.name]} when the step began.",
                )
            if len(k) != self.counts[seq.name]:
                raise Broken(
                    "rows of a sequence",
                    f"{seq.name} computes {count(self.counts[seq.name], 'token')} in this step, "
                    f"and write got {count(len(k), 'key')}.",
                )
            super().write(layer, seq, k, v)

        def read(self, layer: int, seq: Any, length: int) -> Any:
            right = self.starts[seq.name] + self.counts[seq.name]
            if length == self.starts[seq.name]:
                raise Broken(
                    "new keys not read",
                    f"read was called for {count(length, 'token')} of {seq.name}; {right} are "
                    "stored in this layer.",
                )
            return super().read(layer, seq, length)

    return WatchedPool(probe, num_blocks, block_size)


def check_4(step: Any, solutions: Mapping[int, Any]) -> None:
    """Check `run` of step 4."""
    texts = {name: text_of(name, 20) for name in "ABC"}
    probe = Probe(texts)
    pool = watched_pool(solutions[3].Pool, probe, 12, 4)
    pool.free = [5, 2, 6, 0, 7, 3, 1, 4, 11, 9, 10, 8]
    a, b, c = (
        solutions[3].Sequence(name, text_of(name, num), 9)
        for name, num in [("A", 5), ("B", 7), ("C", 2)]
    )
    for batch in (
        [(a, 5)],
        [(a, 1), (b, 4)],
        [(b, 3), (a, 1)],
        [(c, 2), (a, 1), (b, 1)],
        [(b, 1), (c, 1)],
    ):
        _run(step, probe, pool, batch)


def _run(step: Any, probe: Probe, pool: Any, batch: list[tuple[Any, int]]) -> None:
    shown = ", ".join(f"({seq.name}, {num})" for seq, num in batch)
    before = {seq.name: list(seq.tokens) for seq, _ in batch}
    pool.starts = {seq.name: seq.num_computed for seq, _ in batch}
    pool.counts = {seq.name: num for seq, num in batch}
    for seq, num in batch:
        assert pool.grow(seq, seq.num_computed + num)
    passes = probe.num_passes
    case = f"After the pass over the batch [{shown}], run"
    _with_logits(probe, case, step.run, probe, pool, list(batch))
    if probe.num_passes != passes + 1:
        raise Broken(
            "one pass",
            f"run called model.forward {probe.num_passes - passes} times for the batch [{shown}].",
        )
    for seq, num in batch:
        end = pool.starts[seq.name] + num
        if seq.num_computed != end:
            raise Broken(
                "computed not counted",
                f"After the batch [{shown}], num_computed of {seq.name} is {seq.num_computed}; "
                f"{count(end, 'stored token')} would be right.",
            )
        new = len(seq.tokens) - len(before[seq.name])
        is_whole = end == len(before[seq.name])
        if new and not is_whole:
            raise Broken(
                "token inside the prompt",
                f"{seq.name} got a new token after {end} of {len(before[seq.name])} tokens.",
            )
        if new != is_whole:
            raise Broken(
                "number of tokens",
                f"After the batch [{shown}], {seq.name} got {count(new, 'new token')}.",
            )
    check_tokens(probe.texts, [seq for seq, _ in batch])


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
        ([4, 9, 4], 1, [9], "guess finds the end itself"),
        ([7, 1, 2, 5, 9, 2, 6, 7, 1, 2], 1, [5], "shorter run first"),
        ([7, 7], 1, [7], "nearest place"),
        ([1, 2, 5, 1, 2, 6, 1, 2], 1, [6], "earliest place"),
        ([1, 2, 3, 9, 1, 2], 2, [3, 9], "drafts follow the place"),
        ([1, 1, 1, 1], 0, [], "too many drafts"),
    ):
        found = guess(given := list(tokens), most)
        if found is None or [*found] != right or given != tokens:
            too_many = found and found[:most] == right
            raise Broken(
                "too many drafts" if too_many else rule,
                f"guess({tokens}, most={most}) is {found}; {right} is right.",
            )


def _verify(step: Any, solutions: Mapping[int, Any]) -> None:
    text = text_of("A", 40)
    probe = Probe({"A": text})
    probe.drafts = True
    pool = solutions[3].Pool(probe, 12, 4)
    pool.free = [5, 2, 6, 0, 7, 3, 1, 4, 11, 9, 10, 8]
    seq = solutions[3].Sequence("A", text[:5], 30)
    _short(step, solutions)
    wrong = [501, 502, 503]
    for num_right, wrongs in [(0, 0), (2, 1), (0, 2), (3, 0), (0, 1), (1, 2)]:
        known = len(seq.tokens)
        drafts = text[known : known + num_right] + wrong[:wrongs]
        if wrongs == 2:  # a draft that is right at its place, behind a wrong one
            drafts[-1] = text[known + num_right + 1]
        _verified(step, probe, pool, seq, drafts, num_right)


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


def _verified(
    step: Any, probe: Probe, pool: Any, seq: Any, drafts: list[int], num_right: int
) -> None:
    text, known = probe.texts["A"], len(seq.tokens)
    passes, given = probe.num_passes, list(drafts)
    case = f"With {len(drafts)} drafts, the first {num_right} of them right,"
    if num_right == len(drafts):
        case = f"With {count(num_right, 'right draft')}," if drafts else "Without drafts,"
    result = _with_logits(probe, f"{case} verify", step.verify, probe, pool, seq, given)
    if probe.num_passes != passes + 1:
        raise Broken(
            "one pass", f"{case} verify called model.forward {probe.num_passes - passes} times."
        )
    right = text[: known + num_right + 1]
    num_new = len(seq.tokens) - known
    seen = f"{case} the sequence got {count(num_new, 'token')}; {num_right + 1} would be right."
    if len(seq.tokens) == len(right) - 1 and seq.tokens == right[:-1]:
        raise Broken("own token missing", seen)
    if num_new > num_right + 1:
        raise Broken("wrong draft kept", seen)
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
        pool, seq = solutions[3].Pool(probe, 6, 4), solutions[3].Sequence("A", [0], 20)
        pool.grow(seq, 16)
        seq.num_computed = num_computed
        table = list(seq.table)
        step.trim(pool, seq)
        right = table[: -(-num_computed // 4)]
        seen = (
            f"With {num_computed} computed tokens in blocks of 4, trim made the table {seq.table} "
            f"of {table}; {right} is right."
        )
        if len(seq.table) < len(right):
            raise Broken("block freed too early", seen)
        audit(pool, [seq])
        if seq.table != right:
            raise Broken("blocks not trimmed", seen)
