"""The pictures of a report: speed against quality, and what each method drew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from vargen.compat import check_matplotlib
from vargen.evaluation.pictures import Picture, UnreadablePictureError, read_picture
from vargen.evaluation.quality import Quality
from vargen.evaluation.sheet import contact_sheet
from vargen.files import atomic_file

_SHEET, _COLUMNS = 64, 8  # pictures of a sheet, and of a row of the grid
_CELL = 128
_MARKERS = {"exact": "o", "relaxed": "s", "": "o"}


def plot_quality(rows: Sequence[Quality], baseline: str | None, path: Path) -> bool:
    """Write a PNG with tokens per pass, which no machine changes, against each measure of quality; better is up.

    Scores are differences to the baseline's of the same prompts and seeds where there is one: their intervals are narrower.

    Returns whether there was anything to show.

    Raises:
        ImportError: without matplotlib.
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
    """Title, points with half intervals, and whether down is better; of what at least two methods have."""
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
    """A contact sheet of each group's first pictures, and a grid with a row per group; names of the files, grid first."""
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
    """A row per group, a column per item that all groups have."""
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
