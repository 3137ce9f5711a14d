"""A transformer that denoises video block by block, and attends to clean earlier blocks through a key/value cache.

Layout and parameter names are those of Wan2.1 and of the causal models distilled from it (Huang et al. 2025, "Self Forcing",
arXiv:2506.08009), so an official state dict loads strictly; `vargen.convert.causal_video` maps diffusers' names. The network
predicts the velocity of the flow, noise minus clean latents.

Shape suffixes: B videos, F latent frames, C latent channels, Y/X latent rows and columns, N tokens of a frame, T = F * N, D
width, P rows of text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, ClassVar

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor, nn

from vargen.kernels.host import is_hooked
from vargen.kernels.int8.arithmetic import quantize_weight_rows
from vargen.models.causal_video.blocks import (
    CausalVideoBlock,
    ModulatedHead,
    build_rotary_3d,
    plan_attention,
    timestep_embedding,
)
from vargen.models.causal_video.cache import TextCache, VideoCache, VideoGeometry, visible_frames
from vargen.models.quantization import SCALE_SUFFIX, replace_linear_layers
from vargen.models.storage import ModelMixin, QuantizedStorageMixin  # noqa: F401


class CausalVideoTransformer(QuantizedStorageMixin, ConfigMixin):
    """Causal video transformer. Generation uses a cache; without one, a whole video is processed at once, as in training.

    Args:
        dim, ffn_dim, num_heads, num_layers: size of the network.
        channels, height, width, patch, block_frames, spatial_stride, temporal_stride, fps: see `VideoGeometry`.
        text_dim: width of caption features.
        text_len: number of rows to which captions are padded with zeros; None for no padding.
        text_mask: whether padding rows are masked; official models attend to them.
        freq_dim: width of the sinusoidal timestep embedding.
        motion_levels: number of motion levels, 0 for none; official models have none.
    """

    _no_split_modules: ClassVar[list[str]] = ["CausalVideoBlock"]
    layer_prefixes: ClassVar[dict[str, tuple[str, ...]]] = {"num_layers": ("blocks.",)}
    float_layers: ClassVar[tuple[str, ...]] = ("text_embedding", "time_embedding", "time_projection", "head.head")
    unquantized_suffixes: ClassVar[tuple[str, ...]] = ("modulation", "motion_embedding.weight", "patch_embedding.weight")

    @register_to_config
    def __init__(
        self,
        dim: int = 1536,
        ffn_dim: int = 8960,
        num_heads: int = 12,
        num_layers: int = 30,
        channels: int = 16,
        height: int = 60,
        width: int = 104,
        patch: int = 2,
        block_frames: int = 3,
        spatial_stride: int = 8,
        temporal_stride: int = 4,
        fps: int = 16,
        text_dim: int = 4096,
        text_len: int | None = 512,
        text_mask: bool = False,
        freq_dim: int = 256,
        motion_levels: int = 0,
        weight_format: str | None = None,
        quantization: str | None = None,
    ):
        super().__init__()
        sizes = (channels, height, width, patch, block_frames, spatial_stride, temporal_stride, fps)
        self.geometry = VideoGeometry(*sizes)
        if dim % num_heads or dim // num_heads % 2 or dim // num_heads < 6:
            raise ValueError(f"num_heads must divide dim into even widths of at least 6, got {num_heads} heads of {dim}")
        self.head_dim = dim // num_heads
        self.patch_embedding = nn.Conv3d(channels, dim, (1, patch, patch), (1, patch, patch))
        self.text_embedding = nn.Sequential(nn.Linear(text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim))
        self.time_embedding = nn.Sequential(nn.Linear(freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        if motion_levels:
            self.motion_embedding = nn.Embedding(motion_levels + 1, dim)  # the last one: any level
        self.blocks = nn.ModuleList(CausalVideoBlock(dim, ffn_dim, num_heads) for _ in range(num_layers))
        self.head = ModulatedHead(dim, channels * patch * patch)
        if quantization is not None:
            replace_linear_layers(self)

    def text_cache(self, embeds_BPC: Tensor, mask_BP: Tensor | None = None, motion_B: Tensor | None = None) -> TextCache:
        """Compute the cross-attention keys and values of prompts for all blocks.

        Args:
            embeds_BPC: caption features, zero in padding rows.
            mask_BP: bool, True where a row is valid.
            motion_B: int64, motion level; None, or `motion_levels`, for any.
        """
        P, longest = embeds_BPC.shape[1], self.config.text_len
        if embeds_BPC.ndim != 3 or embeds_BPC.shape[2] != self.config.text_dim or (longest is not None and longest < P):
            most = "P" if longest is None else f"at most {longest}"
            raise ValueError(f"embeds must be [B, {most}, {self.config.text_dim}], got {list(embeds_BPC.shape)}")
        if longest is not None:
            embeds_BPC = nn.functional.pad(embeds_BPC, (0, 0, 0, longest - P))
            mask_BP = None if mask_BP is None else nn.functional.pad(mask_BP, (0, longest - P))
        rows = self.text_embedding(embeds_BPC.to(self.patch_embedding.weight.dtype))
        if motion_B is not None or self.config.motion_levels:
            rows, mask_BP = self._with_motion(rows, mask_BP, motion_B)
        bias = None
        if self.config.text_mask and mask_BP is not None:
            hidden = ~mask_BP.to(rows.device)[:, None, None]
            bias = torch.zeros(hidden.shape, dtype=torch.float32, device=rows.device).masked_fill(hidden, float("-inf"))
        pairs = [block.cross_attn.project_kv(rows) for block in self.blocks]
        return TextCache(tuple(k for k, _ in pairs), tuple(v for _, v in pairs), bias)

    def _with_motion(self, rows: Tensor, mask: Tensor | None, motion: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Append a row for the motion level."""
        levels = self.config.motion_levels
        if motion is None:
            motion = torch.full((len(rows),), levels, device=rows.device)
        elif not levels or motion.shape != rows.shape[:1] or int(motion.min()) < 0 or int(motion.max()) > levels:
            raise ValueError(f"motion must be {len(rows)} levels from 0 to {levels}, got {motion.tolist()}")
        row = self.motion_embedding(motion.to(rows.device))[:, None]
        one = torch.ones(len(rows), 1, dtype=torch.bool, device=rows.device)
        return torch.cat([rows, row.type_as(rows)], 1), None if mask is None else torch.cat([mask.to(one.device), one], 1)

    def new_cache(
        self,
        batch: int = 1,
        frames: int = 1,
        *,
        window: int | None = None,
        sinks: int = 0,
        device: torch.device | None = None,
    ) -> VideoCache:
        """Create an empty cache for this network; see `VideoCache`. The default device is that of the weights."""
        weight = self.patch_embedding.weight
        shape = (self.geometry, len(self.blocks), batch, self.config.num_heads, self.head_dim)
        place = device or weight.device
        return VideoCache(*shape, frames=frames, window=window, sinks=sinks, dtype=weight.dtype, device=place)

    def forward(
        self,
        latents_BFCYX: Tensor,
        timestep: Tensor,
        text: TextCache,
        cache: VideoCache | None = None,
        *,
        context: Tensor | None = None,
        window: int | None = None,
        sinks: int = 0,
    ) -> Tensor:
        """Predict the velocity `[B, F, C, Y, X]`, noise minus clean latents.

        With a cache, the frames are its pending ones. They are written to the cache and attend to its content. If they are
        several blocks, later blocks attend to earlier ones but not vice versa, so a clean block and the next, noisy block can
        share a pass.

        Without a cache, the frames are a video from its start, and each block attends to itself and to earlier blocks. With
        `context`, it attends to itself and to the earlier blocks of the context, as in generation.

        Args:
            latents_BFCYX: noisy latents, or clean ones with timestep 0.
            timestep: 0 to 1000, `[B]` or `[B, F]`.
            context: clean latents of the same video, with the same number of frames.
            window, sinks: attention window without a cache; see `visible_frames`.
        """
        geometry, frames, sides = self.geometry, latents_BFCYX.shape[1], latents_BFCYX.shape[3:]
        C, p = geometry.channels, geometry.patch
        if latents_BFCYX.ndim != 5 or latents_BFCYX.shape[2] != C or any(side % p for side in sides):
            shape = f"[B, F, {C}, Y, X] with Y and X multiples of {p}"
            raise ValueError(f"latents must be {shape}, got {list(latents_BFCYX.shape)}")
        if cache is not None and (context is not None or window is not None):
            raise ValueError("context and window must be None with a cache, which has them")
        rows, columns = (side // p for side in sides)
        if timestep.shape not in (latents_BFCYX.shape[:1], latents_BFCYX.shape[:2]):
            B = len(latents_BFCYX)
            raise ValueError(f"timestep must be [{B}] or [{B}, {frames}], got {list(timestep.shape)}")
        steps = (timestep if timestep.ndim == 2 else timestep[:, None].expand(-1, frames)).to(latents_BFCYX.device)
        start = 0 if cache is None else cache.frames
        x, seen = latents_BFCYX, _frame_visibility(frames, geometry.block_frames, cache, context is not None, window, sinks)
        if context is not None:
            x = torch.cat([context, x], 1)
            steps = torch.cat([torch.zeros_like(steps), steps], 1)
        plan = None if seen is None else plan_attention(seen, rows * columns)
        table = build_rotary_3d(self.head_dim, start, frames, rows, columns, x.device)
        if context is not None:
            table = (torch.cat([table[0]] * 2), torch.cat([table[1]] * 2))
        tokens = self.embed_patches(x)
        step_BFD = self.time_embedding(timestep_embedding(steps, self.config.freq_dim).to(self.patch_embedding.weight.dtype))
        steps_BF6D = self.time_projection(step_BFD).unflatten(-1, (6, -1))
        for layer, block in enumerate(self.blocks):
            part = None if cache is None else cache.layer(layer)
            tokens = block(tokens, steps_BF6D, text.layer(layer), table, plan, part)
        out = self.head(tokens, step_BFD)
        return self.join_patches(out[:, -frames * rows * columns :], frames, columns)

    def embed_patches(self, x_BFCYX: Tensor) -> Tensor:
        """Embed patches as tokens `[B, T, D]`: the official 3D convolution, computed as an equivalent matrix product."""
        p, weight = self.geometry.patch, self.patch_embedding.weight
        if is_hooked(self.patch_embedding):
            return self.patch_embedding(x_BFCYX.to(weight.dtype).transpose(1, 2)).flatten(2).transpose(1, 2)
        cells = x_BFCYX.to(weight.dtype).unflatten(4, (-1, p)).unflatten(3, (-1, p)).permute(0, 1, 3, 5, 2, 4, 6)
        tokens = nn.functional.linear(cells.flatten(4).flatten(1, 3), weight.flatten(1), self.patch_embedding.bias)
        return tokens.to(weight.dtype)  # also under autocast, so that the residual stream is not rounded

    def join_patches(self, out_BTD: Tensor, frames: int, columns: int) -> Tensor:
        """Arrange the patches of `frames` frames, `columns` in a row, as `[B, F, C, Y, X]`."""
        p = self.geometry.patch
        patches = out_BTD.unflatten(1, (frames, -1, columns)).unflatten(-1, (p, p, -1))
        return patches.permute(0, 1, 6, 2, 4, 3, 5).flatten(5).flatten(3, 4)


def _frame_visibility(
    frames: int, block: int, cache: VideoCache | None, context: bool, window: int | None, sinks: int
) -> Tensor | None:
    """Attention mask over frames, bool [rows, columns]; None if everything is visible."""
    if cache is not None:
        if frames != cache.pending:
            raise ValueError(f"{cache.pending} frames were begun in the cache, got {frames}")
        if frames <= cache.geometry.block_frames:
            return None
        own = visible_frames(frames, cache.geometry.block_frames)
        return torch.cat([torch.ones(frames, cache.frames, dtype=torch.bool), own], 1)
    before = visible_frames(frames, block, window, sinks)
    if context:
        own = torch.arange(frames) // block
        itself = own[:, None] == own[None]
        nothing = torch.zeros_like(before)
        return torch.cat([torch.cat([before, nothing], 1), torch.cat([before & ~itself, itself], 1)])
    return None if bool(before.all()) else before


def geometry_from_config(config: object) -> VideoGeometry:
    """Return the geometry in a network's configuration."""
    return VideoGeometry(**{part.name: getattr(config, part.name) for part in fields(VideoGeometry)})


# -- LoRA ----------------------------------------------------------------------------------------------------------------


class LowRankUpdate(nn.Module):
    """Update B A of a matrix `[rows, columns]`. A new one is zero, because B is."""

    def __init__(self, rows: int, columns: int, rank: int):
        super().__init__()
        self.A = nn.Parameter(torch.randn(rank, columns) * columns**-0.5)
        self.B = nn.Parameter(torch.zeros(rows, rank))


class CausalVideoLoRA(QuantizedStorageMixin, ConfigMixin):
    """LoRA (Hu et al. 2021, arXiv:2106.09685) of all matrices in the blocks of a `CausalVideoTransformer`.

    A matrix W [out, in] becomes W + B A, where A [rank, in] and B [out, rank] are small. The updates are merged into a second
    network, which runs as fast as the first one and shares all its other weights.

    Args:
        dim, ffn_dim, num_layers: size of the network, as there.
        rank: rank of each update.
    """

    @register_to_config
    def __init__(
        self,
        dim: int = 1536,
        ffn_dim: int = 8960,
        num_layers: int = 30,
        rank: int = 32,
        weight_format: str | None = None,
    ):
        super().__init__()
        if not 1 <= rank <= dim:
            raise ValueError(f"rank must be from 1 to dim, {dim}, got {rank}")
        with torch.device("meta"):
            named = CausalVideoBlock(dim, ffn_dim, 1).named_modules()
            shapes = {name: layer.weight.shape for name, layer in named if isinstance(layer, nn.Linear)}
        self.layer_names = {name.replace(".", "_"): name for name in shapes}  # names of modules have no dots
        self.blocks = nn.ModuleList(
            nn.ModuleDict({key: LowRankUpdate(*shapes[name], rank) for key, name in self.layer_names.items()})
            for _ in range(num_layers)
        )

    @torch.no_grad()
    def merge(self, transformer: CausalVideoTransformer) -> CausalVideoTransformer:
        """Return a second network with the updates; it shares all weights without one.

        With 8-bit products, the updated matrices are quantized again.
        """
        state: dict[str, Tensor] = dict(transformer.state_dict())
        if any(value.device.type == "meta" for value in state.values()):
            raise ValueError("a LoRA cannot be merged into weights that are offloaded one by one: use enable_model_cpu_offload")
        for layer, update in self.updates():
            weight, scale = f"{layer}.weight", f"{layer}.{SCALE_SUFFIX}"
            known = state[weight].float() * state[scale][:, None] if scale in state else state[weight].float()
            new = torch.addmm(known, update.B.to(known), update.A.to(known))
            if scale in state:
                state[weight], state[scale] = quantize_weight_rows(new)
            else:
                state[weight] = new.to(state[weight].dtype)
        config = {name: value for name, value in transformer.config.items() if not name.startswith("_")}
        with torch.device("meta"):
            merged = type(transformer)(**config)
        merged.load_state_dict(state, assign=True)
        return merged.requires_grad_(False).eval()

    def updates(self) -> Iterator[tuple[str, Any]]:
        """Yield the name of each layer in the network, and its update."""
        for number, updates in enumerate(self.blocks):
            for key, name in self.layer_names.items():
                yield f"blocks.{number}.{name}", updates[key]
