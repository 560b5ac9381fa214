"""Save panels as a PNG. This is the one module that knows matplotlib.

The background is transparent, and every colour has a contrast of about 4 : 1 with both white and
GitHub's dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mie.errors import ConfigError
from mie.sim.book.chapter import Panel

INK = "#797979"
COLOURS = ("#2f81d6", "#cf6a17", "#2c9254")
MARKERS = ("o", "s", "D")
WIDTH, HEIGHT = 5.2, 3.7
"""Size of a panel in inches."""


def require_matplotlib() -> None:
    """Raise `ConfigError` if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("plots need matplotlib (pip install mie[plot])") from error


def save_png(panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH * len(panels), HEIGHT), layout="constrained")
    figure.patch.set_alpha(0)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, panel)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw(axes: Any, panel: Panel) -> None:
    axes.patch.set_alpha(0)
    axes.set_title(panel.title, color=INK, fontsize=11, fontweight="bold", loc="left")
    axes.set_xlabel(panel.x_label, color=INK)
    axes.set_ylabel(panel.y_label, color=INK)
    axes.tick_params(colors=INK, which="both")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    if isinstance(panel.series[0].x[0], str):
        _bars(axes, panel)
    else:
        _lines(axes, panel)
    legend = axes.legend(frameon=False, labelcolor=INK, fontsize=9)
    legend.set_visible(len(panel.series) > 1)


def _lines(axes: Any, panel: Panel) -> None:
    ticks = sorted({value for each in panel.series for value in each.x})
    if panel.log_x:
        axes.set_xscale("log", base=2)
        ticks = [value for value in ticks if len(ticks) < 10 or ticks.index(value) % 3 == 0]
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
    if panel.log_y:
        axes.set_yscale("log")
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(color=INK, alpha=0.25, linewidth=0.6)
    for each, colour, marker in zip(panel.series, COLOURS, MARKERS, strict=False):
        axes.plot(
            each.x,
            [float("nan") if value is None else value for value in each.y],
            color=colour,
            label=each.label,
            linestyle="--" if each.is_dashed else "-",
            marker=None if each.is_dashed else marker,
            markersize=4.5,
            linewidth=2,
        )
    if not panel.log_y:
        axes.set_ylim(bottom=0)


def _bars(axes: Any, panel: Panel) -> None:
    width = 0.8 / len(panel.series)
    for index, (each, colour) in enumerate(zip(panel.series, COLOURS, strict=False)):
        left = (index - (len(panel.series) - 1) / 2) * width
        bars = axes.bar(
            [place + left for place in range(len(each.x))],
            each.y,
            0.92 * width,
            color=colour,
            label=each.label,
        )
        axes.bar_label(bars, fmt=lambda value: f"{value:,.1f}", color=INK, fontsize=8, padding=2)
    axes.set_xticks(range(len(panel.series[0].x)), panel.series[0].x)
    axes.margins(y=0.12)
