"""Write the book: a JSON file and a plot for each chapter, and a page made from the files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import Any

from book import batching, capacity, chunking, engine, policies, prefix, pressure
from book.chapter import Chapter, Panel, Result, Scale

CHAPTERS: Mapping[str, Chapter] = MappingProxyType(
    {
        "capacity": capacity,
        "batching": batching,
        "prefix": prefix,
        "pressure": pressure,
        "chunking": chunking,
        "policies": policies,
        "engine": engine,
    }
)
"""The chapters by name, in the order of the book."""

PAGE = "README.md"
WIDTH = 110
BEGIN, END = "<!-- book: begin -->", "<!-- book: end -->"
"""The marks around the summary, which can be in any file."""

SOURCES = """\
Published: [a] [WeishuZ/mini-vllm](https://github.com/WeishuZ/mini-vllm), [b]
[shekkari1999/mini-vllm](https://github.com/shekkari1999/mini-vllm), [c] the
[write-up](https://kobeyoung.net/projects/mini-inference-engine) of a C++ engine, under the same
conditions; of [c]'s load only its traces are known."""

INK = "#797979"
COLOURS = ("#2f81d6", "#cf6a17", "#2c9254")
"""They and the ink have a contrast of about 4 : 1 with both white and GitHub's dark page."""
MARKERS = ("o", "s", "D")
WIDTH_INCHES, HEIGHT_INCHES = 5.2, 3.7


def run_chapter(name: str, scale: Scale) -> Result:
    """Run a chapter and return its result with its name."""
    return {"benchmark": name, "scale": scale, **CHAPTERS[name].run(scale)}


# Pages.


def _template() -> dict[str, str]:
    """Return the texts of `page.md` by their headings. The first has no heading."""
    text = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^##? (.+?)\n\n(.*?)(?=\n## |\Z)", text, re.DOTALL | re.MULTILINE))


def section(result: Result, picture: str = "", data: str = "") -> str:
    """Return a chapter as Markdown: findings and text."""
    chapter = CHAPTERS[result["benchmark"]]
    facts = chapter.facts(result)
    return _wrapped(_template()[chapter.TITLE].format(**facts, picture=picture, data=data))


def _wrapped(text: str) -> str:
    """Wrap paragraphs to one width, and leave tables and pictures unchanged."""
    return "\n\n".join(
        part if part.startswith(("|", "!")) else fill(part, WIDTH, break_on_hyphens=False)
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
    """Write the page from the results and plots in the directory."""
    results = read_results(directory)
    [(title, head), *_] = _template().items()
    parts = [f"# {title}", _wrapped(head).replace("{summary}", summary(results, ""))]
    for name, result in results.items():
        title = CHAPTERS[name].TITLE
        picture = f"![{title}: the numbers are in {name}.json]({name}.png)"
        has_plot = (directory / f"{name}.png").exists()
        data = f"Data: [{name}.json]({name}.json)"
        parts += [f"## {title}", section(result, picture if has_plot else "", data)]
    (directory / PAGE).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


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


# Plots.


def write_png(result: Result, directory: Path) -> None:
    """Write NAME.png with a transparent background. It needs matplotlib."""
    from matplotlib.figure import Figure

    name = result["benchmark"]
    panels = CHAPTERS[name].panels(result)
    figure = Figure(figsize=(WIDTH_INCHES * len(panels), HEIGHT_INCHES), layout="constrained")
    figure.patch.set_alpha(0)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, panel)
    figure.savefig(directory / f"{name}.png", dpi=110, metadata={"Software": None})


def _draw(axes: Any, panel: Panel) -> None:
    axes.patch.set_alpha(0)
    axes.set_title(panel.title, color=INK, fontsize=11, fontweight="bold", loc="left")
    axes.set_xlabel(panel.x_label, color=INK)
    axes.set_ylabel(panel.y_label, color=INK)
    axes.tick_params(colors=INK, which="both")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    places = [x for x, _ in panel.lines.values()]
    if isinstance(places[0][0], str):
        _draw_bars(axes, panel)
    else:
        _draw_lines(axes, panel, sorted({value for x in places for value in x}))
    legend = axes.legend(frameon=False, labelcolor=INK, fontsize=9)
    legend.set_visible(len(panel.lines) > 1)


def _draw_lines(axes: Any, panel: Panel, ticks: list[float]) -> None:
    if panel.log_x:
        axes.set_xscale("log", base=2)
        ticks = [value for value in ticks if len(ticks) < 10 or ticks.index(value) % 3 == 0]
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
    if panel.log_y:
        axes.set_yscale("log")
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(color=INK, alpha=0.25, linewidth=0.6)
    for (label, (x, y)), colour, marker in zip(panel.lines.items(), COLOURS, MARKERS, strict=False):
        is_dashed = label == panel.dashed
        axes.plot(
            x,
            [float("nan") if value is None else value for value in y],
            color=colour,
            label=label,
            linestyle="--" if is_dashed else "-",
            marker=None if is_dashed else marker,
            markersize=4.5,
            linewidth=2,
        )
    if not panel.log_y:
        axes.set_ylim(bottom=0)


def _draw_bars(axes: Any, panel: Panel) -> None:
    width = 0.8 / len(panel.lines)
    labels: Any = ()
    for index, ((label, (x, y)), colour) in enumerate(
        zip(panel.lines.items(), COLOURS, strict=False)
    ):
        labels, left = x, (index - (len(panel.lines) - 1) / 2) * width
        places = [place + left for place in range(len(x))]
        bars = axes.bar(places, y, 0.92 * width, color=colour, label=label)
        axes.bar_label(bars, fmt=lambda value: f"{value:,.1f}", color=INK, fontsize=8, padding=2)
    axes.set_xticks(range(len(labels)), labels)
    axes.margins(y=0.12)
