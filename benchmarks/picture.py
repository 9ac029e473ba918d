"""Plot a run: one panel per case and one bar per variant, as a multiple of the case's reference, on a log scale."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cases import Case
from benchmarks.report import TITLES, ratio
from benchmarks.rounds import Measured

_COLUMNS = 2
_COLOURS = {"ours": "#1b7f5c", "ray": "#4c72b0", "verl": "#c44e52", "verl-numpy": "#dd9a9c", "monarch": "#8c6bb1"}


def draw(path: Path, cases: list[Case], results: list[Measured]) -> None:
    """Write the picture, unless there is nothing to plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    panels = [(case, bars) for case in cases if case.kind != "plan" and (bars := _bars(case, results))]
    if not panels:
        return
    rows = [panels[first : first + _COLUMNS] for first in range(0, len(panels), _COLUMNS)]
    heights = [1.5 + max(len(bars) for _, bars in row) for row in rows]
    figure, axes = pyplot.subplots(
        len(rows),
        _COLUMNS,
        figsize=(15, 0.24 * sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    for ax, (case, bars) in zip(axes.flat, panels, strict=False):
        bars = bars[::-1]
        names = [TITLES[found.contender] + (f": {found.variant}" if found.variant else "") for found, _ in bars]
        drawn = ax.barh(names, [times for _, times in bars], color=[_COLOURS[found.contender] for found, _ in bars])
        ax.bar_label(drawn, [f"{times:.3g}" for _, times in bars], padding=3, fontsize=7)
        ax.set_xscale("log")
        ax.set_xlim(min(0.5, *(times / 1.3 for _, times in bars)), 2 * max(5.0, *(times for _, times in bars)))
        ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
        ax.xaxis.set_minor_formatter(ticker.NullFormatter())
        ax.axvline(1, color="black", linewidth=0.8)
        ax.tick_params(labelsize=7)
        ax.set_title(f"{case.title} (1 = {case.reference[1] or TITLES[case.reference[0]]})", fontsize=8, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(case: Case, results: list[Measured]) -> list[tuple[Measured, float]]:
    return [
        (found, times)
        for found in results
        if found.case == case.name and found.contender != "memcpy" and (times := ratio(case, found, results))
    ]
