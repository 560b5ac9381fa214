"""Check shared blocks and copy-on-write: exercise 6."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mie.base.reprs import count
from mie.learn.checks.engine import Driver
from mie.learn.probe import Broken, Probe, called, text_of

_PREFIX = list(range(900, 908))


def check_6(step: Any, solutions: Mapping[int, Any]) -> None:
    """Check the pool and the engine of step 6."""
    sequence_class = solutions[3].Sequence
    _drop(step)
    _share(step, sequence_class)
    _publish(step, sequence_class)
    _grow(step, sequence_class)
    _run(step, sequence_class, num_blocks=20)
    _run(step, sequence_class, num_blocks=7)


def _pool(step: Any, num_blocks: int = 8) -> Any:
    pool = step.SharingPool(Probe({}), num_blocks, 4)
    rng = np.random.default_rng(0)
    pool.k[:], pool.v[:] = rng.normal(size=pool.k.shape), rng.normal(size=pool.v.shape)
    return pool


def _drop(step: Any) -> None:
    pool = _pool(step)
    block = pool.take()
    pool.holders[block] = 2
    pool.known[1, 2, 3, 4] = block
    pool.drop(block)
    if block in pool.free:
        seen = f"Block {block} had two holders, one dropped it, and it is in the free list."
        raise Broken("block freed too early", seen)
    if pool.holders[block] != 1:
        seen = f"Block {block} had two holders, one dropped it, and the count is "
        seen += f"{pool.holders[block]}."
        raise Broken("holder not counted", seen)
    if (1, 2, 3, 4) not in pool.known:
        seen = f"Block {block} still has a holder, and is not known any more."
        raise Broken("known block forgotten", seen)
    pool.drop(block)
    if pool.free.count(block) != 1:
        seen = f"The last holder of block {block} dropped it, and it is {pool.free.count(block)} "
        seen += "times in the free list."
        raise Broken("block lost" if block not in pool.free else "block freed twice", seen)
    if pool.known:
        raise Broken("freed block still known", f"Block {block} is free, and known still finds it.")
    pool.known[5, 6, 7, 8] = other = pool.take()
    pool.drop(pool.take())
    if not pool.known:
        seen = f"Another block was freed, and block {other} is not known any more."
        raise Broken("known block forgotten", seen)


def _publish(step: Any, sequence_class: Any) -> None:
    pool, seq = _pool(step), sequence_class("A", text_of("A", 12), 9)
    seq.table, seq.num_computed = [3, 1, 6], 11
    first, second = tuple(seq.tokens[:4]), tuple(seq.tokens[:8])
    pool.known[first] = 0
    pool.publish(seq)
    if any(block == 6 for block in pool.known.values()):
        seen = "11 tokens are computed in blocks of 4, and publish has published the third block."
        raise Broken("partial block published", seen)
    if tuple(seq.tokens[4:8]) in pool.known:
        seen = "publish knows the second block by its own 4 tokens."
        raise Broken("key of the block alone", seen)
    if pool.known.get(first) != 0:
        seen = "Block 0 was known for the first 4 tokens, and publish has replaced it by block 3."
        raise Broken("published again", seen)
    if pool.known.get(second) != 1 or len(pool.known) != 2:
        seen = f"11 tokens are computed, and {len(pool.known)} of 2 full blocks are known."
        raise Broken("full block not published", seen)
    pool = _pool(step)
    seq.table, seq.num_computed = [3, 1, 6], 12
    pool.publish(seq)
    if [*pool.known.values()] != [3, 1, 6]:
        seen = f"12 tokens are computed in the blocks 3, 1, 6; known has {[*pool.known.values()]}."
        raise Broken("full block not published", seen)


def _share(step: Any, sequence_class: Any) -> None:
    text = text_of("A", 20)
    for length, right in [(9, 2), (8, 1), (4, 0), (12, 2), (7, 1), (13, 2)]:
        pool, seq = _pool(step), sequence_class("A", text[:length], 9)
        pool.known = {tuple(text[:4]): 5, tuple(text[:8]): 2}
        pool.holders[5] = pool.holders[2] = 1
        pool.free = [0, 1, 3, 4, 6, 7]
        pool.share(seq)
        case = f"For {length} tokens and 2 known blocks of 4, share gave the table {seq.table}"
        if len(seq.table) * 4 >= length:
            raise Broken("nothing left to compute", f"{case}, and no token is left.")
        if seq.table != [5, 2][:right]:
            raise Broken("known block not shared", f"{case}; {[5, 2][:right]} is right.")
        if seq.num_computed != 4 * right:
            raise Broken("computed not counted", f"{case}, and num_computed {seq.num_computed}.")
        if any(pool.holders[block] != 2 for block in seq.table):
            seen = f"{case}, and block {seq.table[0]} has {pool.holders[seq.table[0]]} holder."
            raise Broken("holder not counted", seen)
    pool, seq = _pool(step), sequence_class("A", text[:13], 9)
    pool.known = {tuple(text[:4]): 5, tuple(text[:12]): 2}
    pool.share(seq)
    if seq.table != [5]:
        seen = f"The 1st and 3rd block were known, and share gave the table {seq.table}."
        raise Broken("unknown block skipped", seen)


def _grow(step: Any, sequence_class: Any) -> None:
    def made(num_computed: int, holders: tuple[int, int], free: list[int]) -> tuple[Any, Any]:
        pool, seq = _pool(step), sequence_class("A", text_of("A", 9), 9)
        seq.table, seq.num_computed = [3, 1], num_computed
        pool.holders[3], pool.holders[1] = holders
        pool.free = list(free)
        return pool, seq

    pool, seq = made(6, (2, 2), [6, 0])
    k, v, other = pool.k.copy(), pool.v.copy(), [3, 1]
    result = pool.grow(seq, 7)
    seen = "6 tokens are computed in blocks 3 and 1, and both blocks have another holder: "
    if seq.table == other:
        raise Broken("shared block written", f"{seen}after grow the table is still {seq.table}.")
    if seq.table[0] != 3:
        raise Broken("wrong block copied", f"{seen}after grow the table is {seq.table}.")
    new = seq.table[1]
    if (pool.k[:, 1] != k[:, 1]).any() or (pool.v[:, 1] != v[:, 1]).any():
        raise Broken("copied the wrong way", f"{seen}block 1 itself has changed.")
    if (pool.k[:, new] != k[:, 1]).any() or (pool.v[:, new] != v[:, 1]).any():
        is_half = (pool.k[:, new] == k[:, 1]).all() or (pool.v[:, new] == v[:, 1]).all()
        layers = (pool.k[:1, new] == k[:1, 1]).all() and (pool.v[:1, new] == v[:1, 1]).all()
        what = "only the keys or the values" if is_half else "only a layer" if layers else "nothing"
        raise Broken("copy is not complete", f"{seen}the new block {new} got {what} of block 1.")
    if pool.holders[1] != 1 or pool.holders[new] != 1:
        rule = "old block not dropped" if pool.holders[1] == 2 else "holder not counted"
        seen += f"after the copy, block 1 has {count(pool.holders[1], 'holder')}, "
        raise Broken(rule, f"{seen}and block {new} has {pool.holders[new]}.")
    if not result:
        raise Broken("grow returns nothing", f"grow copied a block and returned {result!r}.")
    _other_growths(made)


def _other_growths(made: Any) -> None:
    pool, seq = made(6, (2, 1), [6, 0])
    pool.grow(seq, 7)
    if seq.table != [3, 1] or pool.free != [6, 0]:
        seen = f"Block 1 has one holder, and grow made the table {seq.table} of [3, 1]."
        raise Broken("copied without need", seen)
    pool, seq = made(8, (2, 2), [6, 0])
    case = "8 tokens fill blocks 3 and 1, and grow for 9 tokens"
    called("wrong block copied", case, pool.grow, seq, 9)
    if len(seq.table) != 3 or seq.table[:2] != [3, 1]:
        raise Broken("wrong block copied", f"{case} made the table {seq.table}.")
    pool, seq = made(6, (2, 1), [])
    if not pool.grow(seq, 7):
        seen = "The table has room, nothing is shared and no block is free: grow for 7 tokens "
        seen += "returned False."
        raise Broken("refused without need", seen)
    pool, seq = made(6, (2, 2), [6])
    if not pool.grow(seq, 7):
        raise Broken("refused without need", "1 block is free for the copy: grow returned False.")
    pool, seq = made(8, (1, 1), [])
    if pool.grow(seq, 9):
        raise Broken("shortage not reported", "No block was free for token 9: grow returned True.")
    pool, seq = made(6, (2, 2), [])
    rule, case = "all or nothing", "No block is free for the copy: grow"
    result = called(rule, case, pool.grow, seq, 7)
    if result is None or result or seq.table != [3, 1] or pool.holders[1] != 2:
        raise Broken(rule, f"{case} returned {result!r}, with the table {seq.table}.")


def _run(step: Any, sequence_class: Any, num_blocks: int) -> None:
    names = "ABC"
    texts = {name: text_of(name, 30, prefix=_PREFIX) for name in names}
    probe = Probe(texts)
    pool = step.SharingPool(probe, num_blocks, 4)
    driver = Driver(step.SharingEngine, pool, probe, budget=16, is_shared=True)
    a, b = (sequence_class(name, texts[name][:11], 7) for name in "AB")
    driver.add(a)
    driver.step()
    driver.add(b)
    driver.step()
    texts["D"] = text_of("D", 30, prefix=a.tokens[:-1])
    token = texts["D"][len(a.tokens) - 1]
    was = list(a.tokens)
    child = driver.engine.fork(a, "D", token)
    _forked(driver, a, was, child, token)
    driver.seqs.append(child)
    driver.run({driver.num_steps + 1: [sequence_class("C", texts["C"][:9], 5)]})

    early = sequence_class("A", texts["A"][:9], 7)
    early.num_computed = 4
    tokens = step.SharingEngine(probe, _pool(step), 16).fork(early, "E", 1).tokens
    if tokens != [*early.tokens[:-1], 1]:
        seen = f"4 of 9 tokens were computed, and the child of fork has {len(tokens)} tokens."
        raise Broken("child differs", seen)


def _forked(driver: Driver, parent: Any, was: list[int], child: Any, token: int) -> None:
    if child is None:
        raise Broken("fork returns nothing", "fork returned None.")
    if parent.tokens != was:
        seen = "the same list of tokens" if child.tokens is parent.tokens else "other lists"
        seen = f"fork has changed the tokens of {parent.name}; parent and child have {seen}."
        raise Broken("parent changed", seen)
    if child.table is parent.table:
        seen = "After fork, parent and child have the same list as their table."
        raise Broken("one table for two", seen)
    for field in ("max_tokens", "num_computed", "table"):
        mine, right = getattr(child, field), getattr(parent, field)
        if mine != right:
            seen = f"After fork, {field} of the child is {mine}; {right} is right."
            raise Broken("child differs", seen)
    if child not in driver.engine.running:
        raise Broken("child not running", "After fork, the child is not running.")
    if child is not driver.engine.running[-1]:
        raise Broken("child not the youngest", "The child of fork is not the last of running.")
    right = [*parent.tokens[:-1], token]
    if list(child.tokens) != right:
        seen = f"After fork, the child ends with {child.tokens[-2:]}; {right[-2:]} is right."
        raise Broken("child differs", seen)
    few = [block for block in child.table if driver.pool.holders[block] < 2]
    if few:
        seen = f"After fork, block {few[0]} is in two tables and has one holder."
        raise Broken("holder not counted", seen)
