"""Implement ``mie batch``: answer a file in OpenAI's batch form, and go on where a run stopped."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from mie.base.reprs import count
from mie.cli.options import (
    DEFAULT_MODEL,
    engine_options,
    print_error,
    refuse_unused_adapters,
    report_sampling_defaults,
)
from mie.cli.serve import with_server_defaults
from mie.errors import needing_extra
from mie.frontend.batch.lines import Line, answer_all, num_failed, read_batch
from mie.frontend.batch.output_file import continued

if TYPE_CHECKING:
    from mie.frontend.outputs import RequestOutput


def run(args: argparse.Namespace) -> int:
    """Answer the requests without a record in OUT, and return 1 if one failed, else 0."""
    model = args.model or DEFAULT_MODEL
    refuse_unused_adapters(args)
    lines = read_batch(args.input, model)
    settings = {**with_server_defaults(engine_options(args)), "model": model}
    with continued(args.output) as (file, done):
        todo = {key: line for key, line in lines.items() if key not in done}

        def write(line: Line, output: RequestOutput | None) -> None:
            for record in line.records(output, model):
                file.write(json.dumps(record).encode() + b"\n")
            file.flush()

        answer_all(todo, partial(_answers, args, settings), write, print_error)
    failed = num_failed(todo.values())
    numbers = [f"{count(len(todo) - failed, 'request')} answered"]
    numbers += [f"{failed:,} failed"] if failed else []
    numbers += [f"{len(lines) - len(todo):,} done before"] if len(lines) > len(todo) else []
    print(f"[{' · '.join(numbers)}]", file=sys.stderr)
    return int(failed > 0)


def _answers(
    args: argparse.Namespace, settings: Mapping[str, Any], requests: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, RequestOutput]]:
    """Yield (custom_id, output) as requests end, on one engine here or on several with Ray."""
    if args.replicas is None and args.ray_address is None:
        from mie.frontend.batch import answers
        from mie.frontend.llm import LLM

        llm = LLM(**settings)
        report_sampling_defaults(args, llm)
        yield from answers(llm, requests.items())
        return
    with needing_extra("ray", "mie batch --replicas"):
        from mie.ray.app import connected
        from mie.ray.data import generate_all
    number = 1 if args.replicas is None else args.replicas
    cpus, gpus = args.replica_cpus or 1, args.replica_gpus or 0
    with connected(args.ray_address, number * cpus):
        yield from generate_all(requests, settings, num_actors=number, num_cpus=cpus, num_gpus=gpus)
