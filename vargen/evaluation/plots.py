"""A plot of quality against speed, which needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vargen.files import atomic_file

if TYPE_CHECKING:
    from vargen.evaluation.metrics import MethodMetrics


_MARKERS = {"exact": "o", "relaxed": "s", "": "o"}


def plot_quality_vs_speed(rows: Sequence[MethodMetrics], baseline: str | None, path: Path) -> bool:
    """Write a PNG with tokens per pass, which is independent of the machine, against each quality metric; better is up.

    Scores are differences to the baseline's at equal prompts and seeds if there is a baseline: their intervals are narrower.

    Returns whether there was anything to plot.
    """
    panels = _panels(rows, baseline)
    if not panels:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0 * len(panels) + 1.8, 4.2), layout="constrained")
    colors = {row.name: f"C{number % 10}" for number, row in enumerate(rows)}
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, points, down) in zip(axes, panels, strict=True):
        for row, x, y, half in points:
            style = {"color": colors[row.name], "marker": _MARKERS[row.kind], "markersize": 7, "alpha": 0.8}
            axis.errorbar([x], [y], yerr=None if half is None else [[half], [half]], capsize=3, linestyle="", **style)
        level = next(((y, half) for row, _, y, half in points if row.name == baseline), None)
        if level is not None:
            axis.axhline(level[0], color="grey", linestyle="--", linewidth=1, zorder=0)
        axis.set(xlabel="tokens per pass", ylabel=title + (", lower is better" if down else ""))
        axis.margins(x=0.1, y=0.15)
        if down:
            axis.invert_yaxis()
    for row in rows:
        label = f"{row.name} ({row.kind})" if row.kind else row.name
        axes[-1].plot([], [], linestyle="", color=colors[row.name], marker=_MARKERS[row.kind], label=label)
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return True


Point = tuple["MethodMetrics", float, float, float | None]


def _panels(rows: Sequence[MethodMetrics], baseline: str | None) -> list[tuple[str, list[Point], bool]]:
    """Return title, points with interval half-widths, and whether lower is better, for metrics of two or more methods."""
    rows = [row for row in rows if row.speed.get("tokens_per_pass") is not None]

    def points(values: dict[str, tuple[float, float | None]]) -> list[Point]:
        return [(row, row.speed["tokens_per_pass"], *values[row.name]) for row in rows if row.name in values]

    def distance(name: str) -> dict[str, tuple[float, float | None]]:
        found = {row.name: row.distances for row in rows if row.distances.get(name) is not None}
        return {row: (values[name], values.get(f"{name}_ci95_half_width")) for row, values in found.items()}

    frechet = points(distance("frechet"))
    panels = [("Frechet distance", frechet, True) if len(frechet) > 1 else ("KID", points(distance("kid")), True)]
    for title in dict.fromkeys(title for row in rows for title in row.scores):
        values: dict[str, tuple[float, float | None]] = {}
        for row in rows:
            score = row.scores.get(title, {})
            if baseline is not None:
                zero = {"mean": 0.0, "ci95_half_width": None}
                score = zero if row.name == baseline else score.get("difference_to_baseline", {})
            if score:
                values[row.name] = score["mean"], score["ci95_half_width"]
        panels.append((title if baseline is None else f"{title}, difference to {baseline}", points(values), False))
    return [panel for panel in panels if len(panel[1]) > 1]
