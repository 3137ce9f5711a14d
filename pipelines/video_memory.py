"""Memory of a video model: where its text encoder is, and how many bytes a video needs, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vargen.adapters import Guidance
from vargen.adapters.causal_video import CausalVideoBlockModel
from vargen.adapters.video_settings import resolve_levels, resolve_setting
from vargen.decoding.video.denoising import MAX_PENDING_BLOCKS
from vargen.models.condition import Condition
from vargen.models.live_bytes import LiveBytes
from vargen.models.text_encoder import TEXT_ENCODERS
from vargen.models.tokenizers.video_vae import StreamingDecoder
from vargen.models.tokenizers.wan_vae import WanStreamingDecoder
from vargen.models.transformers_folder import StoredNetwork
from vargen.pipelines.loading import ModelFolder, default_dtype, resolve_dtypes, shared_component_folders

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
    """Bytes that a stream of blocks needs on its device, by what needs them.

    Attributes:
        weights: by component. A large text encoder leaves a GPU after the prompt.
        caches: keys and values of the frames and the prompt, by transformer.
        decoder: features that the decoder keeps from block to block.
        prompt, denoising, decoding: maximum of each phase, with everything that is on the device meanwhile.
    """

    weights: Mapping[str, int]
    caches: Mapping[str, int]
    decoder: int
    prompt: int
    denoising: int
    decoding: int

    @property
    def peak(self) -> int:
        return max(self.prompt, self.denoising, self.decoding)


def predict_memory(
    folder: ModelFolder,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    num_blocks: int | None = None,
    window: int | None = None,
    sinks: int | None = None,
) -> MemoryPrediction:
    """Predict the memory of a video model from its configuration, by running a block without memory on the meta device.

    It is that of a method that drafts, if the model can: all drafts are accepted until the target, whose cache waits for its
    next block, is fed as many as it has room for. See `LiveBytes` for what is counted.

    Args:
        folder: result of `vargen.pipelines.loading.validate_model_folder`.
        device: type of the device, which need not exist here.
        dtype: of the components that follow it. Default: the fastest of the device.
        num_blocks, window, sinks: as in a call. Default: the checkpoint's.
    """
    networks = _meta_networks(folder, dtype or default_dtype(folder.path, device))
    weights = {part: weight_bytes(network) for part, network in networks.items()}
    encoder = weights.get("text_encoder", 0)
    leaves = encoder if device != "cpu" and encoder > _LARGE else 0
    total, stored = sum(weights.values()), folder.index.get("defaults")
    blocks = resolve_setting(stored, "num_blocks") if num_blocks is None else num_blocks
    window = resolve_setting(stored, "window") if window is None else window
    sinks = resolve_setting(stored, "sinks") if sinks is None else sinks
    scale = float(resolve_setting(stored, "guidance"))
    transformer = networks["transformer"]
    rows = int(transformer.config.text_len or resolve_setting(stored, "caption_rows"))
    condition = Condition(caption_embeds=torch.empty(1, rows, transformer.config.text_dim, device="meta"))
    adapted = {"transformer": transformer}
    if "draft_transformer" in networks:  # a transformer that drafts for itself has one cache
        adapted["draft_transformer"] = networks["draft_transformer"]
    with torch.no_grad(), LiveBytes(networks.values(), device) as live:
        models = {
            name: CausalVideoBlockModel(
                network, resolve_levels(stored), guidance=Guidance(scale, negative=condition), window=window, sinks=sinks,
                device=torch.device("meta"),
            )
            for name, network in adapted.items()
        }  # fmt: skip
        prompt = total + _encode(networks.get("text_encoder"), rows, live)
        frames = blocks * models["transformer"].block_shape[0]
        states = {name: model.start(condition, frames) for name, model in models.items()}
        caches = {name: state.cache.nbytes + state.text.nbytes for name, state in states.items()}
        drafts = "draft_transformer" in models
        peaks = {}
        for name, model in models.items():
            live.peak = live.current
            _denoise(model, states[name], min(MAX_PENDING_BLOCKS, blocks - 1) if drafts and name == "transformer" else 1)
            peaks[name] = live.peak
        denoising = max(peaks.values())
        latents = torch.empty(1, *models["transformer"].block_shape, device="meta")
        vae = networks["vae"]
        decoder = vae if isinstance(vae, StreamingDecoder) else WanStreamingDecoder(vae)
        _, state = decoder.decode_block(latents)
        live.peak = live.current
        kept = decoder.decode_block(latents, state)
        decoding = live.peak
        del kept
    live_weights = total - leaves
    return MemoryPrediction(
        weights, caches, state.nbytes, prompt, live_weights + denoising + state.nbytes, live_weights + decoding
    )


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


def _encode(encoder: Any, rows: int, live: LiveBytes) -> int:
    """Return the bytes that a text encoder needs for a prompt."""
    if encoder is None:
        return 0
    live.peak = live.current
    before = live.current
    ids = torch.empty(1, rows, dtype=torch.int64, device="meta")
    encoder(input_ids=ids, attention_mask=torch.empty_like(ids))
    return live.peak - before


def _denoise(model: CausalVideoBlockModel, state: Any, pending: int) -> None:
    """Run the passes of a model that need most memory: finished blocks into the cache, and a step of the next block."""
    noisy: Tensor = torch.empty(1, *model.block_shape, device="meta")
    room = max(1, min(pending, model.free_frames(state) // model.block_shape[0]))
    if pending:
        model.forward(state, [torch.empty_like(noisy) for _ in range(room)])
    model.forward(state, [], noisy, model.levels[0])
