"""The cost of a pass against the tokens it feeds, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vargen.compat import check_matplotlib
from vargen.evaluation.speed import StepReport
from vargen.files import atomic_file


def plot_steps(reports: Sequence[StepReport], path: Path) -> None:
    """Write a PNG: a panel per model, a line per batch; 1 is the time to read the weights once.

    Raises:
        ImportError: without matplotlib.
    """
    check_matplotlib("a plot needs")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(reports), 3.8), layout="constrained")  # of no window system, hence no pyplot
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
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
