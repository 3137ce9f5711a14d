"""A comparison of methods as pictures: bars of speed, and a grid of what each drew at equal seeds."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from vargen.compat import check_matplotlib
from vargen.evaluation.compare import Comparison
from vargen.evaluation.sheet import contact_sheet
from vargen.files import atomic_file
from vargen.pipelines.base import VisualPipeline


def picture_grid(pipe: VisualPipeline, comparison: Comparison, most: int = 8, cell: int = 128) -> Image.Image:
    """A row per method, a column per prompt, equal seeds; at most `most` columns."""
    columns = min(most, len(comparison.prompts))
    images, captions = [], []
    for method in comparison.methods:
        images += pipe.decode_tokens(comparison.tokens[method.name][:columns].to(pipe.vqvae.device))
        captions += comparison.prompts[:columns]
    sheet = contact_sheet(images, captions, columns=columns, cell=cell)
    label = 96
    grid = Image.new("RGB", (sheet.width + label, sheet.height), "white")
    grid.paste(sheet, (label, 0))
    draw, font = ImageDraw.Draw(grid), ImageFont.load_default(size=13)
    height = (sheet.height - 6) / len(comparison.methods)
    for row, method in enumerate(comparison.methods):
        top = round(6 + row * height + cell / 2)
        draw.text((8, top - 16), method.name, fill="#111", font=font)
        draw.text((8, top), f"{method.seconds_per_image:.2f} s", fill="#555", font=font)
    return grid


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Write a PNG: ratio to `ar`, tokens per pass, and how many tokens passes committed.

    Raises:
        ImportError: without matplotlib.
    """
    check_matplotlib("a plot needs")
    from matplotlib.figure import Figure

    methods = comparison.methods
    names = [method.name for method in methods]
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    speed, tokens, lengths = figure.subplots(1, 3)
    spread = [
        [max(0.0, method.ratio - method.ratio_quartiles[0]) for method in methods],
        [max(0.0, method.ratio_quartiles[1] - method.ratio) for method in methods],
    ]
    bars = speed.bar(names, [method.ratio for method in methods], yerr=spread, capsize=3, label="measured")
    speed.bar_label(bars, [f"{method.ratio:.2f}" for method in methods], padding=2)
    speed.plot(names, [method.allowed for method in methods], "k_", markersize=22, label="allowed by passes and their cost")
    speed.axhline(1.0, color="grey", linestyle="--", linewidth=1)
    speed.set(title=f"seconds of {comparison.baseline} / seconds, batch {comparison.batch}")
    speed.set_ylim(top=1.25 * speed.get_ylim()[1])  # room for the legend above the bars
    speed.legend(fontsize=8, loc="upper left")
    bars = tokens.bar(names, [method.tokens_per_pass for method in methods], color="tab:green")
    tokens.bar_label(bars, [f"{method.tokens_per_pass:.2f}" for method in methods], padding=2)
    tokens.set(title="tokens per target pass")
    tokens.margins(y=0.1)  # room for the label of the highest
    for method in methods:
        counts = method.accepted_histogram[1:]
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
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
