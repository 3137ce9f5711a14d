"""Memory of a model: where a large text encoder is, and the bytes of weights and caches, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_LARGE = 2**30  # bytes of an encoder that leaves the device; UMT5 has 11 GB in bfloat16


@contextmanager
def on_device(encoder: Any, device: torch.device) -> Iterator[None]:
    """Move a large text encoder, unless diffusers offloads it, to a device for the duration of the block, then to the CPU."""
    here = device.type == "cpu" or encoder is None or hasattr(encoder, "_hf_hook")
    moves = not here and weight_bytes(encoder) > _LARGE
    if moves:
        encoder.to(device)
    try:
        yield
    finally:
        if moves:
            encoder.to("cpu")


def weight_bytes(network: Any, dtype: torch.dtype | None = None) -> int:
    """Return the size of a network's parameters and buffers in bytes, of floating-point ones in a dtype, if it is given."""
    parts = [*network.parameters(), *network.buffers()]
    sizes = [dtype.itemsize if dtype is not None and part.is_floating_point() else part.itemsize for part in parts]
    return sum(part.numel() * size for part, size in zip(parts, sizes, strict=True))


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes that a model needs on its device. Activations and the state of a video's decoder come on top.

    Attributes:
        weights: by component. A text encoder of more than 1 GiB leaves a GPU after the prompt.
        caches: keys and values of the frames and the prompt, by transformer; empty for models of images.
    """

    weights: Mapping[str, int]
    caches: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.weights.values()) + sum(self.caches.values())


def predict_memory(pipe: Any, dtype: torch.dtype) -> MemoryPrediction:
    """Predict the memory of a model, for a video of default length, from its configuration; no weight is read.

    Args:
        pipe: its pipeline without weights, of `vargen.pipelines.loading.inspect_model`.
        dtype: of the components that follow it.
    """
    weights = {}
    for part, network in pipe._networks().items():
        follows = pipe.family.components[part].follows(type(network).__name__)
        quantized = getattr(network.config, "quantization", None) is not None
        weights[part] = weight_bytes(network, dtype if follows and not quantized else None)
    if pipe.fps is None:
        return MemoryPrediction(weights, {})
    settings, caches = pipe.settings, {}
    rows = 1 if settings.guidance == 1 else 2  # guidance has a second row
    for part in ("transformer", "draft_transformer"):  # a transformer that drafts for itself has one cache
        if (network := getattr(pipe, part)) is not None:
            geometry, text = network.geometry, network.config.text_len or settings.caption_rows
            frames = settings.num_blocks * geometry.block_frames if settings.window is None else settings.window
            held = frames * geometry.frame_tokens + text
            caches[part] = 2 * network.config.num_layers * rows * held * network.config.dim * dtype.itemsize
    return MemoryPrediction(weights, caches)
