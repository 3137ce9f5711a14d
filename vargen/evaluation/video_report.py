"""Reports of a video comparison: a table, strips of frames, and a plot of score against time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vargen.compat import check_matplotlib
from vargen.evaluation.video import VideoComparison
from vargen.files import atomic_file

HEAD = [
    "method", "kind", "s/video", "ratio", "accepted", "by target", "score", "retained", "worst", "drift", "flicker", "jump",
    "Frechet", "predicted/measured",
]  # fmt: skip


def table_rows(comparison: VideoComparison) -> list[list[str]]:
    """Return a row of cells for each method, under `HEAD`."""

    def share(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.0f} %"

    def number(value: float | None, digits: int = 2) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    return [
        [
            row.name, row.kind, f"{row.seconds:.3f}", f"{row.ratio:.2f}", share(row.acceptance), share(row.target_share),
            number(row.score), share(row.retained), number(row.worst), number(row.drift), number(row.flicker, 4),
            number(row.jump, 4), number(row.distance), number(row.predicted),
        ]
        for row in comparison.methods
    ]  # fmt: skip


def markdown(comparison: VideoComparison, head: str) -> str:
    """Return the Markdown report."""
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}", *(f"| {' | '.join(row)} |" for row in table_rows(comparison))]
    costs = "Seconds of the parts of a block were not measured: that takes `draft`, and a method that scores and refuses."
    if comparison.costs is not None:
        said = {name: value for name, value in vars(comparison.costs).items() if value is not None}
        parts = ", ".join(f"{name} {1e3 * value:.1f}" for name, value in said.items())
        costs = f"Milliseconds of a block: {parts}."
        if comparison.break_even_acceptance is not None:
            even = f"{100 * comparison.break_even_acceptance:.0f} %"
            costs += f" Drafting pays above an acceptance of {even}, if the target sees every block."
    return f"""# Video: {len(comparison.prompts)} prompts, {comparison.blocks} blocks each

{head}

{chr(10).join(lines)}

{costs}

Score: the mean of {comparison.scorer} over frames; retained: where it lies from the drafter's (0 %) to the target's (100 %).
Drift: score of the last third less the first. Flicker: mean absolute second difference over time. Jump: excess of steps between
blocks. Frechet: of frame features, to the target's frames.
"""


def strips(comparison: VideoComparison, columns: int = 8, cell: int = 64) -> Image.Image:
    """Return, for each prompt whose frames were kept, a row of frames by each method."""
    names = list(comparison.frames)
    videos = len(comparison.frames[names[0]])
    label = 96
    sheet = Image.new("RGB", (label + columns * (cell + 2), max(1, videos * len(names)) * (cell + 2)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for video in range(videos):
        for place, name in enumerate(names):
            top = (video * len(names) + place) * (cell + 2)
            frames = comparison.frames[name][video]
            chosen = np.linspace(0, len(frames) - 1, min(columns, len(frames))).round().astype(int)
            draw.text((4, top + 8), name, fill="#111", font=font)
            draw.text((4, top + 24), comparison.prompts[video][:16], fill="#666", font=font)
            for column, number in enumerate(chosen):
                picture = Image.fromarray(frames[number]).resize((cell, cell), Image.Resampling.LANCZOS)
                sheet.paste(picture, (label + column * (cell + 2), top))
    return sheet


def plot_comparison(comparison: VideoComparison, path: Path) -> None:
    """Write a PNG: score against seconds, a point per method, and the line between drafter and target.

    Raises:
        ImportError: matplotlib is not installed.
    """
    check_matplotlib("a plot needs")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
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
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
