"""Names of weight files, and the pipeline's index."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vargen.compat import installed_version

_WEIGHT_FILE = re.compile(r"(?P<stem>[^.]+?)(\.(?P<variant>[^.]+?))?(-\d+-of-\d+)?\.safetensors")
_INDEX_FILE = re.compile(r"(?P<stem>[^.]+?)\.safetensors\.index(\.(?P<variant>[^.]+))?\.json")


def weight_file_kind(file: Path) -> tuple[str, ...] | None:
    """Return the stem and variant that a weight file, shard or index belongs to; None for other files."""
    match = _WEIGHT_FILE.fullmatch(file.name) or _INDEX_FILE.fullmatch(file.name)
    return match and (match["stem"], match["variant"] or "")


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
