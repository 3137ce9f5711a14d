"""The model files of a folder, weight files that newer ones make stale, and the pipeline's index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vargen.compat import installed_version

_WEIGHT_FILE = re.compile(r"(?P<stem>[^.]+?)(\.(?P<variant>[^.]+?))?(-\d+-of-\d+)?\.safetensors")
_INDEX_FILE = re.compile(r"(?P<stem>[^.]+?)\.safetensors\.index(\.(?P<variant>[^.]+))?\.json")
_WEIGHT_STEMS = ("diffusion_pytorch_model", "model")  # file names used by diffusers and transformers
# Other files they write: configurations of networks, and files of tokenizers.
_PART_FILE = re.compile(
    r"(generation_)?config\.json|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json"
    r"|(vocab|merges)\.txt|(spiece|sentencepiece\.bpe|tokenizer)\.model|chat_template\.(jinja|json)"
)


def weight_file_kind(file: Path) -> tuple[str, ...] | None:
    """Return the stem and variant that a weight file, shard or index belongs to; None for other files."""
    match = _WEIGHT_FILE.fullmatch(file.name) or _INDEX_FILE.fullmatch(file.name)
    return match and (match["stem"], match["variant"] or "")


def stale_weight_files(written: Path, folder: Path) -> list[Path]:
    """Return weight files, shards and indices under `folder` that weights just written to `written` make stale.

    A single file and shards of the same name hold different weights, and libraries differ in which of the two they open.
    """
    stale: list[Path] = []
    for part in {file.parent.relative_to(written) for file in written.rglob("*.safetensors")}:
        names = {file.name for file in (written / part).iterdir()}
        kinds = {weight_file_kind(Path(name)) for name in names} - {None}
        there = (folder / part).iterdir() if (folder / part).is_dir() else ()
        stale += [file for file in there if file.name not in names and weight_file_kind(file) in kinds]
    return stale


def list_model_files(folder: Path, new: Path) -> list[str]:
    """Return the names of the files in `folder` that make up its model, as this library writes models.

    These are `model_index.json` and, in the folders of the components that it names, configurations, weights of any variant
    and tokenizer files; likewise in the folders of the components in `new`. All other files belong to the user.
    """
    try:
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        index = {}
    named = index if isinstance(index, dict) else {}
    parts = {name for name, value in named.items() if isinstance(value, list) and Path(name).name == name != ".."}
    parts |= {path.name for path in new.iterdir() if path.is_dir()}
    found = ["model_index.json"] if os.path.lexists(folder / "model_index.json") else []
    for part in parts:
        if (folder / part).is_symlink():
            found.append(part)  # the link itself is removed; nothing is written to its target
        elif (folder / part).is_dir():
            found += [f"{part}/{file.name}" for file in (folder / part).iterdir() if _is_model_file(file)]
    return found


def _is_model_file(file: Path) -> bool:
    if file.is_dir() and not file.is_symlink():
        return False
    weights = weight_file_kind(file)
    return weights[0] in _WEIGHT_STEMS if weights else _PART_FILE.fullmatch(file.name) is not None


def class_library(kind: type) -> str:
    """Return how an index names the place of a class: its library, or its module for a class of vargen."""
    library = kind.__module__.partition(".")[0]
    return library if library in ("diffusers", "transformers") else kind.__module__


def write_model_index(folder: Path, pipeline: str, parts: Mapping[str, Any], **values: Any) -> None:
    """Write `model_index.json` as the pipeline's `save_pretrained` does, without the components that are missing.

    Args:
        parts: components or their classes by name, None for a missing one.
    """
    index: dict[str, Any] = {"_class_name": pipeline, "_diffusers_version": installed_version("diffusers"), **values}
    for name, part in parts.items():
        kind = part if isinstance(part, type) else type(part)
        library = class_library(kind)
        index[name] = [None, None] if part is None else [library, kind.__name__]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")
