"""Scores and features of images from any source, cached on disk by chunk, so that nothing is measured twice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vargen.device import set_threads
from vargen.evaluation.features import Extractor, as_batch, open_extractor, picture_array
from vargen.evaluation.generation import Engine, locally
from vargen.evaluation.image_files import Picture, UnreadablePictureError, read_picture
from vargen.evaluation.kept import DRIFT, Kept, Rows
from vargen.scoring import Scorer, open_scorer, score_images
from vargen.scoring.reference import psnr, ssim

logger = logging.getLogger("vargen")

CHUNK = 64  # images; fixed, so that a chunk's results are bitwise equal in any process
_LEAST_SSIM = 11  # pixels of a side


@dataclass(frozen=True)
class Instruments:
    """The scorers and the extractor to use: plain values, which can be sent to another machine.

    Attributes:
        scorers: see `open_scorer`. extractor: see `open_extractor`; None measures no distances.
        resize: side that images are cropped and scaled to first. keep_going: skip unreadable files.
        device, threads: see `Drawing`.
    """

    scorers: tuple[str, ...] = ()
    extractor: str | None = None
    drift: bool = False
    resize: int | None = None
    keep_going: bool = False
    device: str = "cpu"
    threads: int | None = None

    def opened(self) -> dict[str, Scorer | Extractor]:
        """Open the scorers, by specification, and the extractor, under `extractor`; also serves to fail early.

        Raises:
            ValueError, FileNotFoundError, ImportError: naming the problem, and how to get weights that are missing.
        """
        found: dict[str, Any] = {spec: _scorer(spec, self.device) for spec in self.scorers}
        names = [scorer.name for scorer in found.values()]
        if len(set(names)) < len(names) or len(found) < len(self.scorers):
            raise ValueError(f"scorers must be given once each, got {', '.join(self.scorers)}")
        if self.extractor is not None:
            found["extractor"] = _extractor(self.extractor, self.device)
        return found

    def names(self) -> dict[str, str]:
        """Return the name of each scorer in tables, by specification."""
        return {spec: instrument.name for spec, instrument in self.opened().items() if spec in self.scorers}


# Each network is opened once per process, although early checks, the measurement and the table all use it.
_scorer = lru_cache(maxsize=8)(open_scorer)
_extractor = lru_cache(maxsize=2)(open_extractor)


@dataclass(frozen=True)
class Chunk:
    """Images of a group and the instruments to measure them with: scorer specifications, `extractor`, `drift`."""

    group: str
    number: int
    pictures: tuple[Picture, ...]
    instruments: tuple[str, ...]
    size: tuple[int, int] | None  # (Y, X) required of all images; None: any size


class Measurer:
    """Measures chunks; opens its instruments once. Each measuring process has one."""

    def __init__(self, instruments: Instruments):
        set_threads(instruments.threads)
        self.settings, self.opened = instruments, instruments.opened()

    def __call__(self, chunk: Chunk) -> tuple[Chunk, dict[str, dict[str, np.ndarray]], list[str]]:
        """Return, by instrument, arrays with a row per readable image and `items`, their indices; and the unreadable files.

        Raises:
            UnreadablePictureError: a file cannot be read, unless `keep_going`.
            ValueError: an image has another size, or a scorer returns NaN.
        """
        chosen, images, unreadable = [], [], []
        for picture in chunk.pictures:
            try:
                image = read_picture(Path(picture.file))
            except UnreadablePictureError as error:
                if not self.settings.keep_going:
                    raise
                unreadable.append(str(error))
                continue
            array = picture_array(image, self.settings.resize)
            if chunk.size is not None and array.shape[:2] != chunk.size:
                raise ValueError(
                    f"{picture.file} is {array.shape[1]} x {array.shape[0]} pixels, and the first of {chunk.group} is "
                    f"{chunk.size[1]} x {chunk.size[0]}; --resize N makes all of them N x N"
                )
            chosen.append(picture)
            images.append(array)
        if not chosen:
            return chunk, {}, unreadable
        items = np.array([picture.item for picture in chosen])
        measured = {name: {"items": items, **self._measure(name, chosen, images)} for name in chunk.instruments}
        return chunk, measured, unreadable

    def _measure(self, name: str, pictures: Sequence[Picture], images: list[np.ndarray]) -> dict[str, np.ndarray]:
        if name == DRIFT:
            return self._drift(pictures, images)
        if name == "extractor":
            extractor: Any = self.opened[name]
            pooled, logits = extractor(as_batch(images))
            return {"features": pooled.numpy(), **({} if logits is None else {"logits": logits.numpy()})}
        texts = [picture.text for picture in pictures if picture.text is not None]
        if len(texts) < len(pictures):
            first = next(picture.file for picture in pictures if picture.text is None)
            raise ValueError(
                f"scorer {name} reads prompts, and none is known of {first}; give --prompt-file FILE, with one line per image"
            )
        scorer: Any = self.opened[name]
        return {"scores": score_images(scorer, [Image.fromarray(image) for image in images], texts).numpy()}

    def _drift(self, pictures: Sequence[Picture], images: list[np.ndarray]) -> dict[str, np.ndarray]:
        """Return similarities to the baseline's images; NaN for images whose baseline image is missing or unreadable."""
        shape = (3, len(pictures))
        found = np.full(shape, np.nan, dtype=np.float32)
        for row, (picture, image) in enumerate(zip(pictures, images, strict=True)):
            if picture.against is None:
                continue
            base = picture_array(read_picture(Path(picture.against)), self.settings.resize)
            own, other = as_batch([image]).float() / 255, as_batch([base]).float() / 255
            found[0, row], found[1, row] = float(np.array_equal(image, base)), float(psnr(own, other))
            if min(image.shape[:2]) >= _LEAST_SSIM:
                found[2, row] = float(ssim(own, other))
        return {"same": found[0], "psnr": found[1], "ssim": found[2]}


@dataclass
class Measured:
    """Measurements of a group: arrays by instrument, each with `items`; unreadable files; (Y, X) of its images."""

    arrays: dict[str, dict[str, Tensor]]
    unreadable: list[str]
    size: tuple[int, int] | None = None


def measure(
    groups: dict[str, list[Picture]],
    instruments: Instruments,
    kept: Path | None,
    engine: Engine = locally,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Measured]:
    """Measure all images of all groups with all instruments.

    Args:
        kept: folder where chunks are cached; None disables the cache.
        progress: called with the numbers of finished images and of all images.

    Raises:
        UnreadablePictureError, ValueError, FileNotFoundError: see `Measurer` and `Instruments`. OSError: the disk is full.
    """
    keep = Kept(kept, instruments)
    found = {group: Measured({}, [], _first_size(pictures, instruments)) for group, pictures in groups.items()}
    rows: dict[str, dict[int, dict[str, Rows]]] = {group: {} for group in groups}
    work: list[Chunk] = []
    for group, pictures in groups.items():
        own = [*instruments.scorers, *(["extractor"] if instruments.extractor else [])]
        own += [DRIFT] if instruments.drift and any(picture.against for picture in pictures) else []
        for number, start in enumerate(range(0, len(pictures), CHUNK)):
            chunk = Chunk(group, number, tuple(pictures[start : start + CHUNK]), tuple(own), found[group].size)
            held = {name: arrays for name in own if (arrays := keep.held(chunk, name)) is not None}
            rows[group][number] = held
            if missing := tuple(name for name in own if name not in held):
                work.append(replace(chunk, instruments=missing))
    total = sum(map(len, groups.values()))
    done = total - sum(len(chunk.pictures) for chunk in work)
    if progress:
        progress(done, total)
    for chunk, measured, unreadable in engine(Measurer, instruments, work):
        for line in unreadable:
            logger.warning("passed over: %s", line)
        found[chunk.group].unreadable += unreadable
        rows[chunk.group][chunk.number].update(measured)
        if not unreadable:
            for name, arrays in measured.items():
                keep.keep(chunk, name, arrays)
        done += len(chunk.pictures)
        if progress:
            progress(done, total)
    for group, chunks in rows.items():
        found[group].arrays = _joined([chunks[number] for number in sorted(chunks)])
    return found


def _joined(chunks: list[dict[str, Rows]]) -> dict[str, dict[str, Tensor]]:
    """Concatenate the columns of a group's chunks in order, by instrument."""
    names = dict.fromkeys(name for chunk in chunks for name in chunk)
    own = {name: [chunk[name] for chunk in chunks if name in chunk] for name in names}
    return {
        name: {key: torch.from_numpy(np.concatenate([part[key] for part in parts])) for key in parts[0]}
        for name, parts in own.items()
    }


def _first_size(pictures: Sequence[Picture], instruments: Instruments) -> tuple[int, int] | None:
    if instruments.resize is not None:
        return (instruments.resize, instruments.resize)
    for picture in pictures:
        try:
            image = read_picture(Path(picture.file))
        except UnreadablePictureError:
            if not instruments.keep_going:
                raise
            continue
        return (image.height, image.width)
    return None
