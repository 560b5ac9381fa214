"""Write a run as a web page in one file, or as the records that such a page reads."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mie.cli.trace_output import replacing
from mie.errors import RequestError, TraceError
from mie.events import Segment
from mie.page.assets import RECORDED_RUNS
from mie.page.bundle import EmbeddedRun, page_html
from mie.page.cells import NodeText
from mie.page.recording import Recording
from mie.reprs import count


def write_html(
    segments: Iterable[Segment] | None, path: Path, *, source: Path | None, model: str | None
) -> int:
    """Write the page with a run inside, and return its size in bytes.

    Without a log it holds the runs that come with mie. ``model`` names the tokenizer for the text.

    Raises:
        TraceError: the log contradicts itself, or its tokens are not those of the model.
        ModelError: the model cannot be found.
        ConfigError: ``path`` cannot be written.
    """
    if segments is None or source is None:
        runs = [
            EmbeddedRun(name=run.name, title=run.title, gzip=run.compressed())
            for run in RECORDED_RUNS
        ]
    else:
        content = "".join(record_lines(segments, source.name, model)).encode()
        name = source.name
        runs = [EmbeddedRun(name=name, title=name, gzip=gzip.compress(content, mtime=0))]
    page = page_html(runs)
    with replacing(path, source, "--html") as file:
        file.write(page)
    return len(page.encode())


def write_records(
    segments: Iterable[Segment], path: Path, *, source: Path, model: str | None
) -> int:
    """Write the page records of a log, one a line, and return their number.

    Raises:
        TraceError: the log contradicts itself, or its tokens are not those of the model.
        ModelError: the model cannot be found.
        ConfigError: ``path`` cannot be written.
    """
    lines = record_lines(segments, source.name, model)
    with replacing(path, source, "--page") as file:
        file.writelines(lines)
    return len(lines)


def record_lines(segments: Iterable[Segment], name: str, model: str | None) -> list[str]:
    """Return the page records of a log, one a line, and tell on standard error what is left out."""
    recording = Recording(segments, NodeText(None if model is None else _decoder(model)))
    if recording.num_dropped:
        print(
            f"mie: note: the first {count(recording.num_dropped, 'step')} are left out; a page "
            "holds about the last 20,000",
            file=sys.stderr,
        )
    return [line + "\n" for line in recording.lines(name)]


def _decoder(model: str) -> Callable[[Sequence[int]], str]:
    from mie.checkpoint.locate import locate_model  # they load slowly
    from mie.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(locate_model(model, needs_weights=False), None)

    def decode(token_ids: Sequence[int]) -> str:
        try:
            return tokenizer.decode(token_ids, skip_special_tokens=False)
        except RequestError as error:
            raise TraceError(f"the log is not of the model {model}: {error}") from error

    return decode
