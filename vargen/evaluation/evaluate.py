"""The second stage of an evaluation: from image files to a report."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vargen.compat import installed_version
from vargen.evaluation.features import Extractor, Features, as_batch, picture_array
from vargen.evaluation.generation import Engine, locally
from vargen.evaluation.image_files import Picture, folder_pictures, read_picture
from vargen.evaluation.measurement import CHUNK, Instruments, Measured, measure
from vargen.evaluation.plots import plot_quality, write_sheets
from vargen.evaluation.quality import Quality, quality_of, speed_of
from vargen.evaluation.reference_statistics import Statistics, holds_samples, read_samples, write_samples
from vargen.evaluation.report import write_report
from vargen.evaluation.run_directory import Record, RunFolder, cannot_write, file_digest, file_slug
from vargen.scoring.packaged import packaged_scorers, scorer_folder

logger = logging.getLogger("vargen")

REFERENCE = "reference.npz"  # next to a packaged scorer: statistics of the images it was trained on
Show = Callable[[int, int], None]


@dataclass
class Evaluation:
    """Results of an evaluation: a row per method, the baseline's name if it is included, and the report's head."""

    rows: list[Quality]
    baseline: str | None
    about: dict[str, Any]
    measured: dict[str, Measured]


def default_reference(extractor: str | None) -> Path | None:
    """Return the path of the reference statistics packaged with an extractor; None if there are none."""
    if extractor not in packaged_scorers():
        return None
    file = scorer_folder(str(extractor)) / REFERENCE
    return file if file.is_file() else None


# -- the reference -------------------------------------------------------------------------------------------------------


def open_reference(path: Path, instruments: Instruments, kept: Path | None = None, engine: Engine = locally) -> Statistics:
    """Open the statistics that distances are measured to.

    Args:
        path: `.npz` of statistics or of samples, in ADM's layout, or a folder of images. If a file holds both, as published
            references do, the Frechet distance uses the statistics and all others the samples, as in ADM's suite.
        kept: folder where features are cached.

    Raises:
        ValueError: the statistics are of another extractor, or the file is of neither kind. FileNotFoundError: it is missing.
    """
    extractor = instruments.opened().get("extractor")
    if not isinstance(extractor, Extractor):
        raise ValueError("a reference needs an extractor: give --extractor")
    if path.is_dir():
        only = replace(instruments, scorers=(), drift=False)
        return statistics_of(measure({"reference": folder_pictures(path)}, only, kept, engine)["reference"], extractor)
    if path.suffix != ".npz":
        raise ValueError(f"reference must be a folder of pictures or a .npz file, got {str(path)!r}")
    if not path.is_file():
        raise FileNotFoundError(f"reference {str(path)!r} does not exist")
    if holds_samples(path, alone=True):
        return _of_samples(path, extractor, instruments.resize, kept)
    statistics = Statistics.read(path)
    statistics.check_extractor(extractor.identity, extractor.name, f"reference {str(path)!r}")
    if statistics.features is None and holds_samples(path):
        statistics.features = _of_samples(path, extractor, instruments.resize, kept).features
    return statistics


def _of_samples(path: Path, extractor: Extractor, resize: int | None, kept: Path | None) -> Statistics:
    """Return the statistics of a batch of samples, computed only once if there is a cache folder `kept`."""
    file = None
    if kept is not None:
        key = hashlib.sha256(f"{file_digest(path)} {extractor.identity} {resize}".encode()).hexdigest()[:16]
        file = kept / "reference" / f"{path.stem}-{key}.npz"
        if file.is_file():
            with contextlib.suppress(ValueError):  # damaged: computed again
                return Statistics.read(file)
    made = statistics_of(_measured_samples(path, extractor, resize), extractor)
    if file is not None:
        try:
            made.write(file)
        except OSError as error:
            raise cannot_write(str(file), error) from error
    return made


def _measured_samples(path: Path, extractor: Extractor, resize: int | None) -> Measured:
    shape, pictures = read_samples(path)
    parts: list[Features] = []
    batch: list[np.ndarray] = []
    for number, array in enumerate(pictures, 1):
        batch.append(picture_array(Image.fromarray(array), resize))
        if len(batch) == CHUNK or number == shape[0]:
            parts.append(extractor(as_batch(batch)))
            batch = []
    columns = {"items": torch.arange(shape[0]), "features": torch.cat([part.pooled for part in parts])}
    if logits := [part.logits for part in parts if part.logits is not None]:
        columns["logits"] = torch.cat(logits)
    return Measured({"extractor": columns}, [], (resize, resize) if resize else (shape[1], shape[2]))


def statistics_of(measured: Measured, extractor: Extractor, keep: bool = True) -> Statistics:
    """Return the statistics of a measured group, including its features if `keep`.

    Raises:
        ValueError: no extractor measured the group, or it has fewer than two images.
    """
    if "extractor" not in measured.arrays:
        raise ValueError("statistics need pictures and an extractor: give --extractor")
    return Statistics.of(measured.arrays["extractor"]["features"], extractor.identity, measured.size, keep)


# -- runs and folders ------------------------------------------------------------------------------------------------------


def evaluate_run(
    folder: RunFolder,
    instruments: Instruments,
    reference: Statistics | None = None,
    engine: Engine = locally,
    progress: Show | None = None,
) -> Evaluation:
    """Measure the images of a run, for all methods that have any. Images that have changed are skipped.

    Raises:
        ValueError: the folder holds no run, or the run has no images; see also `measure`.
    """
    settings, drawn = folder.settings(), folder.drawn()
    by_method: dict[str, dict[int, Record]] = {method: {} for method in settings["methods"]}
    for (method, item), record in sorted(drawn.items()):
        if method in by_method:
            by_method[method][item] = record
    if not any(by_method.values()):
        raise ValueError(f"{str(folder.path)!r} holds no pictures yet: generate some with `vargen eval`")
    baseline = settings["baseline"] if by_method.get(settings["baseline"]) else None
    groups = {
        method: [_picture(folder, record, baseline, by_method) for record in records.values()]
        for method, records in by_method.items()
        if records
    }
    instruments = replace(instruments, drift=baseline is not None)
    measured = measure(groups, instruments, folder.path / "measured", engine, progress)
    rows = _rows(measured, instruments, reference, baseline)
    for row in rows:
        records = by_method[row.name]
        row.kind, row.asked, row.pictures = settings["methods"][row.name]["kind"], settings["num"], len(records)
        row.speed = speed_of(list(records.values()), by_method[baseline] if baseline else {})
        if len(records) < row.asked:
            row.notes.append(f"{len(records)} of {row.asked} pictures are drawn")
    batch, threads = settings["batch"], sorted({n for row in rows for n in row.speed["threads"]})
    about = {
        "model": settings["model"],
        "sampling": _told(settings["sampling"]) or "the model's",
        "batch": batch,
        "CPU threads": ", ".join(map(str, threads)),
        "device": settings["device"],
        "seed": settings["seed"],
        **_about(instruments, reference),
    }
    return Evaluation(rows, baseline, about, measured)


def _picture(folder: RunFolder, record: Record, baseline: str | None, drawn: dict[str, dict[int, Record]]) -> Picture:
    method, item = record["method"], record["item"]
    against = None
    if baseline is not None and method != baseline and item in drawn[baseline]:
        against = str(folder.path / folder.image(baseline, item))
    return Picture(item, str(folder.path / folder.image(method, item)), record.get("text"), record["sha256"], against)


def evaluate_folder(
    name: str,
    pictures: list[Picture],
    instruments: Instruments,
    reference: Statistics | None = None,
    kept: Path | None = None,
    engine: Engine = locally,
    progress: Show | None = None,
) -> Evaluation:
    """Measure images from any source."""
    measured = measure({name: pictures}, replace(instruments, drift=False), kept, engine, progress)
    rows = _rows(measured, instruments, reference, None)
    return Evaluation(rows, None, {"folder": name, **_about(instruments, reference)}, measured)


def evaluate_samples(path: Path, instruments: Instruments, reference: Statistics | None = None) -> Evaluation:
    """Measure a batch of samples with an extractor; scorers are not possible, since samples have no prompts.

    Raises:
        ValueError: scorers are given, there is no extractor, or the file is not a batch of samples.
    """
    extractor = instruments.opened().get("extractor")
    if instruments.scorers or not isinstance(extractor, Extractor):
        raise ValueError("a batch of samples is measured by an --extractor alone: give one, and --scorers none")
    measured = {path.name: _measured_samples(path, extractor, instruments.resize)}
    rows = _rows(measured, instruments, reference, None)
    return Evaluation(rows, None, {"samples": path.name, **_about(instruments, reference)}, measured)


def _rows(
    measured: dict[str, Measured], instruments: Instruments, reference: Statistics | None, baseline: str | None
) -> list[Quality]:  # fmt: skip
    extractor: Any = instruments.opened().get("extractor")
    rows = []
    for group, found in measured.items():
        if reference is not None and found.size is not None:
            reference.check_size(found.size)
        other = measured[baseline] if baseline is not None and group != baseline else None
        normalized = bool(extractor is not None and extractor.normalized)
        rows.append(quality_of(group, found, other, reference, normalized, instruments.names()))
    return rows


def _about(instruments: Instruments, reference: Statistics | None) -> dict[str, Any]:
    extractor: Any = instruments.opened().get("extractor")
    size = None if instruments.resize is None else f"{instruments.resize} x {instruments.resize}, bicubic"
    return {
        "scorers": ", ".join(instruments.names().values()) or "none",
        "extractor": "none" if extractor is None else extractor.identity,
        "reference": "none" if reference is None else f"{reference.count or 'an unknown number of'} pictures",
        "resized": size,
        "vargen": installed_version("vargen"),
        "torch": torch.__version__,
    }


def write_all(folder: RunFolder, found: Evaluation) -> list[str]:
    """Write report, tables, contact sheets and, with matplotlib, a plot to the run directory; returns the file names."""
    figures = []
    try:
        if plot_quality(found.rows, found.baseline, folder.path / "plot.png"):
            figures.append("plot.png")
    except ImportError as error:
        logger.warning("%s", error)
    drawn = sorted(folder.records().items())
    groups = {
        row.name: [
            Picture(item, str(folder.path / folder.image(row.name, item)), record.get("text"), record["sha256"])
            for (method, item), record in drawn
            if method == row.name and item < _SHEET_ITEMS and folder.intact(record)
        ]
        for row in found.rows
    }
    figures += write_sheets(folder.path, groups, {name: file_slug(name) for name in groups})
    write_report(folder.path, found.rows, found.baseline, found.about, figures)
    return ["metrics.json", "metrics.csv", "report.md", *figures]


def _told(sampling: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sampling.items())


_SHEET_ITEMS = 64


def export_samples(path: Path, pictures: Sequence[Picture], resize: int | None) -> None:
    """Write a batch of samples in ADM's layout, for published evaluators.

    Raises:
        ValueError: the images differ in size. UnreadablePictureError: a file is not an image.
    """
    arrays: Iterable[np.ndarray] = (picture_array(read_picture(Path(picture.file)), resize) for picture in pictures)
    first = picture_array(read_picture(Path(pictures[0].file)), resize)
    write_samples(path, arrays, len(pictures), (first.shape[0], first.shape[1]))
