"""Implement ``mie batch``: answer a file in OpenAI's batch form, and go on where a run stopped."""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

from mie.base.reprs import count
from mie.batch.lines import Line, json_object, read_batch
from mie.cli.options import DEFAULT_MODEL, engine_options, report_sampling_defaults
from mie.cli.serve import with_server_defaults
from mie.errors import ConfigError, MissingExtraError, RequestError

if TYPE_CHECKING:
    from mie.frontend.outputs import RequestOutput


def run(args: argparse.Namespace) -> int:
    """Answer the requests without a record in OUT, and return 1 if one failed, else 0."""
    model = args.model or DEFAULT_MODEL
    lines = read_batch(args.input, model)
    settings = with_server_defaults(engine_options(args))
    with _opened(args.output) as output:
        done = _finished(output, args.output)
        todo = {key: line for key, line in lines.items() if key not in done}
        num_failed = 0
        for record in _records(todo, {**settings, "model": model}, args):
            output.write(json.dumps(record).encode() + b"\n")
            output.flush()
            num_failed += record["error"] is not None
    numbers = [f"{count(len(todo) - num_failed, 'request')} answered"]
    numbers += [f"{num_failed:,} failed"] if num_failed else []
    numbers += [f"{len(lines) - len(todo):,} done before"] if len(lines) > len(todo) else []
    print(f"[{' · '.join(numbers)}]", file=sys.stderr)
    return int(num_failed > 0)


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """Open OUT for reading and adding, and keep other runs from it."""
    try:
        file = open(path, "a+b")  # noqa: SIM115  # closed below
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{path} is being written by another mie batch") from error
        yield file


def _finished(output: BinaryIO, path: str) -> set[str]:
    """Return every custom_id of OUT, and cut off the last line if a run could not complete it.

    Raises:
        RequestError: another line is no record, or the last one is not even the beginning of one.
    """
    output.seek(0)
    done: set[str] = set()
    size, torn = 0, None
    for number, raw in enumerate(output, start=1):
        if torn is not None:
            raise RequestError(f"{torn} (delete the line, and its request is answered again)")
        try:
            key = json_object(raw, f"{path}, line {number}").get("custom_id")
        except RequestError as error:
            if raw.strip(b"\0\r\n")[:1] not in (b"", b"{"):  # a lost block is full of zeros
                raise
            torn = error
            continue
        if not isinstance(key, str):
            raise RequestError(f"{path}, line {number} has no custom_id; choose another OUT")
        if raw.endswith(b"\n"):
            done.add(key)
            size += len(raw)
    output.truncate(size)
    return done


def _records(
    todo: Mapping[str, Line], settings: Mapping[str, Any], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the record of each line: first of those that are refused, then as requests end."""
    for line in todo.values():
        if line.error is not None:
            yield _failed(line, line.error)
    requests = {key: line.request for key, line in todo.items() if line.error is None}
    for key, output in _answers(requests, settings, args) if requests else ():
        line = todo[key]
        if output.error is None:
            yield from line.records(output, settings["model"])
        else:
            yield _failed(line, f"{line.source}: {output.error}")


def _answers(
    requests: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any], args: argparse.Namespace
) -> Iterator[tuple[str, RequestOutput]]:
    """Yield (custom_id, output) as requests end, on one engine here or on several with Ray."""
    if args.replicas is None and args.ray_address is None:
        from mie.batch import answers
        from mie.llm import LLM

        llm = LLM(**settings)
        report_sampling_defaults(args, llm)
        yield from answers(llm, requests.items())
        return
    try:
        from mie.ray.app import connected
        from mie.ray.data import generate_all
    except ImportError as error:
        raise MissingExtraError.of("mie batch --replicas", error, "ray") from error
    number = 1 if args.replicas is None else args.replicas
    cpus, gpus = args.replica_cpus or 1, args.replica_gpus or 0
    with connected(args.ray_address, number * cpus):
        yield from generate_all(requests, settings, num_actors=number, num_cpus=cpus, num_gpus=gpus)


def _failed(line: Line, message: str) -> dict[str, Any]:
    print(f"mie: error: {' '.join(message.split())}", file=sys.stderr)
    return line.refusal(message)
