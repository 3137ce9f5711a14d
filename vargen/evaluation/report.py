"""Reports of an evaluation: table, JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vargen.evaluation.quality import Quality
from vargen.files import atomic_file

Cell = Callable[[Quality], str]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _digits(value: float | None) -> int:
    """Return the number of decimals that shows at least three significant digits: distances of small networks are small."""
    size = abs(value or 0.0)
    return 2 if size >= 10 else 3 if size >= 1 else 4


def _with_interval(value: float | None, half: float | None, digits: int) -> str:
    return _number(value, digits) if value is None or half is None else f"{value:.{digits}f} ± {half:.{digits}f}"


def _score(title: str) -> Cell:
    def cell(each: Quality) -> str:
        found = each.scores.get(title)
        return "-" if found is None else _with_interval(found["mean"], found["half_interval"], 3)

    return cell


def _difference(title: str) -> Cell:
    def cell(each: Quality) -> str:
        found = each.scores.get(title, {}).get("to_baseline")
        return "-" if found is None else _with_interval(found["mean"], found["half_interval"], 3)

    return cell


def columns(rows: Sequence[Quality], baseline: str | None) -> list[tuple[str, Cell]]:
    """Return heads and cells of the columns for which at least one row has a value."""
    titles = list(dict.fromkeys(title for row in rows for title in row.scores))
    found: list[tuple[str, Cell]] = [
        ("method", lambda row: row.name),
        ("kind", lambda row: row.kind or "-"),
        ("pictures", lambda row: str(row.pictures)),
        ("s/picture", lambda row: _number(row.speed.get("seconds"), 3)),
        ("ratio", lambda row: _number(row.speed.get("ratio"))),
        ("tokens/pass", lambda row: _number(row.speed.get("tokens_per_pass"))),
        ("relaxation", lambda row: _number(row.speed.get("relaxation"))),
        ("Frechet", lambda row: _frechet(row)),
        ("KID x 1000", lambda row: _kid(row)),
        ("precision", lambda row: _number(row.distances.get("precision"), 3)),
        ("recall", lambda row: _number(row.distances.get("recall"), 3)),
        ("IS", lambda row: _number(row.distances.get("inception_score"))),
        ("CMMD", lambda row: _number(row.distances.get("cmmd"), 3)),
    ]
    for title in titles:
        found += [(title, _score(title)), (f"{title} - {baseline}", _difference(title))]
    found += [
        (f"same as {baseline}", lambda row: "-" if "same" not in row.drift else f"{100 * row.drift['same']:.1f} %"),
        ("PSNR", lambda row: _number(row.drift.get("psnr"), 1)),
        ("SSIM", lambda row: _number(row.drift.get("ssim"), 3)),
        (f"Frechet to {baseline}", lambda row: _number(row.drift.get("frechet"), _digits(row.drift.get("frechet")))),
    ]
    return [(head, cell) for head, cell in found if head == "method" or any(cell(row) != "-" for row in rows)]


def _frechet(row: Quality) -> str:
    value = row.distances.get("frechet")
    return _with_interval(value, row.distances.get("frechet_half_interval"), _digits(value))


def _kid(row: Quality) -> str:
    found = row.distances
    if "kid" not in found:
        return "-"
    value, deviation = 1000 * found["kid"], 1000 * found["kid_deviation"]
    return f"{value:.{_digits(value)}f} (sd {deviation:.{_digits(value)}f})"


def table_rows(rows: Sequence[Quality], baseline: str | None) -> tuple[list[str], list[list[str]]]:
    """Return the heads, and a list of cells per row."""
    chosen = columns(rows, baseline)
    return [head for head, _ in chosen], [[cell(row) for _, cell in chosen] for row in rows]


def all_notes(rows: Sequence[Quality]) -> list[str]:
    """Return each note once, with the methods it applies to."""
    about: dict[str, list[str]] = {}
    for row in rows:
        for note in row.notes:
            about.setdefault(note, []).append(row.name)
    return [f"{note} ({', '.join(names)})" for note, names in about.items()]


READING = (
    "± is half of a 95 % interval: of means by the normal approximation, of the Frechet distance by a delete-half jackknife "
    "over the drawn pictures, the reference taken as exact.",
    "sd is the deviation over KID's subsets, as the field reports it; the mean is known better.",
    "Differences to the baseline are paired: same prompts, same seeds.",
    "PSNR and SSIM are means over the pictures that differ from the baseline's. An exact method other than a shared-noise one "
    "draws other pictures of the same distribution: there drift is no loss of quality.",
    "Frechet to the baseline is between two drawn sets, and includes the sampling noise of both.",
)


def markdown(rows: Sequence[Quality], baseline: str | None, about: dict[str, Any], figures: Sequence[str]) -> str:
    """Return a Markdown report. `about` is the head's entries by name; `figures` are files in the same folder."""
    heads, cells = table_rows(rows, baseline)
    lines = ["# Evaluation", "", *(f"- {name}: {value}" for name, value in about.items() if value is not None), ""]
    lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(_plain(cell) for cell in row) + " |" for row in cells]
    lines += ["", "## How to read it", "", *(f"- {line}" for line in READING)]
    if notes := all_notes(rows):
        lines += ["", "## Mind", "", *(f"- {note}" for note in notes)]
    if figures:
        lines += ["", "## Pictures", "", *(f"![{Path(name).stem}]({name})\n" for name in figures)]
    return "\n".join(lines).rstrip() + "\n"


def _plain(cell: str) -> str:
    return cell.replace("|", "\\|")


def csv_text(rows: Sequence[Quality]) -> str:
    """Return CSV with a line per method; nested metrics have names joined by dots."""
    flat = [_flat({name: value for name, value in asdict(row).items() if name != "notes"}) for row in rows]
    heads = list(dict.fromkeys(name for row in flat for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, heads, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue()


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{before}{name}.")
        elif isinstance(value, list):
            found[before + name] = " ".join(map(str, value))
        else:
            found[before + name] = "" if value is None else value
    return found


def document(rows: Sequence[Quality], baseline: str | None, about: dict[str, Any]) -> dict[str, Any]:
    """Return plain values for JSON."""
    return {**about, "baseline": baseline, "methods": [asdict(row) for row in rows]}


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_report(
    folder: Path, rows: Sequence[Quality], baseline: str | None, about: dict[str, Any], figures: Sequence[str]
) -> None:
    """Write `metrics.json`, `metrics.csv` and `report.md` to `folder`.

    Raises:
        OSError: a file cannot be written; each file is then either complete or unchanged.
    """
    write_text(folder / "metrics.json", json.dumps(document(rows, baseline, about), indent=1, allow_nan=False) + "\n")
    write_text(folder / "metrics.csv", csv_text(rows))
    write_text(folder / "report.md", markdown(rows, baseline, about, figures))
