"""Run chapters of the book of benchmarks, and print their findings.

    python scripts/benchmark.py book [NAME ...] [--scale small]
    python scripts/benchmark.py book --output-dir docs/book --summary docs/benchmarks.md

Every chapter runs the real scheduler and allocator on a simulated clock, so its results are the
same on every machine. Without a name every chapter runs, in a few minutes. The chapter ``tiers``
needs conversation_trace.jsonl of Mooncake's FAST25-release, compressed by xz (--trace). With
--output-dir each chapter writes NAME.json there, and README.md is written again from all results
in that directory.
`python scripts/benchmark.py plots docs/book` draws the plots.
"""

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import Any

from bench.book import (
    batching,
    capacity,
    chunking,
    drafts,
    policies,
    prefix,
    pressure,
    snapshots,
    tiers,
)
from bench.book.chapter import Chapter, Result, Scale
from bench.harness import parser_of

CHAPTERS: Mapping[str, Chapter] = MappingProxyType(
    {
        "capacity": capacity,
        "batching": batching,
        "prefix": prefix,
        "tiers": tiers,
        "snapshots": snapshots,
        "pressure": pressure,
        "chunking": chunking,
        "drafts": drafts,
        "policies": policies,
    }
)
"""The chapters by name, in the order of the book."""

PAGE = "README.md"
WIDTH = 110
BEGIN, END = "<!-- book: begin -->", "<!-- book: end -->"
"""The marks around the summary. It can be in any file."""

SOURCES = """\
Published: [a] [WeishuZ/mini-vllm](https://github.com/WeishuZ/mini-vllm), [b]
[shekkari1999/mini-vllm](https://github.com/shekkari1999/mini-vllm), [c] the
[write-up](https://kobeyoung.net/projects/mini-inference-engine) of a C++ engine, [d]
[Mooncake](https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release). The chapters repeat the
published conditions. The load of [c] is not published, so its rows compare similar loads."""


ON_A_TRACE = ("tiers",)
"""The chapters that read a published trace at full scale."""


def run_chapter(name: str, scale: Scale, trace: Path | None = None) -> Result:
    """Run a chapter and return its result with its name."""
    chapter: Any = CHAPTERS[name]
    result = chapter.run(scale, trace) if name in ON_A_TRACE else chapter.run(scale)
    return {"benchmark": name, "scale": scale, **result}


def _template() -> dict[str, str]:
    """Return the texts of `page.md` by their headings. The first has no heading."""
    text = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^##? (.+?)\n\n(.*?)(?=\n## |\Z)", text, re.DOTALL | re.MULTILINE))


def section(result: Result) -> str:
    """Return a chapter as Markdown: findings and text."""
    chapter = CHAPTERS[result["benchmark"]]
    return _wrapped(_template()[chapter.TITLE].format(**chapter.facts(result)))


def _wrapped(text: str) -> str:
    """Wrap paragraphs to one width, and leave tables unchanged."""
    return "\n\n".join(
        part if part.startswith("|") else fill(part, WIDTH, break_on_hyphens=False)
        for part in text.strip().split("\n\n")
    )


def summary(results: Mapping[str, Result], page: str) -> str:
    """Return a line for each chapter, linked to its section of ``page``, and a line of sources."""
    lines = ["|  | what it changes | here | published |", "| --- | --- | --- | --- |"]
    for name, result in results.items():
        title = CHAPTERS[name].TITLE
        first = section(result).split("\n| --- | --- | --- |\n")[1].partition("\n")[0]
        lines.append(f"| [{title}]({page}#{title.lower().replace(' ', '-')}) {first}")
    return "\n".join(lines) + "\n\n" + _wrapped(SOURCES)


def read_results(directory: Path) -> dict[str, Result]:
    """Read the existing results, in the order of the book."""
    paths = {name: directory / f"{name}.json" for name in CHAPTERS}
    return {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name, path in paths.items()
        if path.exists()
    }


def write_json(result: Result, directory: Path) -> None:
    """Write NAME.json, with the same bytes for the same result."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    (directory / f"{result['benchmark']}.json").write_text(text, encoding="utf-8")


def write_page(directory: Path) -> None:
    """Write the page from the results in the directory."""
    results = read_results(directory)
    [(title, head), *_] = _template().items()
    parts = [f"# {title}", _wrapped(head).replace("{summary}", summary(results, ""))]
    for name, result in results.items():
        parts += [
            f"## {CHAPTERS[name].TITLE}",
            _with_plot(section(result), name),
            f"Data: [{name}.json]({name}.json). "
            f"Repeat it: `python scripts/benchmark.py book {name}`",
        ]
    (directory / PAGE).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _with_plot(text: str, name: str) -> str:
    """Put the chapter's plot after its first paragraph, the question."""
    question, _, rest = text.partition("\n\n")
    alt = question.removeprefix("**Question:** ").replace("\n", " ")
    return f"{question}\n\n![{alt}](plots/{name}.svg)\n\n{rest}"


def update_summary(file: Path, directory: Path) -> None:
    """Put the summary of ``directory`` between the marks in ``file``.

    Raises:
        ValueError: the file has no such marks.
    """
    before, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{file} has no lines {BEGIN} and {END} for the summary to stand between")
    page = Path(os.path.relpath(directory / PAGE, file.parent)).as_posix()
    body = summary(read_results(directory), page)
    file.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}", encoding="utf-8")


def main(argv: Sequence[str]) -> None:
    """Run the chapters that the command line names."""
    parser = parser_of("book", __doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"chapters: {', '.join(CHAPTERS)}")
    add("--scale", choices=("full", "small"), default="full", help="small: a look within seconds")
    add("--output-dir", type=Path, metavar="DIR", help="directory for JSON and README.md")
    add("--trace", type=Path, metavar="FILE", help="Mooncake's trace of conversations (JSON, xz)")
    add("--summary", type=Path, metavar="FILE", help="Markdown file with the summary of DIR")
    args = parser.parse_args(argv)
    for name in set(args.names) - set(CHAPTERS):
        parser.error(f"no chapter is named {name!r}; there are {', '.join(CHAPTERS)}")
    if args.summary and not args.output_dir:
        parser.error("--summary needs --output-dir")
    has_trace = args.trace is not None or args.scale == "small"
    for name in args.names or CHAPTERS:
        if name in ON_A_TRACE and not has_trace:
            print(f"{name}: left out, because it needs --trace", file=sys.stderr)
            continue
        start = time.perf_counter()
        result = run_chapter(name, args.scale, args.trace)
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
        print(f"## {CHAPTERS[name].TITLE}\n\n{section(result)}\n", flush=True)
        if args.output_dir:
            write_json(result, args.output_dir)
    if args.output_dir:
        write_page(args.output_dir)
        if args.summary:
            update_summary(args.summary, args.output_dir)
