"""Plots of speedups, of the cost of a pass, and of quality against speed; all of them need matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vargen.compat import validate_matplotlib
from vargen.files import atomic_file

if TYPE_CHECKING:
    from vargen.evaluation.compare import Comparison
    from vargen.evaluation.metrics import MethodMetrics
    from vargen.evaluation.speed import StepReport
    from vargen.evaluation.video import VideoComparison


def _new_figure(width: float, height: float) -> Any:
    """Return a figure that is not tied to a window system. Raises ImportError if matplotlib is not installed."""
    validate_matplotlib("a plot needs")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save_figure(figure: Any, path: Path) -> None:
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def plot_speedups(comparison: Comparison, path: Path) -> None:
    """Write a PNG: speedup over `ar`, tokens per pass, and a histogram of the tokens committed per pass.

    Raises:
        ImportError: matplotlib is not installed.
    """
    methods = comparison.methods
    names = [method.name for method in methods]
    figure = _new_figure(13, 3.8)
    speed, tokens, lengths = figure.subplots(1, 3)
    spread = [
        [max(0.0, method.speedup - method.speedup_quartiles[0]) for method in methods],
        [max(0.0, method.speedup_quartiles[1] - method.speedup) for method in methods],
    ]
    bars = speed.bar(names, [method.speedup for method in methods], yerr=spread, capsize=3, label="measured")
    speed.bar_label(bars, [f"{method.speedup:.2f}" for method in methods], padding=2)
    speed.plot(
        names,
        [method.predicted_speedup for method in methods],
        "k_",
        markersize=22,
        label="predicted from passes and their cost",
    )
    speed.axhline(1.0, color="grey", linestyle="--", linewidth=1)
    speed.set(title=f"seconds of {comparison.baseline} / seconds, batch {comparison.batch}")
    speed.set_ylim(top=1.25 * speed.get_ylim()[1])  # room for the legend above the bars
    speed.legend(fontsize=8, loc="upper left")
    bars = tokens.bar(names, [method.tokens_per_pass for method in methods], color="tab:green")
    tokens.bar_label(bars, [f"{method.tokens_per_pass:.2f}" for method in methods], padding=2)
    tokens.set(title="tokens per target pass")
    tokens.margins(y=0.1)  # room for the label of the highest bar
    for method in methods:
        counts = method.committed_histogram[1:]
        passes = sum(counts)
        if method.name != comparison.baseline and passes > 0:
            shares = [count / passes for count in counts]
            lengths.plot(range(1, len(counts) + 1), shares, marker=".", label=method.name)
    lengths.set(title="tokens that a pass committed", xlabel="tokens", ylabel="share of passes")
    lengths.xaxis.get_major_locator().set_params(integer=True)
    if len(methods) > 1:
        lengths.legend()
    for axis in (speed, tokens):
        axis.tick_params(axis="x", rotation=30)
    _save_figure(figure, path)


def plot_pass_cost(reports: Sequence[StepReport], path: Path) -> None:
    """Write a PNG: a panel per model, a line per batch size; 1 is the time to read the weights once.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = _new_figure(5 * len(reports), 3.8)
    axes = figure.subplots(1, len(reports), squeeze=False)[0]
    for axis, report in zip(axes, reports, strict=True):
        for batch in dict.fromkeys(result.batch for result in report.results):
            line = [result for result in report.results if result.batch == batch]
            unit = report.read_milliseconds
            widths = [result.tokens for result in line]
            axis.plot(widths, [result.over_read for result in line], marker="o", label=f"batch {batch}")
            quartiles = [[result.quartiles[i] / unit for result in line] for i in (0, 1)]
            axis.fill_between(widths, *quartiles, alpha=0.2)
        axis.axhline(1.0, color="grey", linestyle="--", linewidth=1)
        axis.set(xscale="log", yscale="log", xlabel="tokens fed per image", ylabel="cost (weights read once = 1)")
        axis.set_xticks(sorted({result.tokens for result in report.results}))
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.minorticks_off()
        axis.set_title(f"{report.model}, {report.dtype}")
        axis.grid(alpha=0.3)
        axis.legend()
    _save_figure(figure, path)


_MARKERS = {"exact": "o", "relaxed": "s", "": "o"}


def plot_quality_vs_speed(rows: Sequence[MethodMetrics], baseline: str | None, path: Path) -> bool:
    """Write a PNG with tokens per pass, which is independent of the machine, against each quality metric; better is up.

    Scores are differences to the baseline's at equal prompts and seeds if there is a baseline: their intervals are narrower.

    Returns whether there was anything to plot.

    Raises:
        ImportError: matplotlib is not installed.
    """
    panels = _panels(rows, baseline)
    if not panels:
        return False
    figure = _new_figure(5.0 * len(panels) + 1.8, 4.2)
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
    _save_figure(figure, path)
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


def plot_video_tradeoff(comparison: VideoComparison, path: Path) -> None:
    """Write a PNG: score against seconds, a point per method, and the line between drafter and target.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = _new_figure(7, 4.5)
    axis = figure.subplots()
    rows = {row.name: row for row in comparison.methods}
    ends = [rows[name] for name in ("draft", "target") if name in rows]
    if len(ends) == 2:
        axis.plot([row.seconds for row in ends], [row.score for row in ends], "--", color="grey", linewidth=1)
    for row in comparison.methods:
        axis.plot(row.seconds, row.score, "o")
        axis.annotate(row.name, (row.seconds, row.score), textcoords="offset points", xytext=(5, 4), fontsize=8)
    axis.set(xlabel="seconds of a video", ylabel=f"score of frames ({comparison.scorer})")
    axis.grid(alpha=0.3)
    _save_figure(figure, path)
