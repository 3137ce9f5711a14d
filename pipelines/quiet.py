"""Opening a model without diffusers' bars and notices, where that takes a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffusers.utils import is_accelerate_available, logging

_LONG = 1e9  # bytes of weights whose loading is worth a bar


def placing() -> dict[str, Any]:
    """Options that load weights as diffusers does by itself without accelerate, which it would recommend at each network."""
    return {} if is_accelerate_available() else {"low_cpu_mem_usage": False}


@contextmanager
def no_bar(folder: Path) -> Iterator[None]:
    """Show no loading bar of diffusers meanwhile, unless the folder holds gigabytes."""
    shown = logging.is_progress_bar_enabled()
    if not shown or sum(file.stat().st_size for file in folder.rglob("*.safetensors")) >= _LONG:
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
