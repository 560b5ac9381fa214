"""Check blocks and tables, ragged batches, and drafts: exercises 3, 4 and 8."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mie.learn.probe import Broken, Probe, audit, text_of, wrong_row

_WRITE_RULE = (
    "The first new token has position num_computed. The token at position p lies in block "
    "table[p // block_size], at place p % block_size."
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
    probe.before = lambda: audit(pool, [seq])
    step.generate(probe, pool, seq)
    check_tokens(probe.texts, [seq])


def _grow(step: Any, probe: Probe) -> None:
    def grown(have: int, length: int, free: int) -> tuple[Any, int, int]:
        """Return the result, the blocks of the table, and the free blocks."""
        pool, seq = step.Pool(probe, have + free, 4), step.Sequence("A", [0], 99)
        seq.table = [pool.take() for _ in range(have)]
        result = pool.grow(seq, length)
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
                "If as many blocks are free as are missing, the sequence gets them.",
            )
        if num < right:
            raise Broken(
                "too few blocks",
                f"{case} left {num} blocks in the table; {right} are needed.",
                "length / block_size is rounded up: a partly filled block is a block too.",
            )
        if num > right:
            raise Broken(
                "too many blocks",
                f"{case} left {num} blocks in the table; {right} are needed.",
                "The table may have blocks already. Take the missing ones only, and count a full "
                "last block as full.",
            )
        if result is None or not result:
            raise Broken(
                "grow returns nothing",
                f"{case} took the blocks and returned {result!r}.",
                "grow returns True if the sequence has its blocks, and False if too few are free.",
            )
    result, num, left = grown(1, 16, 2)
    if num != 1 or left != 2:
        raise Broken(
            "all or nothing",
            f"3 blocks were missing and 2 were free: grow took {num - 1}.",
            "All or nothing: if too few blocks are free, take none and return False. Two "
            "sequences that each hold a part would wait for each other.",
        )
    if result is None or result:
        raise Broken(
            "shortage not reported",
            f"3 blocks were missing and 2 were free: grow returned {result!r}.",
            "If too few blocks are free, return False. The scheduler reacts to it.",
        )


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
                "Every layer calls write once in a pass. num_computed changes after the pass.",
            )
        if pool.k[0].any():
            raise Broken(
                "layers mixed",
                "write of layer 1 has changed keys of layer 0.",
                "Each layer has keys and values of its own: self.k[layer, …].",
            )
        for p in range(begin, end):
            _slot(pool, seq, p, begin, k[p], v[p])
    for length in (10, 8, 5):
        read = tuple(pool.read(1, seq, length))
        if len(read) != 2:
            raise Broken(
                "read returns two arrays",
                f"read returned {len(read)} values.",
                "It returns the keys, and then the values.",
            )
        for array, right, name in zip(read, (k, v), ("keys", "values"), strict=True):
            _gathered(np.asarray(array), right, length, name)


def _slot(pool: Any, seq: Any, p: int, begin: int, k: Any, v: Any) -> None:
    block, place = seq.table[p // 4], p % 4
    if (pool.k[1, block, place] == k).all():
        if not (pool.v[1, block, place] == v).all():
            raise Broken(
                "keys as values",
                f"The slot of position {p} holds the right key and a wrong value.",
                "Keys and values are stored apart: k in self.k, and v in self.v.",
            )
        return
    found = [
        (b, i) for b in range(pool.num_blocks) for i in range(4) if (pool.k[1, b, i] == k).all()
    ]
    right = f"block {block}, place {place}"
    if not found:
        raise Broken("key not stored", f"The key of position {p} is in no slot.", _WRITE_RULE)
    other, at = found[0]
    seen = f"The key of position {p} was stored in block {other}, place {at}; {right} is right."
    if (other, at) == (p // 4, place):
        raise Broken(
            "table ignored",
            seen,
            "p // block_size is an index into the table, not the number of a block. The blocks of "
            "a table can be any blocks.",
        )
    if begin and (other, at) == (seq.table[(p - begin) // 4], (p - begin) % 4):
        raise Broken(
            "position restarted",
            seen,
            "New keys lie behind the computed ones: the first new token has position "
            "num_computed, not 0.",
        )
    raise Broken("wrong slot", seen, _WRITE_RULE)


def _gathered(array: Any, right: Any, length: int, name: str) -> None:
    if array.ndim != 3 or len(array) != length:
        raise Broken(
            "read is not cut",
            f"read for {length} tokens returned {name} of shape {array.shape}.",
            "read returns [length, kv_heads, dim]: cut off the unused end of the last block.",
        )
    if not (array == right[:length]).all():
        raise Broken(
            "order of the table",
            f"With the table [5, 2, 6], read returned the {name} in a wrong order.",
            "Gather the blocks in the order of the table. The block numbers have no order.",
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
            "A block that is freed must leave the table. Otherwise two sequences write into it.",
        )
    if seq.table:
        raise Broken(
            "blocks kept after release",
            f"The table was [2, 0], and after release it is {seq.table}.",
            "release gives back all blocks. A loop over seq.table that also removes from it skips "
            "every second one.",
        )
    audit(pool, [seq])
    if seq.num_computed:
        raise Broken(
            "computed without blocks",
            f"After release, num_computed is {seq.num_computed}.",
            "The keys are gone, so no token is computed any more.",
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
                    "Every layer calls attend. If num_computed changes there, the next layer "
                    "stores its keys elsewhere. Change it after model.forward.",
                )
            if len(k) != self.counts[seq.name]:
                raise Broken(
                    "rows of a sequence",
                    f"{seq.name} computes {self.counts[seq.name]} tokens in this step, and write "
                    f"got {len(k)} keys.",
                    "Sequence i owns the rows ends[i] to ends[i + 1] of the line, with ends[0] = "
                    "0.",
                )
            super().write(layer, seq, k, v)

        def read(self, layer: int, seq: Any, length: int) -> Any:
            right = self.starts[seq.name] + self.counts[seq.name]
            if length == self.starts[seq.name]:
                raise Broken(
                    "new keys not read",
                    f"read got {length} tokens of {seq.name}; {right} are stored in this layer.",
                    "The new queries also read the new keys: num_computed + count tokens.",
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
    shown = ", ".join(f"({seq.name}, {count})" for seq, count in batch)
    before = {seq.name: list(seq.tokens) for seq, _ in batch}
    pool.starts = {seq.name: seq.num_computed for seq, _ in batch}
    pool.counts = {seq.name: count for seq, count in batch}
    for seq, count in batch:
        assert pool.grow(seq, seq.num_computed + count)
    passes = probe.num_passes
    step.run(probe, pool, list(batch))
    if probe.num_passes != passes + 1:
        raise Broken(
            "one pass",
            f"run called model.forward {probe.num_passes - passes} times for the batch [{shown}].",
            "The tokens of all sequences are one line, and one pass reads the weights once for "
            "all.",
        )
    for seq, count in batch:
        end = pool.starts[seq.name] + count
        if seq.num_computed != end:
            raise Broken(
                "computed not counted",
                f"After the batch [{shown}], num_computed of {seq.name} is {seq.num_computed}; "
                f"{end} tokens are stored.",
                "After the pass, num_computed grows by the number of computed tokens.",
            )
        new = len(seq.tokens) - len(before[seq.name])
        is_whole = end == len(before[seq.name])
        if new and not is_whole:
            raise Broken(
                "token inside the prompt",
                f"{seq.name} got a new token after {end} of {len(before[seq.name])} tokens.",
                "A sequence with a part of its prompt left gets no token: the next tokens are "
                "known already.",
            )
        if new != is_whole:
            raise Broken(
                "number of tokens",
                f"After the batch [{shown}], {seq.name} got {new} new tokens.",
                "A sequence with all tokens computed gets one new token.",
            )
    check_tokens(probe.texts, [seq for seq, _ in batch])


# Drafts.


def check_8(step: Any, solutions: Mapping[int, Any]) -> None:
    """Check `guess`, `verify` and `trim` of step 8."""
    _guess(step.guess)
    _verify(step, solutions)
    _trim(step, solutions)


def _guess(guess: Any) -> None:
    def asked(tokens: list[int], most: int, rule: str, right: list[int], must: str) -> None:
        given = list(tokens)
        found = guess(given, most)
        if found is None or [*found] != right or given != tokens:
            raise Broken(rule, f"guess({tokens}, most={most}) is {found}; {right} is right.", must)

    latest = "Of several places the latest one counts: a text resembles its last sentences most."
    asked([1, 2, 3], 2, "guess without a place", [], "Without an earlier place there is no draft.")
    asked([5], 3, "guess without a place", [], "Without an earlier place there is no draft.")
    asked(
        [4, 9, 4],
        1,
        "guess finds the end itself",
        [9],
        "The end of the text is no earlier place: a place begins before len(tokens) - size.",
    )
    asked(
        [7, 1, 2, 5, 9, 2, 6, 7, 1, 2],
        1,
        "shorter run first",
        [5],
        "The longest run of equal last tokens counts: try ``longest`` first, then fewer.",
    )
    asked(
        [7, 7],
        1,
        "nearest place",
        [7],
        "The last token may equal the token just before it. A place begins at len(tokens) - size - "
        "1 "
        "at the latest.",
    )
    asked([1, 2, 5, 1, 2, 6, 1, 2], 1, "earliest place", [6], latest)
    asked(
        [1, 2, 3, 9, 1, 2],
        2,
        "drafts follow the place",
        [3, 9],
        "The drafts are the tokens that follow the earlier place, at most ``most``.",
    )
    asked([1, 1, 1, 1], 0, "too many drafts", [], "At most ``most`` drafts are returned.")


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
    try:
        step.verify(probe, pool, seq, probe.texts["A"][3:6])
        seen = "raised nothing"
    except MemoryError:
        return
    except NotImplementedError:
        raise
    except Exception as error:
        seen = f"raised {type(error).__name__}"
    raise Broken(
        "shortage not reported",
        f"6 tokens need 2 blocks, 1 is free, and verify {seen}.",
        "If pool.grow returns False, raise MemoryError: the tokens would have no slots.",
    )


def _verified(
    step: Any, probe: Probe, pool: Any, seq: Any, drafts: list[int], num_right: int
) -> None:
    text, known = probe.texts["A"], len(seq.tokens)
    passes, given = probe.num_passes, list(drafts)
    result = step.verify(probe, pool, seq, given)
    case = f"With {len(drafts)} drafts, the first {num_right} of them right,"
    if probe.num_passes != passes + 1:
        raise Broken(
            "one pass",
            f"{case} verify called model.forward {probe.num_passes - passes} times.",
            "All drafts are computed in one pass. That is the gain.",
        )
    right = text[: known + num_right + 1]
    if len(seq.tokens) == len(right) - 1 and seq.tokens == right[:-1]:
        raise Broken(
            "own token missing",
            f"{case} the sequence got {num_right} tokens.",
            "After the right drafts comes one more token: the model's own, from the row of the "
            "last "
            "right draft. So each step gives at least one token.",
        )
    if len(seq.tokens) > len(right):
        raise Broken(
            "wrong draft kept",
            f"{case} the sequence got {len(seq.tokens) - known} tokens; {num_right + 1} are right.",
            "Stop at the first wrong draft. The drafts and rows behind it follow from a wrong "
            "token.",
        )
    check_tokens(probe.texts, [seq])
    if len(seq.tokens) < len(right):
        raise Broken(
            "right draft dropped",
            f"{case} the sequence got {len(seq.tokens) - known} tokens; {num_right + 1} are right.",
            "The row of the last known token checks the first draft. The row of draft i checks "
            "draft i + 1.",
        )
    if seq.num_computed > known + num_right:
        raise Broken(
            "wrong draft counted",
            f"{case} num_computed is {seq.num_computed}; {known + num_right} is right.",
            "Only the known tokens and the right drafts count as computed. The next pass writes "
            "over "
            "the keys of wrong drafts.",
        )
    if seq.num_computed < known + num_right:
        raise Broken(
            "right draft computed again",
            f"{case} num_computed is {seq.num_computed}; {known + num_right} is right.",
            "The keys of right drafts are stored and right, so they count as computed.",
        )
    if result != num_right:
        raise Broken(
            "number of right drafts",
            f"{case} verify returned {result!r}.",
            "verify returns the number of right drafts.",
        )


def _trim(step: Any, solutions: Mapping[int, Any]) -> None:
    probe = Probe({"A": text_of("A", 20)})
    for num_computed in (5, 8, 16):
        pool, seq = solutions[3].Pool(probe, 6, 4), solutions[3].Sequence("A", [0], 20)
        pool.grow(seq, 16)
        seq.num_computed = num_computed
        table = list(seq.table)
        step.trim(pool, seq)
        right = -(-num_computed // 4)
        seen = f"With {num_computed} computed tokens in blocks of 4, trim left {len(seq.table)}"
        if len(seq.table) < right:
            raise Broken(
                "block freed too early",
                f"{seen} blocks; {right} hold keys.",
                "Round up: a partly filled block holds keys too.",
            )
        audit(pool, [seq])
        if seq.table != table[:right]:
            raise Broken(
                "blocks not trimmed",
                f"{seen} blocks; {right} hold keys.",
                "The blocks behind the last computed token go back to the pool.",
            )
