"""Memory of a model: where a large text encoder is, and the bytes of weights and caches, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vargen.folders.transformers_networks import StoredNetwork
from vargen.models.text_encoder import TEXT_ENCODERS
from vargen.pipelines.loading import ModelFolder, default_dtype, resolve_dtypes, shared_component_folders
from vargen.pipelines.video_settings import resolve_setting

_LARGE = 2**30  # bytes of an encoder that leaves the device; UMT5 has 11 GB in bfloat16


@contextmanager
def on_device(encoder: Any, device: torch.device) -> Iterator[None]:
    """Move a large text encoder to a device for the duration of the block, and to the CPU afterwards.

    Smaller ones stay where they are, as do those that diffusers offloads.
    """
    here = device.type == "cpu" or encoder is None or hasattr(encoder, "_hf_hook")
    moves = not here and weight_bytes(encoder) > _LARGE
    if moves:
        encoder.to(device)
    try:
        yield
    finally:
        if moves:
            encoder.to("cpu")


def weight_bytes(network: Any) -> int:
    """Return the size of a network's parameters and buffers in bytes."""
    return sum(part.nbytes for parts in (network.parameters(), network.buffers()) for part in parts)


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


def predict_memory(
    folder: ModelFolder,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    num_blocks: int | None = None,
    window: int | None = None,
) -> MemoryPrediction:
    """Predict the memory of a model from its configuration; no weight is read.

    Args:
        folder: result of `vargen.pipelines.loading.validate_model_folder`.
        device: type of the device, which need not exist here.
        dtype: of the components that follow it. Default: the fastest of the device.
        num_blocks, window: of a video, as in a call. Default: the checkpoint's.
    """
    networks = _meta_networks(folder, dtype or default_dtype(folder.path, device))
    weights = {part: weight_bytes(network) for part, network in networks.items()}
    if folder.family.pipeline.paradigm != "video":
        return MemoryPrediction(weights, {})
    stored = folder.index.get("defaults")
    blocks = resolve_setting(stored, "num_blocks") if num_blocks is None else num_blocks
    window = resolve_setting(stored, "window") if window is None else window
    rows = 1 if float(resolve_setting(stored, "guidance")) == 1 else 2  # guidance has a second row
    caches: dict[str, int] = {}
    for part in ("transformer", "draft_transformer"):  # a transformer that drafts for itself has one cache
        if part in networks:
            network = networks[part]
            geometry, text = network.geometry, network.config.text_len or resolve_setting(stored, "caption_rows")
            frames = blocks * geometry.block_frames if window is None else window
            held = frames * geometry.frame_tokens + text
            caches[part] = 2 * network.config.num_layers * rows * held * network.config.dim * network.dtype.itemsize
    return MemoryPrediction(weights, caches)


def _meta_networks(folder: ModelFolder, dtype: torch.dtype) -> dict[str, Any]:
    """Build the networks of a folder without memory, in the dtypes that a pipeline would open them in."""
    dtypes, places = resolve_dtypes(folder, dtype), shared_component_folders(folder.path)
    found: dict[str, Any] = {}
    for part, component in folder.family.components.items():
        entry = tuple(folder.index.get(part) or (None, None))
        if entry[1] is None or part == "tokenizer":
            continue
        place, kind = places.get(part, folder.path) / part, component.paths[entry]  # a class or, of transformers, its path
        with torch.device("meta"):
            if isinstance(kind, tuple):
                network = StoredNetwork(place, TEXT_ENCODERS[kind[1]]).skeleton
            else:
                network = kind.from_config(kind.load_config(place))
        found[part] = network.to(dtypes.get(part, dtypes["default"])).eval()
    return found
