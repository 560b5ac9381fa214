"""Published traces of servers, through the simulator and the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from mie import LLM, SamplingParams
from mie.config.engine import EngineConfig
from mie.lab.sim.devices import costs_on, find_device, find_shape
from mie.lab.sim.driver import run_load
from mie.lab.sim.simulated import simulated, simulated_on
from mie.lab.workload import Text, Workload, WorkloadRequest

from ...bench import azure
from ...bench.azure import Arrival
from ..case import Case, Row, Run, Suite

MOONCAKE = "https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release"
AZURE = "https://github.com/Azure/AzurePublicDataset"
DEVICE, SHAPE = "h200", "Llama-3.1-8B"
BLOCK = 4
"""Tokens in place of a block of 512 tokens of Mooncake's traces."""
SCALE = 512 // BLOCK
SHARES = {"conversation": "36.6 %", "synthetic": "64.0 %"}
"""Blocks that an earlier request has, in Mooncake's traces."""
QUICK, FULL = 300, 10**9
NUM_REAL = 200
"""Requests of a trace for the real engine, and the longest prompt and answer there."""
MAX_PROMPT, MAX_ANSWER = 96, 24


def read_mooncake(run: Run, name: str) -> list[Any]:
    """Return the requests of a trace. A quick run takes the first ones."""
    with run.path(f"mooncake_{name}.jsonl").open() as file:
        return [json.loads(line) for line in islice(file, QUICK if run.is_quick else FULL)]


def blocks_of(request: Any) -> tuple[Text, ...]:
    """Return a prompt with a text for each block, and one token that no other prompt has."""
    return tuple(Text(each, BLOCK) for each in request["hash_ids"])


def measure_hits(name: str, run: Run) -> Iterator[Row]:
    """Serve a trace one request after another, with memory for all blocks."""
    trace = read_mooncake(run, name)
    seen: set[int] = set()
    num_blocks = num_seen = 0
    for request in trace:
        num_blocks += len(request["hash_ids"])
        num_seen += sum(each in seen for each in request["hash_ids"])
        seen.update(request["hash_ids"])
    last = max(seen) + 1  # texts that end the prompts, so that a whole prompt is never cached
    requests = tuple(
        WorkloadRequest(
            request_id=str(number),
            prompt=(*blocks_of(request), Text(last + number, 1)),
            max_tokens=1,
        )
        for number, request in enumerate(trace)
    )
    config = EngineConfig(block_size=BLOCK, num_blocks=len(seen) + 1024, max_num_seqs=1)
    bench = simulated(costs_on(find_device(DEVICE), find_shape(SHAPE)), config)
    result = run_load(bench, Workload(name=name, requests=requests), max_concurrency=1)
    # Blocks of other texts may begin with the same token, which is then cached, too.
    found = sum(record.num_cached // BLOCK for record in result.records)
    yield Row.compared(
        f"Mooncake, {name}: blocks that are found in the prefix cache",
        f"{found:,} of {num_blocks:,} ({100 * found / num_blocks:.1f} %)",
        f"{num_seen:,} of {num_blocks:,} were in an earlier request"
        + ("" if run.is_quick else f" ({SHARES[name]})"),
        found == num_seen and not _lost(result.records, requests),
        source=MOONCAKE,
    )


def measure_mooncake(name: str, run: Run) -> Iterator[Row]:
    """Serve a trace at its own times, with the memory of a device."""
    requests = [
        WorkloadRequest(
            request_id=str(number),
            prompt=blocks_of(each),
            max_tokens=max(1, each["output_length"] // SCALE),
            arrival_ns=each["timestamp"] * 10**6,
        )
        for number, each in enumerate(read_mooncake(run, name))
    ]
    yield from _served(f"Mooncake, {name}", requests, MOONCAKE)


def read_azure(run: Run, name: str) -> list[Arrival]:
    """Return the requests of a trace with lengths that are divided by `SCALE`."""
    rows = azure.read_azure(run.path(f"azure_{name}.csv"), QUICK if run.is_quick else None)
    return [
        Arrival(time, max(1, prompt // SCALE), max(1, answer // SCALE))
        for time, prompt, answer in rows
    ]


def measure_azure(name: str, run: Run) -> Iterator[Row]:
    """Serve a trace at its own times, with the memory of a device."""
    requests = [
        WorkloadRequest(
            request_id=str(number),
            prompt=(Text(number, prompt),),
            max_tokens=answer,
            arrival_ns=time,
        )
        for number, (time, prompt, answer) in enumerate(read_azure(run, name))
    ]
    yield from _served(f"Azure, {name}", requests, AZURE)


def _served(name: str, requests: Sequence[WorkloadRequest], source: str) -> Iterator[Row]:
    config = EngineConfig(block_size=BLOCK)
    bench = simulated_on(find_device(DEVICE), find_shape(SHAPE), config)
    result = run_load(bench, Workload(name=name, requests=tuple(requests)))
    lost = _lost(result.records, requests)
    yield Row.compared(
        f"{name}: requests that are lost, simulated",
        f"{lost} of {len(requests):,}, in {result.num_steps:,} steps",
        "0",
        not lost,
        source=source,
    )


def _lost(records: Sequence[Any], requests: Sequence[WorkloadRequest]) -> int:
    return sum(
        record.error is not None or record.num_output != request.max_tokens
        for record, request in zip(records, requests, strict=True)
    )


def measure_engine(run: Run) -> Iterator[Row]:
    """Send the first requests of each trace to the bundled model, with a small KV cache."""
    llm = LLM("bundled", backend="numpy", num_threads=1, block_size=BLOCK, num_blocks=160)
    for name in SHARES:
        trace = read_mooncake(run, name)[:NUM_REAL]
        prompts = [
            [token for each in blocks_of(request) for token in _tokens(each)][:MAX_PROMPT]
            for request in trace
        ]
        answers = [each["output_length"] // SCALE for each in trace]
        yield _engine_row(f"Mooncake, {name}", llm, prompts, answers, MOONCAKE)
    for name in ("code", "conv"):
        rows = read_azure(run, name)[:NUM_REAL]
        prompts = [
            _tokens(Text(number, prompt))[:MAX_PROMPT] for number, (_, prompt, _) in enumerate(rows)
        ]
        yield _engine_row(f"Azure, {name}", llm, prompts, [row[2] for row in rows], AZURE)


def _tokens(text: Text) -> list[int]:
    request = WorkloadRequest(request_id="", prompt=(text,), max_tokens=1)
    return [2 + token_id for token_id in request.token_ids(2000, {})]  # no special tokens


def _engine_row(
    name: str, llm: LLM, prompts: Sequence[list[int]], answers: Sequence[int], source: str
) -> Row:
    lengths = [min(max(1, each), MAX_ANSWER) for each in answers]
    params = [
        SamplingParams(max_tokens=each, ignore_eos=True, temperature=0, detokenize=False)
        for each in lengths
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    lost = sum(
        len(output.outputs[0].token_ids) != length
        for output, length in zip(outputs, lengths, strict=True)
    )
    return Row.compared(
        f"{name}: requests that are lost, bundled model",
        f"{lost} of the first {len(outputs)}",
        "0",
        not lost,
        source=source,
    )


def cases() -> Iterator[Case]:
    """Yield a case for each trace, and one for the engine."""
    for name in SHARES:
        inputs = (f"mooncake_{name}.jsonl",)
        yield Case(f"{name} hits", partial(measure_hits, name), inputs)
        yield Case(name, partial(measure_mooncake, name), inputs)
    for name in ("code", "conv"):
        yield Case(f"azure {name}", partial(measure_azure, name), (f"azure_{name}.csv",))
    names = [f"mooncake_{name}.jsonl" for name in SHARES] + ["azure_code.csv", "azure_conv.csv"]
    yield Case("engine", measure_engine, tuple(names))


SUITE = Suite(
    title="Traces of servers",
    text=f"Mooncake's traces of FAST'25 and Azure's of 2023. Lengths are divided by {SCALE}, so a "
    f"block of 512 tokens has {BLOCK}. The first rows serve one request after another, with memory "
    f"for all blocks. The next ones keep the times of the traces, on a simulated {DEVICE} with "
    f"{SHAPE}. The last ones are the first {NUM_REAL} requests of each trace, cut to {MAX_PROMPT} "
    f"and {MAX_ANSWER} tokens, all at once on the bundled model with 160 blocks of memory.",
    cases=list(cases()),
)
