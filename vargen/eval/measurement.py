"""Scores and features of images from any source, cached on disk by chunk, so that nothing is measured twice."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vargen.device import set_threads
from vargen.eval.features import Extractor, load_extractor, stack_images, to_uint8_array
from vargen.eval.run import Backend, ImageFile, UnreadableImageError, read_image, run_locally
from vargen.eval.run_directory import describe_write_error, to_file_name
from vargen.files import atomic_file
from vargen.reading import open_regular
from vargen.scoring import Scorer, open_scorer, score_images

logger = logging.getLogger("vargen")

CHUNK = 64  # images; fixed, so that a chunk's results are bitwise equal in any process
SIMILARITY = "similarity"
_MIN_SSIM_SIDE = 11  # pixels
_SOURCE = "source"
Columns = dict[str, np.ndarray]  # numbers of a chunk or a group, a row per image, each with `indices`


@dataclass(frozen=True)
class MetricModels:
    """The scorers and the extractor to use: plain values, which can be sent to another machine.

    Attributes:
        scorers: see `open_scorer`. extractor: see `load_extractor`; None measures no distances.
        similarity: compare images with the baseline's. resize: side that images are cropped and scaled to first.
        keep_going: skip unreadable files. device, threads: see `GenerationPlan`.
    """

    scorers: tuple[str, ...] = ()
    extractor: str | None = None
    similarity: bool = False
    resize: int | None = None
    keep_going: bool = False
    device: str = "cpu"
    threads: int | None = None

    def load(self) -> dict[str, Scorer | Extractor]:
        """Load the scorers, by specification, and the extractor, under `extractor`; also serves to fail early."""
        models: dict[str, Any] = {spec: _load_scorer(spec, self.device) for spec in self.scorers}
        names = [scorer.name for scorer in models.values()]
        if len(set(names)) < len(names) or len(models) < len(self.scorers):
            raise ValueError(f"scorers must be given once each, got {', '.join(self.scorers)}")
        if self.extractor is not None:
            models["extractor"] = _load_extractor(self.extractor, self.device)
        return models

    def titles(self) -> dict[str, str]:
        """Return the name of each scorer in tables, by specification."""
        return {spec: model.name for spec, model in self.load().items() if spec in self.scorers}


# Each network is loaded once per process, although early checks, the measurement and the table all use it.
_load_scorer = lru_cache(maxsize=8)(open_scorer)
_load_extractor = lru_cache(maxsize=2)(load_extractor)


@dataclass(frozen=True)
class ImageChunk:
    """Images of a group and what to measure of them: scorer specifications, `extractor`, `similarity`."""

    group: str
    number: int
    images: tuple[ImageFile, ...]
    models: tuple[str, ...]
    size: tuple[int, int] | None  # (Y, X) required of all images; None: any size


class ChunkScorer:
    """Measures chunks; loads its models once. Each measuring process has one."""

    def __init__(self, settings: MetricModels):
        set_threads(settings.threads)
        self.settings, self.models = settings, settings.load()

    def __call__(self, chunk: ImageChunk) -> tuple[ImageChunk, dict[str, Columns], list[str]]:
        """Return columns by model, with a row per readable image and `indices`; and the unreadable files.

        Raises:
            UnreadableImageError: a file cannot be read, unless `keep_going`.
            ValueError: an image has another size, or a scorer returns NaN.
        """
        files, images, unreadable = [], [], []
        for file in chunk.images:
            try:
                image = read_image(Path(file.file))
            except UnreadableImageError as error:
                if not self.settings.keep_going:
                    raise
                unreadable.append(str(error))
                continue
            array = to_uint8_array(image, self.settings.resize)
            if chunk.size is not None and array.shape[:2] != chunk.size:
                raise ValueError(
                    f"{file.file} is {array.shape[1]} x {array.shape[0]} pixels, and the first of {chunk.group} is "
                    f"{chunk.size[1]} x {chunk.size[0]}; --resize N makes all of them N x N"
                )
            files.append(file)
            images.append(array)
        if not files:
            return chunk, {}, unreadable
        indices = np.array([file.index for file in files])
        return chunk, {name: {"indices": indices, **self._measure(name, files, images)} for name in chunk.models}, unreadable

    def _measure(self, name: str, files: Sequence[ImageFile], images: list[np.ndarray]) -> Columns:
        if name == SIMILARITY:
            return self._compare(files, images)
        model: Any = self.models[name]
        if name == "extractor":
            pooled, logits = model(stack_images(images))
            return {"features": pooled.numpy(), **({} if logits is None else {"logits": logits.numpy()})}
        texts = [file.text for file in files if file.text is not None]
        if len(texts) < len(files):
            first = next(file.file for file in files if file.text is None)
            raise ValueError(
                f"scorer {name} needs prompts, and {first} has none; give --prompt-file FILE with a line per image"
            )
        return {"scores": score_images(model, [Image.fromarray(image) for image in images], texts).numpy()}

    def _compare(self, files: Sequence[ImageFile], images: list[np.ndarray]) -> Columns:
        """Return similarities to the baseline's images; NaN for images whose baseline image is missing or unreadable."""
        columns = {name: np.full(len(files), np.nan, dtype=np.float32) for name in ("identical", "psnr", "ssim")}
        for row, (file, image) in enumerate(zip(files, images, strict=True)):
            if file.baseline_file is None:
                continue
            base = to_uint8_array(read_image(Path(file.baseline_file)), self.settings.resize)
            pixels, other = stack_images([image]).float() / 255, stack_images([base]).float() / 255
            columns["identical"][row] = float(np.array_equal(image, base))
            columns["psnr"][row] = float(psnr(pixels, other))
            if min(image.shape[:2]) >= _MIN_SSIM_SIDE:
                columns["ssim"][row] = float(ssim(pixels, other))
        return columns


class _MeasurementCache:
    """A file per chunk and model, with a digest of what was measured; damaged files are ignored.

    Loads the models for their names and identities, so that models that cannot be loaded fail early. Those without an identity
    are not cached.
    """

    def __init__(self, folder: Path | None, settings: MetricModels):
        self.folder, self.resize = folder, settings.resize
        self.names, self.identities = {SIMILARITY: SIMILARITY}, {SIMILARITY: SIMILARITY}
        for key, model in settings.load().items():
            self.names[key] = model.name
            if isinstance(identity := getattr(model, "identity", None), str):
                self.identities[key] = identity

    def _file(self, chunk: ImageChunk, name: str) -> Path | None:
        if self.folder is None or name not in self.identities:
            return None
        return self.folder / to_file_name(self.names[name]) / to_file_name(chunk.group) / f"{chunk.number:05d}.npz"

    def _source(self, chunk: ImageChunk, name: str) -> str:
        images = [(each.index, each.sha256, each.text, each.baseline_file) for each in chunk.images]
        return hashlib.sha256(json.dumps([self.identities[name], self.resize, images]).encode()).hexdigest()

    def load(self, chunk: ImageChunk, name: str) -> Columns | None:
        """Return the cached measurements of exactly these images; None if there are none, or the file is damaged."""
        file = self._file(chunk, name)
        if file is None:
            return None
        try:
            with open_regular(file) as opened, np.load(io.BytesIO(opened.read()), allow_pickle=False) as arrays:
                columns = {column: arrays[column] for column in arrays}
            return columns if str(columns.pop(_SOURCE)) == self._source(chunk, name) else None
        except Exception:  # damaged: numpy, zipfile and zlib each raise their own types; measured again
            return None

    def store(self, chunk: ImageChunk, name: str, columns: Columns) -> None:
        """Cache measurements. Raises OSError if the disk is full, or the file cannot be written for another reason."""
        file = self._file(chunk, name)
        if file is None:
            return
        arrays: dict[str, Any] = {_SOURCE: np.array(self._source(chunk, name)), **columns}
        try:
            with atomic_file(file) as temporary, open(temporary, "wb") as opened:
                np.savez(opened, **arrays)
        except OSError as error:
            raise describe_write_error(str(file), error) from error


@dataclass
class Measurements:
    """Measurements of a group: columns by model, each with `indices`; unreadable files; (Y, X) of its images."""

    columns: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    size: tuple[int, int] | None = None


def measure_images(
    groups: dict[str, list[ImageFile]],
    models: MetricModels,
    cache_folder: Path | None,
    backend: Backend = run_locally,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Measurements]:
    """Measure all images of all groups with all models.

    Args:
        cache_folder: folder where chunks are cached; None disables the cache.
        progress: called with the numbers of finished images and of all images.

    Raises:
        UnreadableImageError, ValueError, FileNotFoundError: see `ChunkScorer` and `MetricModels`. OSError: the disk is full.
    """
    cache = _MeasurementCache(cache_folder, models)
    results = {group: Measurements(size=_first_size(images, models)) for group, images in groups.items()}
    rows: dict[str, dict[int, dict[str, Columns]]] = {group: {} for group in groups}
    missing: list[ImageChunk] = []
    for group, images in groups.items():
        names = [*models.scorers, *(["extractor"] if models.extractor else [])]
        names += [SIMILARITY] if models.similarity and any(image.baseline_file for image in images) else []
        for number, start in enumerate(range(0, len(images), CHUNK)):
            chunk = ImageChunk(group, number, tuple(images[start : start + CHUNK]), tuple(names), results[group].size)
            cached = {name: columns for name in names if (columns := cache.load(chunk, name)) is not None}
            rows[group][number] = cached
            if len(cached) < len(names):
                missing.append(replace(chunk, models=tuple(name for name in names if name not in cached)))
    total = sum(map(len, groups.values()))
    done = total - sum(len(chunk.images) for chunk in missing)
    if progress:
        progress(done, total)
    for chunk, measured, unreadable in backend(ChunkScorer, models, missing):
        for line in unreadable:
            logger.warning("skipped: %s", line)
        results[chunk.group].unreadable += unreadable
        rows[chunk.group][chunk.number].update(measured)
        if not unreadable:
            for name, columns in measured.items():
                cache.store(chunk, name, columns)
        done += len(chunk.images)
        if progress:
            progress(done, total)
    for group, chunks in rows.items():
        results[group].columns = _concatenate([chunks[number] for number in sorted(chunks)])
    return results


def _concatenate(chunks: list[dict[str, Columns]]) -> dict[str, dict[str, Tensor]]:
    """Concatenate the columns of a group's chunks in order, by model."""
    names = dict.fromkeys(name for chunk in chunks for name in chunk)
    parts = {name: [chunk[name] for chunk in chunks if name in chunk] for name in names}
    return {
        name: {key: torch.from_numpy(np.concatenate([part[key] for part in each])) for key in each[0]}
        for name, each in parts.items()
    }


def _first_size(images: Sequence[ImageFile], models: MetricModels) -> tuple[int, int] | None:
    if models.resize is not None:
        return (models.resize, models.resize)
    for file in images:
        try:
            image = read_image(Path(file.file))
        except UnreadableImageError:
            if not models.keep_going:
                raise
            continue
        return (image.height, image.width)
    return None


# -- similarity of images: PSNR and SSIM -----------------------------------------------------------------------------------


MAX_PSNR = 100.0  # dB; for identical images, whose PSNR is infinite. Images that differ by one 8-bit level have at least 48
_WINDOW, _SIGMA, _K1, _K2 = 11, 1.5, 0.01, 0.03  # Wang et al. 2004


def psnr(images_NCYX: Tensor, references_NCYX: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in dB, float32 `[N]`, of images in [0, 1]; `MAX_PSNR` for identical images."""
    error = (images_NCYX.double() - references_NCYX.double()).square().mean((1, 2, 3))
    return (-10 * error.clamp_min(10 ** (-MAX_PSNR / 10)).log10()).float()


def ssim(images_NCYX: Tensor, references_NCYX: Tensor) -> Tensor:
    """Return the structural similarity, float32 `[N]`, of images in [0, 1] (Wang et al. 2004, equation 13); 1 if identical.

    Uses Gaussian windows of 11 pixels and deviation 1.5 that lie inside the image, whose sides thus have at least 11 pixels;
    averages over windows and channels.
    """
    x, y = images_NCYX.double(), references_NCYX.double()
    at = torch.arange(_WINDOW, dtype=torch.float64, device=x.device) - _WINDOW // 2
    kernel = (-0.5 * (at / _SIGMA) ** 2).exp()
    kernel = (kernel / kernel.sum()).expand(x.shape[1], 1, 1, -1)

    def local(values: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(values, kernel, groups=len(kernel)), kernel.transpose(2, 3), groups=len(kernel))

    mean_x, mean_y = local(x), local(y)
    variance_x, variance_y = local(x * x) - mean_x**2, local(y * y) - mean_y**2
    covariance = local(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _K1**2) / (mean_x**2 + mean_y**2 + _K1**2)
    structure = (2 * covariance + _K2**2) / (variance_x + variance_y + _K2**2)
    return (luminance * structure).mean((1, 2, 3)).float()
