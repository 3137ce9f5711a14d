"""Memory of a video model: where its text encoder is, and how many bytes a call needs, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LARGE = 2**30  # bytes of an encoder that leaves the device; UMT5 has 11 GB in bfloat16


@contextmanager
def on_device(encoder: Any, device: torch.device) -> Iterator[None]:
    """Move a large text encoder to a device for the duration of the block, and to the CPU afterwards.

    Smaller ones stay where they are, as do those that diffusers offloads.
    """
    here = device.type == "cpu" or encoder is None or hasattr(encoder, "_hf_hook")
    moves = not here and sum(weight.nbytes for weight in encoder.parameters()) > _LARGE
    if moves:
        encoder.to(device)
    try:
        yield
    finally:
        if moves:
            encoder.to("cpu")
