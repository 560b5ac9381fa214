"""Check that answers with a prefix cache on a disk equal answers without a cache.

A scenario has three lifetimes on one folder. In a lifetime, one or two processes use the folder,
and a process may be killed or meet a full disk. Between two lifetimes files are damaged, removed
and added.
"""

import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from audit import entry_of, kill_writer, limit_store, tier_of
from compiled import needs_numba
from deadlines import PATIENCE, within
from disk_lives import MODELS, Ask, Life, new_engine, small_segments
from faulty_disk import FaultyDisk, Killed

from mie import SamplingParams
from mie.disk.segment import SUFFIX
from mie.engine.engine import Engine
from mie.engine.watch.snapshot import scheduler_snapshot
from mie.events.replay import State

FAULTS = ("none", "none", "flip", "cut", "remove", "foreign", "copy")
ENDS = ("clean", "clean", "killed", "full disk", "two processes", "writer dies")
Seen = Counter[str]


def settings_of(rng: random.Random) -> dict[str, Any]:
    return {
        "block_size": rng.choice([2, 4]),
        "num_blocks": rng.choice([60, 120]),
        "max_model_len": 40,
        "max_num_seqs": rng.choice([1, 3, 6]),
        "max_num_batched_tokens": rng.choice([8, 64]),
        **rng.choice([{"preemption_mode": "swap", "swap_space": 1 << 18}, {}]),
    }


def token_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(5, 70) for _ in range(count)]


def prompts_of(rng: random.Random) -> list[list[int]]:
    """Return prompts that begin alike, so that they share blocks."""
    stem = token_ids(rng, 20)
    lengths = [rng.choice([6, 12, 20]) for _ in range(4)]
    return [stem[:length] + token_ids(rng, rng.randrange(1, 8)) for length in lengths]


def asks_of(rng: random.Random, prompts: list[list[int]]) -> list[Ask]:
    return [
        (
            rng.choice(prompts),
            SamplingParams(
                max_tokens=rng.randrange(1, 10),
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.randrange(100),
                n=rng.choice([1, 1, 2]),
                logprobs=rng.choice([None, 2]),
                ignore_eos=True,
            ),
            rng.choice([None, "a"]),
        )
        for _ in range(rng.randrange(2, 7))
    ]


def aborted_of(rng: random.Random, asks: list[Ask]) -> dict[int, int]:
    return {rng.randrange(1, 6): rng.randrange(len(asks)) for _ in range(rng.choice([0, 2]))}


def check_log(engine: Engine) -> None:
    """Check that the log leads to the state of the engine."""
    *_, segment = engine.log.segments()
    state = State.from_snapshot(segment.snapshot, segment.after)
    for step in segment.steps:
        state.apply_step(step)
    for record in segment.rest:
        state.apply(record)
    assert state.snapshot() == scheduler_snapshot(engine.scheduler)


def break_files(folder: Path, rng: random.Random) -> str:
    """Damage the files as a bad disk, another program or a user may."""
    fault = rng.choice(FAULTS)
    segments = sorted(folder.rglob(f"*{SUFFIX}"))
    for path in segments:
        data = bytearray(path.read_bytes())
        if not data:  # its process was killed before the first write
            continue
        if fault == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        elif fault == "cut":
            os.truncate(path, rng.randrange(len(data)))
        elif fault == "remove":
            path.unlink()
        elif fault == "copy":
            shutil.copy(path, path.with_name(f"0{path.name}"))
    if fault == "foreign" and segments:
        segments[0].with_name(f"foreign{SUFFIX}").write_bytes(rng.randbytes(500))
    return fault


class Scenario:
    """Lifetimes of engines of one model on one folder."""

    def __init__(self, model: str, backend: str, seed: int, folder: Path, plain: Engine) -> None:
        """``plain`` is an engine without a cache."""
        self.rng, self.seen = random.Random(f"{model} {seed}"), Seen()
        self._model, self._backend, self._folder, self._plain = model, backend, folder, plain
        self._settings, self._prompts = settings_of(self.rng), prompts_of(self.rng)
        self._settings["kv_cache_dtype"] = plain.config.kv_cache_dtype
        self._max_bytes = self.rng.choice([1 << 30, 1 << 30, 60_000])
        self._written: dict[bytes, set[bytes]] = {}

    def run(self) -> Seen:
        """Compare three lifetimes with engines without a cache, and return the events."""
        with small_segments():
            for _ in range(3):
                end = self.rng.choice(ENDS)
                self.seen[end] += 1
                if end in ("two processes", "writer dies"):
                    self._live_together(end)
                else:
                    self._live(end)
                self.seen[break_files(self._folder, self.rng)] += 1
            self._live("clean")
        assert not [*self._folder.glob("*/*.partial")]
        if self._backend == "jit":
            assert max(map(len, self._written.values()), default=1) == 1
        return self.seen

    def _live(self, end: str) -> None:
        rng = self.rng
        asks = asks_of(rng, self._prompts)
        disk = FaultyDisk(
            rng,
            calls_left=rng.randrange(80) if end == "killed" else None,
            bytes_left=rng.randrange(20_000) if end == "full disk" else None,
        )
        life = None
        with disk.installed():
            try:
                life = Life(self._engine(), asks, aborted_of(rng, asks))
                while life.step() and not disk.is_dead:
                    pass
            except Killed:
                pass
            if life is not None:
                self._end(life, asks)
        self.seen["died"] += disk.is_dead

    def _live_together(self, end: str) -> None:
        rng = self.rng
        asks = [asks_of(rng, self._prompts) for _ in range(2)]
        lives = [Life(self._engine(), each) for each in asks]
        stores = [tier_of(life.engine).store for life in lives]
        assert [store.is_writing for store in stores] == [True, False]
        ends_at = rng.randrange(1, 10)
        for number in range(5000):
            if number == ends_at and end == "writer dies":
                kill_writer(stores[0])
            unfinished = [life for life in lives if life.engine.has_work]
            if not unfinished:
                break
            rng.choice(unfinished).step()
        for life, each in zip(lives, asks, strict=True):
            self._end(life, each)
        self.seen["taken over"] += stores[1].stats.num_written > 0

    def _engine(self) -> Engine:
        """Return an engine on the folder. Each read of the engine is checked."""
        rng = self.rng
        settings = dict(self._settings)
        if rng.random() < 0.1:
            settings["block_size"] = 6 - settings["block_size"]
        engine = new_engine(
            self._model, self._backend, prefix_cache_dir=str(self._folder), **settings
        )
        tier = tier_of(engine)
        limit_store(tier.store, self._max_bytes)
        self._watch(tier.store)
        ticks = self._ticks(rng.choice([0.0, 0.0, 0.0, 1e9]))
        tier.clock = lambda: next(ticks)
        return engine

    @staticmethod
    def _ticks(seconds: float) -> Iterator[float]:
        """Yield the times of a clock. Reading takes no time, or far too much."""
        now = 0.0
        while True:
            yield now
            now += seconds

    def _watch(self, store: Any) -> None:
        """Check that a read returns a content that was written, or counts the damage."""
        write, read, written = store.write, store.read, self._written

        def write_and_note(block: Any) -> None:
            written.setdefault(block.key, set()).add(block.data)
            write(block)

        def read_and_check(key: bytes) -> bytes | None:
            entry, num_damaged = entry_of(store, key), store.stats.num_damaged
            data: bytes | None = read(key)
            if data is not None:
                assert data in written[key]
            elif entry is not None and entry.segment.exists():
                assert store.stats.num_damaged == num_damaged + 1
            return data

        store.write, store.read = write_and_note, read_and_check

    def _end(self, life: Life, asks: list[Ask]) -> None:
        """Compare the answers of a process, and end the process."""
        expected = Life(self._plain, asks)
        while expected.step():
            pass
        for number, answer in life.answers.items():
            assert answer == expected.answers[number]
        check_log(life.engine)
        tier = tier_of(life.engine)
        tier.close()
        stats = tier.store.stats
        self.seen += Seen(
            hits=tier.num_hits,
            damaged=stats.num_damaged,
            dropped=stats.num_dropped,
            written=stats.num_written,
            slow=tier.num_slow,
        )
        if stats.num_written:
            size = sum(path.stat().st_size for path in self._folder.rglob(f"*{SUFFIX}"))
            assert size <= self._max_bytes


def run_scenarios(
    model: str, backend: str, seeds: range, folder: Path, stored: str = "auto"
) -> Seen:
    """Run scenarios, and check that no thread and no file stays open."""
    settings = {"max_model_len": 40, "num_blocks": 99, "kv_cache_dtype": stored}
    plain = new_engine(model, backend, enable_prefix_caching=False, **settings)
    seen, num_open = Seen(), len(os.listdir("/proc/self/fd"))
    for seed in seeds:
        seen += Scenario(model, backend, seed, folder / str(seed), plain).run()
        shutil.rmtree(folder / str(seed))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= num_open
    assert "mie-disk" not in [thread.name for thread in threading.enumerate()]
    return seen


def run_until_hit(model: str, backend: str, count: int, folder: Path, stored: str = "auto") -> int:
    """Run ``count`` scenarios, and more if a busy machine wrote too late for a hit."""
    hits = 0
    for first in range(0, 10 * count, count):
        hits += run_scenarios(model, backend, range(first, first + count), folder, stored)["hits"]
        if hits:
            break
    return hits


@pytest.mark.parametrize("model", MODELS)
def test_answers_with_a_cache_on_a_disk_equal_answers_without_one(model: str, tmp_path: Path):
    assert run_until_hit(model, "numpy", 3, tmp_path)


@needs_numba
@pytest.mark.parametrize("stored", ["auto", "int4"])
def test_log_probabilities_with_a_cache_on_a_disk_have_equal_bits(tmp_path: Path, stored: str):
    assert run_until_hit("qwen3_tied", "jit", 3, tmp_path, stored)


@pytest.mark.slow
@needs_numba
@pytest.mark.parametrize("model", MODELS)
def test_a_thousand_scenarios(model: str, tmp_path: Path):
    seen = run_scenarios(model, "jit", range(188), tmp_path)
    events = {"hits", "damaged", "dropped", "written", "slow", "died", "taken over"}
    assert {*events, *FAULTS, *ENDS} <= seen.keys()


# Real processes.


class Process:
    """A life in a process, which may be killed."""

    def __init__(self, rng: random.Random, model: str, folder: Path, asks: list[Any]) -> None:
        end = rng.choice(["clean", "at a call", "at a moment", "files are too large"])
        life = {
            "model": model,
            "folder": str(folder),
            "asks": asks,
            "seed": rng.random(),
            "calls_left": rng.randrange(60) if end == "at a call" else None,
            "file_bytes": rng.randrange(500, 5000) if end == "files are too large" else None,
            "settings": {"block_size": 4, "num_blocks": 60, "max_model_len": 40},
        }
        self.end, self._delay = end, rng.random() * 0.1
        command = [sys.executable, str(Path(__file__).parents[1] / "disk_lives.py")]
        self._process = subprocess.Popen(
            [*command, json.dumps(life)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _lines(self) -> Iterator[str]:
        """Yield the output, and kill the process some time after the first line."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                yield line
                if self.end == "at a moment" and line.startswith("ready"):
                    threading.Timer(self._delay, self._process.kill).start()

    def result(self) -> list[list[Any]]:
        """Return the answers of the life, and its numbers if it was not killed."""
        lines: list[str] = []
        within(lambda: lines.extend(self._lines()))
        code, output = self._process.wait(PATIENCE), "".join(lines)
        assert "Traceback" not in output, output
        rows = [json.loads(line) for line in lines if line.startswith("[")]
        assert code in (0, -signal.SIGKILL), output
        if code == 0:
            assert rows[-1][0] == "end", output
        return rows


def run_processes(model: str, seeds: range, folder: Path) -> Seen:
    """Run scenarios of three lifetimes, each of one or two processes."""
    plain = new_engine(model, "numpy", enable_prefix_caching=False, max_model_len=40, num_blocks=99)
    greedy, seen = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), Seen()
    for seed in seeds:
        rng, place = random.Random(f"process {model} {seed}"), folder / str(seed)
        prompts = prompts_of(rng)
        for _ in range(3):
            asks = [(rng.choice(prompts), rng.choice([None, "a"])) for _ in range(6)]
            expected = Life(plain, [(ids, greedy, salt) for ids, salt in asks])
            while expected.step():
                pass
            processes = [Process(rng, model, place, asks) for _ in range(rng.choice([1, 2]))]
            for process in processes:
                for number, *values in process.result():
                    if number == "end":
                        hits, damaged, dropped = values
                        seen += Seen(hits=hits, damaged=damaged, dropped=dropped)
                    else:
                        assert values[0] == expected.answers[number][0][0]
                seen[process.end] += 1
            seen[break_files(place, rng)] += 1
        last = new_engine(
            model, "numpy", prefix_cache_dir=str(place), max_model_len=40, num_blocks=99
        )
        assert tier_of(last).store.is_writing, "a dead process holds the lock"
        assert not [*place.glob("*/*.partial")]
        tier_of(last).close()
    return seen


def test_processes_that_are_killed_leave_no_wrong_answer(tmp_path: Path):
    run_processes("qwen3_tied", range(1), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_many_processes_that_are_killed_leave_no_wrong_answer(model: str, tmp_path: Path):
    seen = run_processes(model, range(12), tmp_path)
    assert {"hits", "clean", "at a call", "at a moment", "files are too large"} <= seen.keys()
