"""Loading small models without the progress bars and notices of diffusers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffusers.utils import is_accelerate_available, logging

_LONG = 1e9  # bytes of weights from which on a progress bar is shown


def placing() -> dict[str, Any]:
    """Loading options that suppress diffusers' recommendation, once per network, to install accelerate."""
    return {} if is_accelerate_available() else {"low_cpu_mem_usage": False}


@contextmanager
def no_bar(folder: Path) -> Iterator[None]:
    """Hide the loading bars of diffusers while the block runs, unless the folder has a gigabyte of weights or more."""
    shown = logging.is_progress_bar_enabled()
    if not shown or sum(file.stat().st_size for file in folder.rglob("*.safetensors")) >= _LONG:
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
