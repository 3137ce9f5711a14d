"""Cache of measured seconds of passes: in this process, and for a month in a file of the cache folder.

So the first image of the next process does not wait for measurements.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from vargen.device import available_cores, cpu_model
from vargen.files import atomic_file, cache_folder
from vargen.kernels.int8.cpu import cpu_instructions

logger = logging.getLogger("vargen")

_LIFETIME = 30 * 86400.0  # seconds
# Seconds by width; of models without a cost key by the model.
_costs_by_key: dict[str, dict[int, float]] = {}
_costs_without_key: WeakKeyDictionary[Any, dict[str, dict[int, float]]] = WeakKeyDictionary()


class CostedModel(Protocol):
    """What a measurement needs of a model: see `vargen.decoding.interfaces.TokenModel`."""

    device: torch.device
    cost_key: Hashable


def find_costs(model: CostedModel, images: int) -> dict[int, float]:
    """Seconds by width for the current number of threads, measured in this process or else loaded from the cache file."""
    key = _cache_key(model, images)
    if model.cost_key is None:
        return _costs_without_key.setdefault(model, {}).setdefault(key, {})
    if key not in _costs_by_key:
        stored = _read_cache().get(key, {"seconds": {}})
        _costs_by_key[key] = {int(width): value for width, value in stored["seconds"].items()}
    return _costs_by_key[key]


def _cache_key(model: CostedModel, images: int) -> str:
    """What a measurement depends on: the model, the batch, the number of threads, the hardware and the torch version."""
    if model.device.type == "cuda":
        hardware = torch.cuda.get_device_name(model.device)
    else:  # virtual machines report different processors by one name
        hardware = f"{cpu_model()}, {' '.join(cpu_instructions())}, {available_cores()} cores"
    return f"{model.cost_key}, batch {images}, {torch.get_num_threads()} threads, {hardware}, torch {torch.__version__}"


def _cache_path() -> Path:
    return cache_folder() / "pass-costs.json"


def _read_cache() -> dict[str, Any]:
    """Return the entries of the cache file that are not too old; none if the file is missing or damaged."""
    fresh = time.time() - _LIFETIME
    try:
        entries = json.loads(_cache_path().read_text("utf-8"))
        valid = all(int(width) > 0 < value for entry in entries.values() for width, value in entry["seconds"].items())
        return {key: entry for key, entry in entries.items() if entry["measured"] > fresh} if valid else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def save_costs(model: CostedModel, images: int, seconds: dict[int, float]) -> None:
    """Write measured costs to the cache file. If two processes write at once, one result is lost and measured again later."""
    if model.cost_key is None:
        return
    entry = {"measured": time.time(), "seconds": {str(width): value for width, value in sorted(seconds.items())}}
    try:
        with atomic_file(_cache_path()) as temporary:
            temporary.write_text(json.dumps({**_read_cache(), _cache_key(model, images): entry}, indent=1), "utf-8")
    except OSError as error:  # the cache folder is not writable
        logger.debug("measured costs are not kept: %s", error)
