"""Measure what a step costs the host in other public engines, without the model.

    pip install torch==2.13.0 xxhash numpy
    python scripts/bench/sched_peers.py nano-vllm=DIR mini-sglang=DIR mini-vllm=DIR [--json]

Each DIR is a checkout of that engine, which the user provides:

    nano-vllm     github.com/GeeeekExplorer/nano-vllm
    mini-sglang   github.com/sgl-project/mini-sglang
    mini-vllm     github.com/RichardHuang2006/Mini-vLLM

One thread measures two things:

    decode step   Many sequences run: schedule, block bookkeeping, pack the batch's arrays, take in
                  one sampled token each, check for the end.
    admission     From the token ids of a request to the packed arrays of its first step. Its
                  beginning is in the prefix cache, and nothing else runs.

A peer runs its own loop, in which a constant token that ends nothing replaces the forward pass and
the sampling. These engines keep their batch on a GPU. Here the same tensors are made in ordinary
memory and are neither pinned nor sent. This leaves out some of their work (the copies and the
kernel launches) and adds none. The docstring of each peer says what else is replaced. A peer that
cannot be loaded is skipped, by name and with the reason.

The prompts are random and share nothing. Their lengths differ by up to an eighth, or 256 tokens, so
that the sequences do not all need a block in the same step. The garbage collector runs as usual.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np

TOKEN = 7
"""The token that every sequence samples in every step."""
EOS = 2
"""The token that ends a sequence. It is never sampled, but always looked for."""
NUM_STEPS_MAX = 1024
"""The number of steps that a `Peer.start` leaves space for."""
POOL_TOKENS = 262_144
"""Size in tokens of the cache that a request is admitted to.

It matters to a peer that searches its list of free blocks.
"""
WARMUP = 8
"""Steps or admissions before each round that are not timed."""
STAGGER_MAX = 256
VOCABULARY = range(3, 32_000)


class Admission(NamedTuple):
    """One request, admitted again and again. Time ``admit`` alone, or both together."""

    admit: Callable[[], object]
    """Queue the request, schedule it while nothing else runs, and pack the arrays of its step."""
    take_out: Callable[[], object]
    """End the request and free its blocks. What was cached stays cached."""


class Peer(Protocol):
    """The host side of another engine. Its construction is not timed."""

    name: str
    version: str
    """The commit of the checkout."""
    block_size: int

    def start(self, num_seqs: int, context: int) -> Callable[[], object]:
        """Return one decode step of a fresh engine that runs these sequences.

        Their prompts are computed. The next step computes tokens at ``context`` or a little before
        (see `prompts`), and there is space for `NUM_STEPS_MAX` steps. Only the engine that was
        started last may be used.
        """

    def start_admission(self, num_cached: int) -> Admission | None:
        """Return the admission of a prompt with all but one token cached, to a fresh engine.

        Returns None if the engine has no prefix cache.
        """


def prompts(num_seqs: int, context: int, seed: int = 0) -> list[list[int]]:
    """Return random prompts of a little less than ``context`` tokens, the same for every peer.

    They are 1, 2, 3 … tokens shorter, up to an eighth or `STAGGER_MAX`, and then begin again at 1.
    """
    generator = np.random.default_rng(seed)
    stagger = min(max(context // 8, 1), STAGGER_MAX)
    lengths = [context - 1 - i % stagger for i in range(num_seqs)]
    return [
        generator.integers(VOCABULARY.start, VOCABULARY.stop, length).tolist() for length in lengths
    ]


def cached_prompt(num_cached: int) -> list[int]:
    """Return the prompt that is admitted. Only its last token must be computed."""
    return prompts(1, num_cached + 2)[0]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks ``num_tokens`` tokens fill, the last one partly."""
    return -(-num_tokens // block_size)


def pool_blocks(num_seqs: int, context: int, block_size: int) -> int:
    """Return the number of blocks with which `NUM_STEPS_MAX` steps run without preemption."""
    return num_seqs * (blocks_for(context + NUM_STEPS_MAX, block_size) + 1)


# Loading.


def commit_of(path: Path) -> str:
    """Return the commit that is checked out, or "unknown" if this is no checkout."""
    if not (path / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(path), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


class _Absent(ModuleType):
    """A stand-in for a module that the host side never runs. Any name in it is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def _importing(path: Path, *, own: Sequence[str], others: Sequence[str]) -> Iterator[None]:
    """Import from a checkout with some modules replaced.

    Modules of ``own`` are replaced for good, and those of ``others`` only during the import.
    """
    before = {name: sys.modules.get(name) for name in others}
    sys.modules.update({name: _Absent(name) for name in [*own, *others]})
    sys.path.insert(0, str(path))
    try:
        yield
    finally:
        sys.path.remove(str(path))
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _stay_on_host() -> Any:
    """Return torch with one thread, and with tensors that are neither pinned nor moved to a GPU.

    This changes torch for the whole process, in which only the peers use it.
    """
    import torch

    if getattr(torch, "stays_on_host", False):
        return torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        return made

    torch.set_num_threads(1)
    torch.tensor = unpinned(torch.tensor)
    torch.empty = unpinned(torch.empty)
    torch.Tensor.pin_memory = lambda self: self
    torch.Tensor.cuda = lambda self, non_blocking=False: self
    torch.stays_on_host = True
    return torch


# The peers.


class NanoVllm:
    """The engine nano-vllm: its `LLMEngine.step` with its scheduler and block manager.

    Its `ModelRunner.run` packs the batch. The forward pass is replaced, with the copies into the
    buffers of a CUDA graph, and so is the sampling. Its configuration refuses blocks that are not a
    multiple of 256 tokens. It therefore has a 16th of the block-table entries of an engine with
    blocks of 16, and fills blocks 16 times less often. At a context of 128, no step that is
    measured fills one.
    """

    name = "nano-vllm"

    def __init__(self, path: Path, block_size: int = 256) -> None:
        self.version = commit_of(path)
        self.block_size = block_size
        self._torch = _stay_on_host()
        own = ("nanovllm.models.qwen3", "nanovllm.layers.sampler", "nanovllm.utils.loader")
        with _importing(path, own=own, others=("transformers",)):
            self._engine = importlib.import_module("nanovllm.engine.llm_engine")

    def _new_engine(self, num_blocks: int) -> Any:
        module = self._engine
        module.Sequence.block_size = self.block_size
        config = SimpleNamespace(
            max_num_seqs=512,
            max_num_batched_tokens=16_384,
            eos=EOS,
            kvcache_block_size=self.block_size,
            num_kvcache_blocks=num_blocks,
        )
        runner = object.__new__(module.ModelRunner)
        runner.block_size, runner.world_size, runner.rank = self.block_size, 1, 0
        runner.run_model = lambda input_ids, positions, is_prefill: None
        runner.sampler = lambda logits, temperatures: self._torch.full(temperatures.shape, TOKEN)
        engine = object.__new__(module.LLMEngine)
        engine.scheduler = module.Scheduler(config)
        engine.model_runner = runner
        return engine

    def _add(self, engine: Any, token_ids: list[int], max_tokens: int) -> None:
        engine.add_request(token_ids, self._engine.SamplingParams(max_tokens=max_tokens))

    def start(self, num_seqs: int, context: int) -> Callable[[], object]:
        engine = self._new_engine(pool_blocks(num_seqs, context, self.block_size))
        scheduler = engine.scheduler
        for token_ids in prompts(num_seqs, context):
            self._add(engine, token_ids, 2 * NUM_STEPS_MAX)
        while scheduler.waiting:
            seqs, is_prefill = scheduler.schedule()
            scheduler.postprocess(seqs, [TOKEN] * len(seqs), is_prefill)
        assert len(scheduler.running) == num_seqs
        step: Callable[[], object] = engine.step
        return step

    def start_admission(self, num_cached: int) -> Admission | None:
        engine = self._new_engine(blocks_for(POOL_TOKENS, self.block_size))
        scheduler, token_ids = engine.scheduler, cached_prompt(num_cached)
        self._add(engine, token_ids, 1)
        engine.step()

        def admit() -> None:
            self._add(engine, token_ids, NUM_STEPS_MAX)
            seqs, is_prefill = scheduler.schedule()
            engine.model_runner.run(seqs, is_prefill)

        def take_out() -> None:
            # Its update does the same at a stop.
            seq = scheduler.running.pop()
            assert seq.num_cached_tokens == num_cached // self.block_size * self.block_size
            scheduler.block_manager.deallocate(seq)

        return Admission(admit, take_out)


class _TorchWithoutStack:
    """The torch of mini-sglang's attention module. `MiniSglang` says why."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def stack(self, rows: Sequence[Any]) -> Any:
        return self._torch.empty((len(rows), 1), dtype=rows[0].dtype)


class MiniSglang:
    """The engine mini-sglang: its `Scheduler.normal_loop` with its radix cache.

    The page table and the metadata of its FlashAttention backend and its sampler are its own. (Its
    default loop does the same in another order, so that the GPU computes meanwhile.) The forward
    pass, the replay of a CUDA graph and the sampling are replaced, and so are the sockets to its
    tokenizer, which costs it the encoding of the replies. Three more things are replaced to be
    fair.

    What it keeps on the GPU (page table, token pool) is an ordinary tensor, and an operation on it
    runs where it would be launched. A decode step has a few of them, each on one number of each
    sequence. They take some microseconds, as a launch does. The exception is where the batch's rows
    of the page table are stacked. That copy is the GPU's work and grows with the context. The rows
    are still sliced one by one on the host, but the stack is one column wide and not filled.

    NumPy compares token ids, where its own C++ would be compiled at first use. A request arrives as
    it does from its tokenizer, as a tensor and not as a list.
    """

    name = "mini-sglang"

    def __init__(self, path: Path, block_size: int = 16) -> None:
        self.version = commit_of(path)
        self.block_size = block_size
        self._torch = torch = _stay_on_host()
        own = ("kernel", "layers", "models", "moe")
        others = ("transformers", "huggingface_hub", "zmq", "zmq.asyncio", "msgpack")
        with _importing(path / "python", own=[f"minisgl.{name}" for name in own], others=others):
            self._scheduler = importlib.import_module("minisgl.scheduler.scheduler")
            self._engine = importlib.import_module("minisgl.engine.engine")
            self._attention: Any = importlib.import_module("minisgl.attention.fa")
            self._core: Any = importlib.import_module("minisgl.core")
            importlib.import_module("minisgl.distributed").set_tp_info(0, 1)
        vars(self._attention)["torch"] = _TorchWithoutStack(torch)
        kernel: Any = sys.modules["minisgl.kernel"]
        kernel.fast_compare_key = _num_equal

    def _new_scheduler(self, num_seqs: int, num_tokens: int, num_blocks: int) -> Any:
        """Make a scheduler as mini-sglang's constructors do, without a model."""
        torch, module, page_size = self._torch, self._scheduler, self.block_size
        device = torch.device("cpu")
        context = self._core.Context(page_size)
        self._core._GLOBAL_CTX = context
        # One more row, for the request that pads a batch to the size of a CUDA graph.
        page_table = torch.zeros((num_seqs + 1, num_tokens), dtype=torch.int32)
        context.page_table, context.kv_cache = page_table, SimpleNamespace(device=device)
        scheduler = object.__new__(module.Scheduler)
        scheduler.device, scheduler.finished_reqs, scheduler.eos_token_id = device, set(), EOS
        scheduler.table_manager = module.TableManager(num_seqs, page_table)
        scheduler.token_pool = scheduler.table_manager.token_pool
        scheduler.cache_manager = module.CacheManager(num_blocks, page_size, page_table, "radix")
        scheduler.decode_manager = module.DecodeManager(page_size)
        scheduler.prefill_manager = module.PrefillManager(
            scheduler.cache_manager, scheduler.table_manager, scheduler.decode_manager
        )
        scheduler.prefill_budget = 8192
        scheduler.engine = SimpleNamespace(
            page_table=page_table,
            max_seq_len=num_tokens,
            graph_runner=self._new_graph_runner(num_seqs),
            attn_backend=self._attention.FlashAttentionBackend(SimpleNamespace(head_dim=128)),
            sampler=self._engine.Sampler(device, VOCABULARY.stop),
            forward_batch=self._forward_batch,
        )
        scheduler.receive_msg = lambda blocking: []
        scheduler.send_result = lambda reply: None
        return scheduler

    def _new_graph_runner(self, num_seqs: int) -> Any:
        """Return a runner that pads a batch as it does for the CUDA graphs of a large GPU."""
        runner = object.__new__(self._engine.GraphRunner)
        runner.graph_bs_list = [1, 2, 4, *range(8, 257, 8)]
        runner.max_graph_bs = runner.graph_bs_list[-1]
        runner.dummy_req = self._core.Req(
            self._torch.zeros(1, dtype=self._torch.int32), num_seqs, 0, 1, -1, None, None
        )
        return runner

    def _forward_batch(self, batch: Any, sample_args: Any) -> Any:
        """Run `Engine.forward_batch` without the model, which leaves the requests' progress."""
        for req in batch.reqs:
            req.complete_one()
        next_tokens = self._torch.full((batch.size,), TOKEN, dtype=self._torch.int32)
        copied = SimpleNamespace(synchronize=lambda: None)
        return self._engine.ForwardOutput(next_tokens, next_tokens, copied)

    def _message(self, uid: int, token_ids: list[int], max_tokens: int) -> Any:
        params = self._core.SamplingParams(max_tokens=max_tokens)
        input_ids = self._torch.tensor(token_ids, dtype=self._torch.int32)
        return self._scheduler.UserMsg(uid, input_ids, params)

    def start(self, num_seqs: int, context: int) -> Callable[[], object]:
        # It admits a request only when the whole of its answer would fit.
        num_tokens = context + 2 * NUM_STEPS_MAX
        num_blocks = num_seqs * (blocks_for(num_tokens, self.block_size) + 1)
        scheduler = self._new_scheduler(num_seqs, num_tokens + self.block_size, num_blocks)
        step: Callable[[], object] = self._torch.inference_mode()(scheduler.normal_loop)
        for uid, token_ids in enumerate(prompts(num_seqs, context)):
            message = self._message(uid, token_ids, 2 * NUM_STEPS_MAX)
            scheduler._process_one_msg(message)
        while scheduler.prefill_manager.runnable:
            step()
        assert len(scheduler.decode_manager.running_reqs) == num_seqs
        return step

    def start_admission(self, num_cached: int) -> Admission | None:
        num_tokens = num_cached + 2 * NUM_STEPS_MAX
        num_blocks = blocks_for(POOL_TOKENS, self.block_size)
        scheduler = self._new_scheduler(1, num_tokens, num_blocks)
        inference_mode = self._torch.inference_mode()
        token_ids = cached_prompt(num_cached)
        scheduler._process_one_msg(self._message(0, token_ids, 1))
        inference_mode(scheduler.normal_loop)()
        message = self._message(1, token_ids, NUM_STEPS_MAX)
        admitted: list[Any] = []

        def admit() -> None:
            scheduler._process_one_msg(message)
            admitted.append(scheduler._schedule_next_batch().batch.reqs[0])

        def take_out() -> None:
            # Its update does the same at a stop, after it counts the step.
            req = admitted.pop()
            assert req.cached_len == num_cached // self.block_size * self.block_size
            req.complete_one()
            scheduler._free_req_resources(req)

        return Admission(inference_mode(admit), inference_mode(take_out))


def _num_equal(a: Any, b: Any) -> int:
    """Return how many token ids two tensors have in common at their beginning."""
    length = min(len(a), len(b))
    differ = a.numpy()[:length] != b.numpy()[:length]
    first = int(differ.argmax())
    return first if differ[first] else length


class MiniVllm:
    """The engine Mini-vLLM: its `LLM.step` with its scheduler and block manager.

    The `ForwardBatch` of its `PagedModelRunner` is the packing. It runs on a CPU unchanged, so only
    the forward pass and the sampling are replaced. It has no prefix cache.
    """

    name = "mini-vllm"

    def __init__(self, path: Path, block_size: int = 16) -> None:
        self.version = commit_of(path)
        self.block_size = block_size
        _stay_on_host()
        own = ("loader", "qwen3", "qwen3_cached", "qwen3_paged")
        with _importing(path, own=[f"mini_vllm.model.{name}" for name in own], others=()):
            self._engine = importlib.import_module("mini_vllm.serve.engine")

    def _new_engine(self, num_seqs: int, context: int) -> Any:
        module = self._engine
        num_blocks = pool_blocks(num_seqs, context, self.block_size)
        # Budgets with which all the prompts are computed in the first step: in smaller ones the
        # first sequences would be far ahead of the last.
        config = module.SchedulerConfig(
            max_batched_tokens=num_seqs * context, max_sequences=num_seqs, chunk_size=context
        )
        engine = object.__new__(module.LLM)
        engine.stop_token_ids, engine.stats = (EOS,), module.EngineStats()
        engine.manager = module.BlockManager(num_blocks, self.block_size)
        engine.scheduler = module.Scheduler(config, engine.manager)
        engine.runner = module.PagedModelRunner(lambda batch: None, engine.manager)
        engine.runner.sample_tokens = lambda output, logits: [TOKEN] * len(output.scheduled)
        return engine

    def start(self, num_seqs: int, context: int) -> Callable[[], object]:
        engine = self._new_engine(num_seqs, context)
        for token_ids in prompts(num_seqs, context):
            engine.add_request(token_ids, max_tokens=2 * NUM_STEPS_MAX)
        # The first step by hand, since nothing need be packed.
        output = engine.scheduler.schedule()
        for sequence, count in output.scheduled:
            engine.manager.allocate(sequence, count)
        engine.scheduler.commit(output, [TOKEN] * num_seqs)
        assert len(engine.scheduler.running) == num_seqs
        step: Callable[[], object] = engine.step
        return step

    def start_admission(self, num_cached: int) -> Admission | None:
        return None


PEERS: Mapping[str, Callable[[Path], Peer]] = {
    peer.name: peer for peer in (NanoVllm, MiniSglang, MiniVllm)
}


def load_peers(paths: Mapping[str, Path]) -> tuple[list[Peer], dict[str, str]]:
    """Return the peers with checkouts at these paths, and why the others cannot be loaded."""
    peers, skipped = [], {}
    for name, path in paths.items():
        try:
            if not path.is_dir():
                raise FileNotFoundError("the directory does not exist")
            peers.append(PEERS[name](path.resolve()))
        except Exception as error:
            skipped[name] = f"{type(error).__name__}: {error}"
    return peers, skipped


# Measuring.


def time_steps(step: Callable[[], object], num_steps: int) -> float:
    """Return the mean seconds of one step over ``num_steps`` steps.

    This includes the blocks that sequences need on the way.
    """
    for _ in range(WARMUP):
        step()
    gc.collect()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    return (time.perf_counter() - start) / num_steps


def time_admissions(admission: Admission, count: int) -> float:
    """Return the mean seconds of one ``admit``. Taking the request out is not timed."""
    for _ in range(WARMUP):
        admission.admit()
        admission.take_out()
    gc.collect()
    seconds = 0.0
    for _ in range(count):
        start = time.perf_counter()
        admission.admit()
        seconds += time.perf_counter() - start
        admission.take_out()
    return seconds / count


def measure(
    peers: Sequence[Peer], options: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """Return seconds by peer and by measurement, one figure for each round.

    Rounds alternate between the peers, and each starts a fresh engine.
    """
    seconds: dict[str, dict[str, list[float]]] = {peer.name: {} for peer in peers}
    for _ in range(options.rounds):
        for peer in peers:
            results = seconds[peer.name]
            for context in options.contexts:
                step = peer.start(options.num_seqs, context)
                result = time_steps(step, options.steps)
                results.setdefault(f"step at {context}", []).append(result)
                del step
            admission = peer.start_admission(options.cached)
            if admission is not None:
                result = time_admissions(admission, options.steps)
                results.setdefault(f"admission, {options.cached} cached", []).append(result)
            del admission
    return seconds


def print_table(peers: Sequence[Peer], seconds: Mapping[str, Mapping[str, list[float]]]) -> None:
    """Print the median of each row's rounds, with the fastest and the slowest."""
    print(f"{'peer':12} {'commit':9} {'block':>5}  {'measured':24} {'median':>9}  of rounds")
    for peer in peers:
        for what, rounds in seconds[peer.name].items():
            low, middle, high = (1e3 * f(rounds) for f in (min, statistics.median, max))
            print(
                f"{peer.name:12} {peer.version[:9]:9} {peer.block_size:5}  {what:24} "
                f"{middle:6.3f} ms  {low:.3f} to {high:.3f}"
            )


def as_json(
    peers: Sequence[Peer],
    skipped: Mapping[str, str],
    seconds: Mapping[str, Mapping[str, list[float]]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return everything that was measured, round by round, and the versions."""
    return {
        "python": platform.python_version(),
        "torch": getattr(sys.modules.get("torch"), "__version__", None),
        "num_seqs": options.num_seqs,
        "steps_per_round": options.steps,
        "peers": [
            {
                "name": peer.name,
                "version": peer.version,
                "block_size": peer.block_size,
                "seconds": {
                    what: {"median": statistics.median(rounds), "rounds": rounds}
                    for what, rounds in seconds[peer.name].items()
                },
            }
            for peer in peers
        ],
        "skipped": dict(skipped),
    }


def _peer_path(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if name not in PEERS or not path:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=DIR, NAME one of {', '.join(PEERS)}")
    return name, Path(path)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("peers", nargs="+", type=_peer_path, metavar="NAME=DIR")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 8192])
    parser.add_argument("--cached", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if min(options.contexts) < 2:
        parser.error("--contexts: from 2")
    if not 1 <= options.steps <= NUM_STEPS_MAX - WARMUP:
        parser.error(f"--steps: from 1 to {NUM_STEPS_MAX - WARMUP}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    peers, skipped = load_peers(dict(options.peers))
    for name, reason in skipped.items():
        print(f"{name} skipped: {reason}", file=sys.stderr)
    seconds = measure(peers, options)
    if options.json:
        print(json.dumps(as_json(peers, skipped, seconds, options), indent=2))
    else:
        print_table(peers, seconds)
    return 0 if peers else 1


if __name__ == "__main__":
    sys.exit(main())
