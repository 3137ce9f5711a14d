"""The second stage of an evaluation: from image files to a report."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import vargen
from vargen.compat import installed_version
from vargen.eval.contact_sheets import COLUMNS, write_method_grid
from vargen.eval.features import (
    Extractor,
    Features,
    FeatureStatistics,
    contains_samples,
    read_adm_samples,
    stack_images,
    to_uint8_array,
    write_adm_samples,
)
from vargen.eval.measurement import CHUNK, Measurements, MetricModels, measure_images
from vargen.eval.metrics import MethodMetrics, Metrics, compute_metrics, summarize_speed
from vargen.eval.report import PLOTS, plot_quality_vs_speed, write_report
from vargen.eval.run import Backend, ImageFile, list_images, read_image, run_locally
from vargen.eval.run_directory import MEASUREMENTS, Record, RunDirectory, describe_write_error, file_digest
from vargen.eval.timing import read_timing
from vargen.files import atomic_file
from vargen.scoring.image_text import packaged_scorers, scorer_folder

logger = logging.getLogger("vargen")

REFERENCE = "reference.npz"  # next to a packaged scorer: statistics of the images it was trained on
ProgressCallback = Callable[[int, int], None]


@dataclass
class EvaluationResult:
    """Results of an evaluation: a row per method, the baseline's name if it is included, and the report's head."""

    rows: list[MethodMetrics]
    baseline: str | None
    about: dict[str, Any]
    measured: dict[str, Measurements]


def default_reference(extractor: str | None) -> Path | None:
    """Return the path of the reference statistics packaged with an extractor; None if there are none."""
    if extractor not in packaged_scorers():
        return None
    file = scorer_folder(str(extractor)) / REFERENCE
    return file if file.is_file() else None


# -- the reference -------------------------------------------------------------------------------------------------------


def load_reference(
    path: Path, models: MetricModels, cache_folder: Path | None = None, backend: Backend = run_locally
) -> FeatureStatistics:
    """Load the statistics that distances are measured to.

    Args:
        path: `.npz` of statistics or of samples, in ADM's layout, or a folder of images. If a file holds both, as published
            references do, the Frechet distance uses the statistics and all others the samples, as in ADM's suite.
        cache_folder: folder where features are cached.
    """
    extractor = models.load().get("extractor")
    if not isinstance(extractor, Extractor):
        raise ValueError("a reference needs an extractor: give --extractor")
    if path.is_dir():
        only = replace(models, scorers=(), similarity=False)
        measured = measure_images({"reference": list_images(path)}, only, cache_folder, backend)
        return statistics_of(measured["reference"], extractor)
    if path.suffix != ".npz":
        raise ValueError(f"reference must be a folder of images or a .npz file, got {str(path)!r}")
    if not path.is_file():
        raise FileNotFoundError(f"reference {str(path)!r} does not exist")
    if contains_samples(path, alone=True):
        return _extract_samples(path, extractor, models.resize, cache_folder)
    statistics = FeatureStatistics.read(path)
    statistics.validate_extractor(extractor.identity, extractor.name, f"reference {str(path)!r}")
    if statistics.features is None and contains_samples(path):
        statistics.features = _extract_samples(path, extractor, models.resize, cache_folder).features
    return statistics


def _extract_samples(path: Path, extractor: Extractor, resize: int | None, cache_folder: Path | None) -> FeatureStatistics:
    """Return the statistics of a batch of samples, computed only once if there is a cache folder."""
    file = None
    if cache_folder is not None:
        key = hashlib.sha256(f"{file_digest(path)} {extractor.identity} {resize}".encode()).hexdigest()[:16]
        file = cache_folder / "reference" / f"{path.stem}-{key}.npz"
        if file.is_file():
            with contextlib.suppress(ValueError):  # damaged: computed again
                return FeatureStatistics.read(file)
    statistics = statistics_of(_measure_samples(path, extractor, resize), extractor)
    if file is not None:
        try:
            statistics.write(file)
        except OSError as error:
            raise describe_write_error(str(file), error) from error
    return statistics


def _measure_samples(path: Path, extractor: Extractor, resize: int | None) -> Measurements:
    shape, images = read_adm_samples(path)
    parts: list[Features] = []
    batch: list[np.ndarray] = []
    for number, array in enumerate(images, 1):
        batch.append(to_uint8_array(Image.fromarray(array), resize))
        if len(batch) == CHUNK or number == shape[0]:
            parts.append(extractor(stack_images(batch)))
            batch = []
    columns = {"indices": torch.arange(shape[0]), "features": torch.cat([part.pooled for part in parts])}
    if logits := [part.logits for part in parts if part.logits is not None]:
        columns["logits"] = torch.cat(logits)
    return Measurements({"extractor": columns}, [], (resize, resize) if resize else (shape[1], shape[2]))


def statistics_of(measured: Measurements, extractor: Extractor, keep: bool = True) -> FeatureStatistics:
    """Return the statistics of a measured group, including its features if `keep`."""
    if "extractor" not in measured.columns:
        raise ValueError("statistics need images and an extractor: give --extractor")
    return FeatureStatistics.from_features(measured.columns["extractor"]["features"], extractor.identity, measured.size, keep)


# -- runs and folders ------------------------------------------------------------------------------------------------------


def evaluate_run(
    run: RunDirectory,
    models: MetricModels,
    reference: FeatureStatistics | None = None,
    backend: Backend = run_locally,
    progress: ProgressCallback | None = None,
) -> EvaluationResult:
    """Measure the images of a run, for all methods that have any. Images that have changed are skipped."""
    settings = run.settings()
    by_method: dict[str, dict[int, Record]] = {method: {} for method in settings["methods"]}
    for (method, index), record in sorted(run.complete_records().items()):
        if method in by_method:
            by_method[method][index] = record
    by_method = {method: records for method, records in by_method.items() if records}
    if not by_method:
        raise ValueError(f"{str(run.path)!r} holds no images yet: generate some with `vargen eval`")
    baseline = settings["baseline"] if settings["baseline"] in by_method else None
    of_baseline = by_method.get(settings["baseline"], {})
    groups = {
        method: [_image_file(run, record, baseline if index in of_baseline else None) for index, record in records.items()]
        for method, records in by_method.items()
    }
    models = replace(models, similarity=baseline is not None)
    measured = measure_images(groups, models, run.path / MEASUREMENTS, backend, progress)
    rows = _compute_rows(measured, models, reference, baseline)
    timing = read_timing(run.path)
    for row in rows:
        records = by_method[row.name]
        row.kind, row.requested_images, row.num_images = settings["methods"][row.name]["kind"], settings["num"], len(records)
        row.speed = summarize_speed(list(records.values()), of_baseline)
        row.speed["batch1"] = timing["methods"].get(row.name) if timing else None
        row.notes += note_speed(row.speed, settings["baseline"])
        if len(records) < row.requested_images:
            row.notes.append(f"{len(records)} of {row.requested_images} images have been generated")
    every = [record for records in by_method.values() for record in records.values()]
    sampling = {name: value for name, value in settings["sampling"].items() if value is not None}
    about = {
        "model": f"{settings['model']}, weights {settings['weights']}",
        "sampling": ", ".join(f"{name} {value:g}" for name, value in sampling.items()),
        "images": f"{settings['num']} per method of {_count_subjects(settings['subjects'])}, seeds from {settings['seed']}",
        "image size": _describe_size(measured),
        "machine": _list(record.get("machine") for record in every),
        "dtype": _list(record.get("dtype") for record in every),
        "batch": settings["batch"],
        "CPU threads": _list(number for row in rows for number in row.speed["threads"]),
        "timed at batch 1": f"{timing['images']} images of each method, CPU threads: {timing['threads']}" if timing else None,
        **_describe_settings(models, reference),
    }
    return EvaluationResult(rows, baseline, about, measured)


def note_speed(speed: Metrics, baseline: str) -> list[str]:
    """Return a note if a method is slower than the baseline, at the batch of the run or alone."""
    ratios = [(speed["batch"], speed["speedup"]), (1, (speed["batch1"] or {}).get("speedup"))]
    slower = [f"{1 / ratio:.2f} times as long at batch {batch}" for batch, ratio in ratios if ratio and ratio < 1]
    return [f"slower than {baseline}: {' and '.join(slower)}"] if slower else []


def _count_subjects(subjects: Sequence[Any]) -> str:
    return f"{len(subjects)} {'prompts' if isinstance(subjects[0], str) else 'classes'}"


def _list(values: Iterable[Any]) -> str | None:
    return ", ".join(str(each) for each in dict.fromkeys(values) if each is not None) or None


def _describe_size(measured: dict[str, Measurements]) -> str | None:
    return _list(f"{each.size[1]} x {each.size[0]}" for each in measured.values() if each.size is not None)


def _image_file(run: RunDirectory, record: Record, baseline: str | None = None) -> ImageFile:
    method, index = record["method"], record["index"]
    against = None if baseline in (None, method) else str(run.path / run.image(str(baseline), index))
    return ImageFile(index, str(run.path / run.image(method, index)), record.get("text"), record["sha256"], against)


def evaluate_folder(
    name: str,
    images: list[ImageFile],
    models: MetricModels,
    reference: FeatureStatistics | None = None,
    cache_folder: Path | None = None,
    backend: Backend = run_locally,
    progress: ProgressCallback | None = None,
) -> EvaluationResult:
    """Measure images from any source."""
    measured = measure_images({name: images}, replace(models, similarity=False), cache_folder, backend, progress)
    rows = _compute_rows(measured, models, reference, None)
    return EvaluationResult(rows, None, {"folder": name, **_describe_settings(models, reference)}, measured)


def evaluate_samples(path: Path, models: MetricModels, reference: FeatureStatistics | None = None) -> EvaluationResult:
    """Measure a batch of samples with an extractor; scorers are not possible, since samples have no prompts."""
    extractor = models.load().get("extractor")
    if models.scorers or not isinstance(extractor, Extractor):
        raise ValueError("a batch of samples is measured by an --extractor alone: give one, and --scorers none")
    measured = {path.name: _measure_samples(path, extractor, models.resize)}
    rows = _compute_rows(measured, models, reference, None)
    return EvaluationResult(rows, None, {"samples": path.name, **_describe_settings(models, reference)}, measured)


def _compute_rows(
    measured: dict[str, Measurements], models: MetricModels, reference: FeatureStatistics | None, baseline: str | None
) -> list[MethodMetrics]:  # fmt: skip
    extractor: Any = models.load().get("extractor")
    rows = []
    for group, found in measured.items():
        if reference is not None and found.size is not None:
            reference.validate_size(found.size)
        other = measured[baseline] if baseline is not None and group != baseline else None
        normalized = bool(extractor is not None and extractor.normalized)
        rows.append(compute_metrics(group, found, other, reference, normalized, models.titles()))
    return rows


def _describe_settings(models: MetricModels, reference: FeatureStatistics | None) -> dict[str, Any]:
    extractor: Any = models.load().get("extractor")
    size = None if models.resize is None else f"{models.resize} x {models.resize}, bicubic"
    return {
        "scorers": ", ".join(models.titles().values()) or "none",
        "extractor": "none" if extractor is None else extractor.identity,
        "reference": "none" if reference is None else f"{reference.count or 'an unknown number of'} images",
        "resized": size,
        "vargen": describe_version(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def describe_version() -> str:
    """Return the version of vargen, and in a checkout its commit, with a "+" if files differ from it."""
    version, root = str(installed_version("vargen")), Path(vargen.__file__).parents[1]
    if not (root / ".git").exists():
        return version
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return version
    return f"{version}, commit {commit}"


def write_report_files(run: RunDirectory, result: EvaluationResult) -> list[str]:
    """Write report, tables, a grid of images and, with matplotlib, a plot to the run directory; returns the file names."""
    figures, others = [], []
    try:
        if figure := plot_quality_vs_speed(result.rows, result.baseline):
            for name in PLOTS:
                with atomic_file(run.path / name) as temporary:
                    figure.savefig(temporary, format=Path(name).suffix[1:])
            figures, others = [PLOTS[0]], [*PLOTS[1:]]
    except ImportError:
        logger.warning("there is no plot without matplotlib: pip install matplotlib")
    groups: dict[str, list[ImageFile]] = {row.name: [] for row in result.rows}
    for (method, index), record in sorted(run.records().items()):
        if method in groups and index < COLUMNS and run.is_intact(record):
            groups[method].append(_image_file(run, record))
    figures += write_method_grid(run.path, groups)
    write_report(run.path, result.rows, result.baseline, result.about, figures)
    return ["metrics.json", "report.md", "table.tex", *figures, *others]


def export_adm_samples(path: Path, images: Sequence[ImageFile], resize: int | None) -> None:
    """Write a batch of samples in ADM's layout, for published evaluators."""
    arrays: Iterable[np.ndarray] = (to_uint8_array(read_image(Path(image.file)), resize) for image in images)
    first = to_uint8_array(read_image(Path(images[0].file)), resize)
    write_adm_samples(path, arrays, len(images), (first.shape[0], first.shape[1]))
