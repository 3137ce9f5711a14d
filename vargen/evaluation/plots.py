"""Plots of a comparison of methods: bars of speed, a grid of images with equal seeds, and quality against speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from vargen.compat import check_matplotlib
from vargen.evaluation.compare import Comparison
from vargen.evaluation.contact_sheets import contact_sheet
from vargen.evaluation.image_files import Picture, UnreadablePictureError, read_picture
from vargen.evaluation.quality import Quality
from vargen.evaluation.speed import StepReport
from vargen.files import atomic_file
from vargen.pipelines.base import VisualPipeline


def picture_grid(pipe: VisualPipeline, comparison: Comparison, most: int = 8, cell: int = 128) -> Image.Image:
    """Return a grid with a row per method and a column per prompt, with equal seeds; at most `most` columns."""
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
    """Write a PNG: speedup over `ar`, tokens per pass, and a histogram of the tokens committed per pass.

    Raises:
        ImportError: matplotlib is not installed.
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
    tokens.margins(y=0.1)  # room for the label of the highest bar
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


def plot_steps(reports: Sequence[StepReport], path: Path) -> None:
    """Write a PNG: a panel per model, a line per batch size; 1 is the time to read the weights once.

    Raises:
        ImportError: matplotlib is not installed.
    """
    check_matplotlib("a plot needs")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(reports), 3.8), layout="constrained")  # not tied to a window system, hence no pyplot
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


_SHEET, _COLUMNS = 64, 8  # images per sheet, and per row of the grid
_CELL = 128
_MARKERS = {"exact": "o", "relaxed": "s", "": "o"}


def plot_quality(rows: Sequence[Quality], baseline: str | None, path: Path) -> bool:
    """Write a PNG with tokens per pass, which is independent of the machine, against each quality metric; better is up.

    Scores are differences to the baseline's at equal prompts and seeds if there is a baseline: their intervals are narrower.

    Returns whether there was anything to plot.

    Raises:
        ImportError: matplotlib is not installed.
    """
    check_matplotlib("a plot needs")
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    panels = _panels(rows, baseline)
    if not panels:
        return False
    names = [row.name for row in rows]
    colours = {name: colormaps["tab10"](number % 10) for number, name in enumerate(names)}
    figure = Figure(figsize=(5.0 * len(panels) + 1.8, 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, points, down) in zip(axes, panels, strict=True):
        for row, x, y, half in points:
            style = {"color": colours[row.name], "marker": _MARKERS[row.kind], "markersize": 7, "alpha": 0.8}
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
        axes[-1].plot([], [], linestyle="", color=colours[row.name], marker=_MARKERS[row.kind], label=label)
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return True


Point = tuple[Quality, float, float, float | None]


def _panels(rows: Sequence[Quality], baseline: str | None) -> list[tuple[str, list[Point], bool]]:
    """Return title, points with interval half-widths, and whether lower is better, for metrics of two or more methods."""
    drawn = [row for row in rows if row.speed.get("tokens_per_pass") is not None]
    found: list[tuple[str, list[Point], bool]] = []
    distances: list[Point] = [
        (row, row.speed["tokens_per_pass"], row.distances["frechet"], row.distances.get("frechet_half_interval"))
        for row in drawn
        if row.distances.get("frechet") is not None
    ]
    kernel: list[Point] = [
        (row, row.speed["tokens_per_pass"], row.distances["kid"], None) for row in drawn if "kid" in row.distances
    ]
    found.append(("Frechet distance", distances, True) if len(distances) > 1 else ("KID", kernel, True))
    for title in dict.fromkeys(title for row in drawn for title in row.scores):
        points: list[Point] = []
        for row in drawn:
            score = row.scores.get(title, {})
            if baseline is not None:
                none = {"mean": 0.0, "half_interval": None}
                score = none if row.name == baseline else score.get("to_baseline", {})
            if score:
                points.append((row, row.speed["tokens_per_pass"], score["mean"], score["half_interval"]))
        found.append((title if baseline is None else f"{title}, difference to {baseline}", points, False))
    return [panel for panel in found if len(panel[1]) > 1]


def write_sheets(folder: Path, groups: Mapping[str, Sequence[Picture]], slugs: Mapping[str, str]) -> list[str]:
    """Write a contact sheet of each group's first images, and a grid with a row per group; returns file names, grid first."""
    names = []
    grid = _grid(groups)
    if grid is not None:
        names.append(_save(grid, folder, "sheets/methods.png"))
    for group, pictures in groups.items():
        chosen = [(image, picture) for picture in pictures[:_SHEET] if (image := _readable(picture)) is not None]
        if chosen:
            captions = [picture.text or Path(picture.file).name for _, picture in chosen]
            sheet = contact_sheet([image for image, _ in chosen], captions, _COLUMNS, _CELL)
            names.append(_save(sheet, folder, f"sheets/{slugs[group]}.png"))
    return names


def _readable(picture: Picture) -> Image.Image | None:
    try:
        return read_picture(Path(picture.file))
    except UnreadablePictureError:
        return None


def _grid(groups: Mapping[str, Sequence[Picture]]) -> Image.Image | None:
    """Return a grid with a row per group, and a column per index that all groups have."""
    if len(groups) < 2:
        return None
    by_item = {group: {picture.item: picture for picture in pictures} for group, pictures in groups.items()}
    shared = sorted(set.intersection(*(set(own) for own in by_item.values())))[:_COLUMNS]
    images, captions = [], []
    for group in groups:
        for item in shared:
            picture = by_item[group][item]
            image = _readable(picture)
            if image is None:
                return None
            images.append(image)
            captions.append(picture.text or str(item))
    if not images:
        return None
    sheet = contact_sheet(images, captions, len(shared), _CELL)
    font = ImageFont.load_default(size=13)
    width = 16 + max(round(font.getlength(group)) for group in groups)
    grid = Image.new("RGB", (sheet.width + width, sheet.height), "white")
    grid.paste(sheet, (width, 0))
    draw = ImageDraw.Draw(grid)
    height = (sheet.height - 6) / len(groups)
    for row, group in enumerate(groups):
        draw.text((8, round(6 + row * height + _CELL / 2) - 8), group, fill="#111", font=font)
    return grid


def _save(image: Image.Image, folder: Path, name: str) -> str:
    with atomic_file(folder / name) as temporary:
        image.save(temporary, format="PNG")
    return name
