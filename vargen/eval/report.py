"""Reports of an evaluation of images or videos: a table of columns, as text, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vargen.eval.metrics import MethodMetrics, Metrics
from vargen.files import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vargen.eval.video import VideoComparison, VideoMethodResult


class Column(NamedTuple):
    """Head and cells of a column of a table."""

    head: str
    cell: Callable[[Any], str]


def table_cells(columns: Sequence[Column], rows: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
    """Return the heads, and a list of cells per row."""
    return [column.head for column in columns], [[column.cell(row) for column in columns] for row in rows]


def markdown_table(columns: Sequence[Column], rows: Sequence[Any]) -> list[str]:
    """Return the lines of a Markdown table."""
    heads, cells = table_cells(columns, rows)
    return format_table(heads, cells)


def format_table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def _digits(value: float | None) -> int:
    """Return the number of decimals that shows at least three significant digits: distances of small networks are small."""
    size = abs(value or 0.0)
    return 2 if size >= 10 else 3 if size >= 1 else 4


# -- images ------------------------------------------------------------------------------------------------------------


def image_columns(rows: Sequence[MethodMetrics], baseline: str | None) -> list[Column]:
    """Return the columns for which at least one row has a value."""

    def speed(name: str, digits: int = 2) -> Callable[[MethodMetrics], str]:
        return lambda row: _number(row.speed.get(name), digits)

    def distance(name: str, digits: int | None = None) -> Callable[[MethodMetrics], str]:
        return lambda row: _number(row.distances.get(name), _digits(row.distances.get(name)) if digits is None else digits)

    def similarity(name: str, digits: int | None = None) -> Callable[[MethodMetrics], str]:
        return lambda row: _number(row.similarity.get(name), _digits(row.similarity.get(name)) if digits is None else digits)

    def at(batch: int, name: str, digits: int) -> Callable[[MethodMetrics], str]:
        def cell(row: MethodMetrics) -> str:
            found = row.speed if row.speed.get("batch") == batch else row.speed.get("batch1") if batch == 1 else None
            return _number((found or {}).get(name), digits)

        return cell

    batches = sorted({1, *(row.speed["batch"] for row in rows if row.speed)})
    columns = [
        Column("method", lambda row: row.name),
        Column("kind", lambda row: row.kind or "-"),
        Column("images", lambda row: str(row.num_images)),
        *(
            Column(f"{head}, batch {batch}", at(batch, name, digits))
            for batch in batches
            for head, name, digits in (("s/image", "seconds", 3), ("speedup", "speedup", 2))
        ),
        Column("tokens/pass", speed("tokens_per_pass")),
        Column("relaxation", speed("relaxation")),
        Column("Frechet", _frechet),
        Column("KID x 1000", _kid),
        Column("precision", distance("precision", 3)),
        Column("recall", distance("recall", 3)),
        Column("IS", distance("inception_score_mean", 2)),
        Column("CMMD", distance("cmmd", 3)),
    ]
    for title in dict.fromkeys(title for row in rows for title in row.scores):
        columns += [Column(title, _score(title)), Column(f"{title} - {baseline}", _score(title, "difference_to_baseline"))]
    columns += [
        Column(f"same as {baseline}", lambda row: _percent(row.similarity.get("identical_fraction"), 1)),
        Column("PSNR", similarity("psnr", 1)),
        Column("SSIM", similarity("ssim", 3)),
        Column(f"Frechet to {baseline}", similarity("frechet")),
    ]
    return [column for column in columns if column.head == "method" or any(column.cell(row) != "-" for row in rows)]


def _score(title: str, part: str | None = None) -> Callable[[MethodMetrics], str]:
    def cell(row: MethodMetrics) -> str:
        found: Metrics | None = row.scores.get(title)
        found = found.get(part) if found and part else found
        return "-" if found is None else _with_ci(found["mean"], found["ci95_half_width"], 3)

    return cell


def _with_ci(value: float | None, half: float | None, digits: int) -> str:
    return _number(value, digits) if value is None or half is None else f"{value:.{digits}f} ± {half:.{digits}f}"


def _frechet(row: MethodMetrics) -> str:
    value = row.distances.get("frechet")
    return _with_ci(value, row.distances.get("frechet_ci95_half_width"), _digits(value))


def _kid(row: MethodMetrics) -> str:
    if "kid" not in row.distances:
        return "-"
    value, std = 1000 * row.distances["kid"], 1000 * row.distances["kid_std"]
    return f"{value:.{_digits(value)}f} (sd {std:.{_digits(value)}f})"


NOTES_ON_COLUMNS = (
    "± is the half-width of a 95 % confidence interval: of means by the normal approximation, of the Frechet distance by a "
    "delete-half jackknife over the generated images. The reference is taken as exact.",
    "sd is the standard deviation over KID's subsets, as papers report it; the mean has a smaller error.",
    "Differences to the baseline are paired: the same prompts and the same seeds.",
    "PSNR and SSIM are means over the images that differ from the baseline's. An exact method generates other images of the "
    "same distribution, unless it shares the baseline's noise; there, low similarity is no loss of quality.",
    "The Frechet distance to the baseline is between two generated sets, and includes the sampling noise of both.",
)


def latex_table(columns: Sequence[Column], rows: Sequence[Any]) -> list[str]:
    """Return the lines of a LaTeX table, which needs the package booktabs."""
    heads, cells = table_cells(columns, rows)
    lines = [" & ".join(map(_escape_latex, each)) + r" \\" for each in (heads, *cells)]
    body = [r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
    return [rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", *body, r"\end{tabular}"]


def _escape_latex(cell: str) -> str:
    marks = {"±": r"$\pm$", "%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "$": r"\$", "\\": r"\textbackslash{}"}
    return "--" if cell == "-" else "".join(marks.get(c, c) for c in cell)


def group_notes(rows: Sequence[MethodMetrics]) -> list[str]:
    """Return each note once, with the methods it applies to."""
    methods: dict[str, list[str]] = {}
    for row in rows:
        for note in row.notes:
            methods.setdefault(note, []).append(row.name)
    return [f"{note} ({', '.join(names)})" for note, names in methods.items()]


def to_markdown(rows: Sequence[MethodMetrics], baseline: str | None, about: dict[str, Any], figures: Sequence[str]) -> str:
    """Return a Markdown report. `about` is the head's entries by name; `figures` are files in the same folder."""
    lines = ["# Evaluation", "", *(f"- {name}: {value}" for name, value in about.items() if value is not None), ""]
    lines += markdown_table(image_columns(rows, baseline), rows)
    lines += ["", "## How to read it", "", *(f"- {line}" for line in NOTES_ON_COLUMNS)]
    if notes := group_notes(rows):
        lines += ["", "## Caveats", "", *(f"- {note}" for note in notes)]
    if figures:
        lines += ["", "## Images", "", *(f"![{Path(name).stem}]({name})\n" for name in figures)]
    return "\n".join(lines).rstrip() + "\n"


def to_json(rows: Sequence[MethodMetrics], baseline: str | None, about: dict[str, Any]) -> dict[str, Any]:
    """Return plain values for JSON."""
    return {**about, "baseline": baseline, "methods": [asdict(row) for row in rows]}


def write_report(
    folder: Path, rows: Sequence[MethodMetrics], baseline: str | None, about: dict[str, Any], figures: Sequence[str]
) -> None:
    """Write `metrics.json`, `report.md` and `table.tex` to `folder`."""
    texts = {
        "table.tex": "\n".join(latex_table(image_columns(rows, baseline), rows)) + "\n",
        "metrics.json": json.dumps(to_json(rows, baseline, about), indent=1, allow_nan=False) + "\n",
        "report.md": to_markdown(rows, baseline, about, figures),
    }
    for name, text in texts.items():
        with atomic_file(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


# -- videos ------------------------------------------------------------------------------------------------------------


def _video(name: str, digits: int = 2) -> Callable[[VideoMethodResult], str]:
    return lambda row: _number(getattr(row, name), digits)


VIDEO_COLUMNS = [
    Column("method", lambda row: row.name),
    Column("kind", lambda row: row.kind),
    Column("s/video", _video("seconds", 3)),
    Column("speedup", _video("speedup")),
    Column("accepted", lambda row: _percent(row.acceptance)),
    Column("by target", lambda row: _percent(row.target_fraction)),
    Column("score", _video("score")),
    Column("retained", lambda row: _percent(row.quality_retained)),
    Column("flicker", _video("flicker", 4)),
    Column("jump", _video("block_discontinuity", 4)),
    Column("Frechet", _video("distance")),
]


def video_to_markdown(comparison: VideoComparison, head: str) -> str:
    """Return the Markdown report of a comparison of video methods."""
    table = "\n".join(markdown_table(VIDEO_COLUMNS, comparison.methods))
    return f"""# Video (prompts: {len(comparison.prompts)}, blocks of each: {comparison.blocks})

{head}

{table}

Score: the mean of {comparison.scorer} over frames; retained: its position between the drafter's (0 %) and the target's (100 %).
Flicker: mean absolute second difference over time. Jump: by how much
steps between blocks exceed steps within. Frechet: distance of frame features to those of the target's frames.
"""


# -- a plot of quality against speed, which needs matplotlib ---------------------------------------------------------------


PLOTS = ("quality_vs_speed.svg", "quality_vs_speed.pdf")
_MARKERS = {"exact": "o", "relaxed": "s", "": "o"}


def plot_quality_vs_speed(rows: Sequence[MethodMetrics], baseline: str | None) -> Figure | None:
    """Return a figure of each quality metric (a column) over tokens per pass, which hold on any machine, and over seconds.

    Better is up, and faster is at the right. Error bars are 95 % intervals of a metric, and quartiles of seconds. Scores are
    differences to the baseline's at equal prompts and seeds if there is a baseline: their intervals are narrower. The seconds
    are those of images generated alone, or else of the run's batches. None if fewer than two methods can be compared.
    """
    panels = _panels(rows, baseline)
    if not panels:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(panels) + 1.8, 7.2), layout="constrained")
    colors = {row.name: f"C{number % 10}" for number, row in enumerate(rows)}
    grid = figure.subplots(2, len(panels), squeeze=False)
    alone = all(row.speed.get("batch1") for row in rows if row.speed)
    seconds = "seconds per image" + (", alone" if alone else f", batch {rows[0].speed.get('batch')}")
    for column, (title, points, down) in enumerate(panels):
        level = next((y for row, y, _ in points if row.name == baseline), None)
        for axis, label in zip(grid[:, column], ("tokens per pass", seconds), strict=True):
            for row, y, half in points:
                x, spread = _place(row, label == seconds, alone)
                style = {"color": colors[row.name], "marker": _MARKERS[row.kind], "markersize": 6, "alpha": 0.85}
                error = {"xerr": spread, "yerr": None if half is None else [[half], [half]], "capsize": 3, "linestyle": ""}
                axis.errorbar([x], [y], **error, **style)
            if level is not None:
                axis.axhline(level, color="grey", linestyle="--", linewidth=1, zorder=0)
            axis.set(xlabel=label, ylabel=title + (", lower is better" if down else ""))
            axis.margins(x=0.1, y=0.15)
            if down:
                axis.invert_yaxis()
            if label == seconds:
                axis.invert_xaxis()
    for row in rows:
        label = f"{row.name} ({row.kind})" if row.kind else row.name
        grid[0, -1].plot([], [], linestyle="", color=colors[row.name], marker=_MARKERS[row.kind], label=label)
    figure.legend(*grid[0, -1].get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    return figure


def _place(row: MethodMetrics, by_seconds: bool, alone: bool) -> tuple[float, list[list[float]] | None]:
    """Return the position of a method on the horizontal axis, and its error bar."""
    if not by_seconds:
        return row.speed["tokens_per_pass"], None
    found = row.speed["batch1"] if alone else row.speed
    low, high = found["quartiles"] if alone else found["seconds_quartiles"]
    return found["seconds"], [[found["seconds"] - low], [high - found["seconds"]]]


Point = tuple["MethodMetrics", float, float | None]


def _panels(rows: Sequence[MethodMetrics], baseline: str | None) -> list[tuple[str, list[Point], bool]]:
    """Return title, points with interval half-widths, and whether lower is better, for metrics of two or more methods."""
    rows = [row for row in rows if row.speed.get("tokens_per_pass") is not None]

    def points(values: dict[str, tuple[float, float | None]]) -> list[Point]:
        return [(row, *values[row.name]) for row in rows if row.name in values]

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
