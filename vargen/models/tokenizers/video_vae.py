"""Streaming video decoding, block by block with rollback, a small causal video VAE and a preview decoder.

The state of a causal decoder is an immutable value. A decoder returns a new state instead of changing the given one, so a
caller that keeps an earlier state can roll back a block by continuing from that state.

Shape suffixes: B batch, F frames, C latent channels, Y/X rows and columns, N positions of a frame, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor, nn

from vargen.models.offloading import find_device, read_weight
from vargen.models.storage import ModelMixin, QuantizedStorageMixin  # noqa: F401
from vargen.models.tokenizers.blocks import (
    HEAD_WIDTH,
    ChannelLayerNorm,
    ConvBlock,
    HybridDecoder,
    HybridEncoder,
    PatchExpand,
    depth_to_space,
)


@dataclass(frozen=True)
class DecodeState:
    """State of a decoder within a video.

    Attributes:
        frames: number of latent frames decoded so far.
        parts: state of the causal layers in a decoder-specific order: tensors, which must not be modified, or markers.
    """

    frames: int = 0
    parts: tuple[Any, ...] = ()


@runtime_checkable
class StreamingDecoder(Protocol):
    """Decodes latents to pixels, block by block."""

    def decode_block(self, latents_BFCYX: Tensor, state: DecodeState | None = None) -> tuple[Tensor, DecodeState]:
        """Decode the next latent frames of a video.

        Args:
            latents_BFCYX: normalized latents of one or more frames.
            state: state returned for the preceding block; None at the start of a video.

        Returns:
            Pixels `[B, F', 3, Y, X]` in [-1, 1], not clamped, and the state for the next block.
        """
        ...


_PAST = 2  # number of earlier frames in the receptive field of a causal layer
_LOG_VARIANCE = (-12.0, 4.0)


class TemporalMixer(nn.Module):
    """x_t + MLP(norm(x_{t-2}), norm(x_{t-1}), norm(x_t)) at each position; initialized as the identity."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.fc1 = nn.Linear((_PAST + 1) * width, width)
        self.fc2 = nn.Linear(width, width)
        nn.init.zeros_(self.fc2.weight)

    def forward(self, x_BFND: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output, and `past` for the next frames, `[B, 2, N, D]`."""
        normed = self.norm(x_BFND)
        seen = torch.cat([normed[:, :1].expand(-1, _PAST, -1, -1) if past is None else past.type_as(normed), normed], 1)
        frames = x_BFND.shape[1]
        window = torch.cat([seen[:, i : i + frames] for i in range(_PAST + 1)], -1)
        return x_BFND + self.fc2(F.silu(self.fc1(window))), seen[:, -_PAST:].clone()


class CausalDecoder(HybridDecoder):
    """Decodes latents `[B, F, C, Y', X']` to frames `[B, F, 3, Y, X]`. Only the coarsest level mixes over time."""

    def __init__(self, patch: int, widths: tuple[int, ...], side: int, blocks: int, transformer_blocks: int, latent: int):
        super().__init__(patch, widths, side, blocks, transformer_blocks, latent)
        self.mixes = nn.ModuleList(TemporalMixer(widths[-1]) for _ in range(transformer_blocks))

    def forward(  # type: ignore[override]
        self, z_BFCYX: Tensor, past: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the frames, and `past` for the next frames."""
        B = len(z_BFCYX)
        h = self.conv_in(z_BFCYX.flatten(0, 1))
        side = h.shape[2:]
        h = h.flatten(2).transpose(1, 2) + read_weight(self.trunk, "position")
        kept = []
        for i, (block, mix) in enumerate(zip(self.trunk.blocks, self.mixes, strict=True)):
            mixed, latest = mix(block(h).unflatten(0, (B, -1)), None if past is None else past[i])
            h = mixed.flatten(0, 1)
            kept.append(latest)
        h = self.trunk.norm(h).transpose(1, 2).unflatten(2, side)
        return self.enlarge(h).unflatten(0, (B, -1)), tuple(kept)


class CausalVideoVAE(QuantizedStorageMixin, ConfigMixin):
    """Causal video VAE. Public latents are normalized: mean 0 and variance 1 per channel over the training data.

    Args:
        size: width and height of frames in pixels.
        latent_channels: number of latent channels C.
        widths: widths of the levels, finest first; each level halves the resolution of the one before.
        patch: side of the pixel patches that form a position of the finest level.
        conv_blocks: residual blocks at each level except the coarsest.
        transformer_blocks: transformer blocks at the coarsest level.
        fps: frames per second of the videos.
    """

    _no_split_modules: ClassVar[list[str]] = ["ConvBlock", "ViTBlock", "TemporalMixer"]
    layer_prefixes: ClassVar[dict[str, tuple[str, ...]]] = {
        "conv_blocks": ("encoder.levels.0.",),
        "transformer_blocks": ("encoder.trunk.blocks.",),
    }
    unquantized_suffixes: ClassVar[tuple[str, ...]] = ("latent_mean", "latent_std")
    temporal_stride = 1
    latent_mean: Tensor
    latent_std: Tensor

    @register_to_config
    def __init__(
        self,
        size: int = 64,
        latent_channels: int = 4,
        widths: tuple[int, ...] = (48, 96, 160),
        patch: int = 2,
        conv_blocks: int = 1,
        transformer_blocks: int = 2,
        fps: int = 12,
        weight_format: str | None = None,
    ):
        super().__init__()
        widths = tuple(widths)
        stride = patch * 2 ** (len(widths) - 1)
        if size < stride or size % stride:
            raise ValueError(f"size must be a multiple of {stride}, which patch and widths make of it, got {size}")
        if widths[-1] % HEAD_WIDTH:
            raise ValueError(f"the last of widths must be a multiple of {HEAD_WIDTH}, got {widths}")
        self.spatial_stride = stride
        shape = (patch, widths, size // stride, conv_blocks, transformer_blocks)
        self.encoder = HybridEncoder(*shape, 2 * latent_channels)  # mean and log variance
        self.decoder = CausalDecoder(*shape, latent_channels)
        self.register_buffer("latent_mean", torch.zeros(latent_channels))
        self.register_buffer("latent_std", torch.ones(latent_channels))

    @property
    def latent_side(self) -> int:
        """Number of rows, and of columns, of a latent frame."""
        return int(self.config.size // self.spatial_stride)

    def encode_moments(self, pixels_BFCYX: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance `[B, F, C, Y', X']` float32 of the latents before normalization."""
        size = self.config.size
        if pixels_BFCYX.ndim != 5 or tuple(pixels_BFCYX.shape[2:]) != (3, size, size):
            raise ValueError(f"pixels must be [B, F, 3, {size}, {size}], got {list(pixels_BFCYX.shape)}")
        found = self.encoder(pixels_BFCYX.flatten(0, 1)).unflatten(0, pixels_BFCYX.shape[:2])
        mean, log_variance = found.chunk(2, dim=2)
        return mean, log_variance.clamp(*_LOG_VARIANCE)

    def normalize_latents(self, latents_BFCYX: Tensor) -> Tensor:
        """Normalize raw latents."""
        return (latents_BFCYX - self._channels(self.latent_mean)) / self._channels(self.latent_std)

    def denormalize_latents(self, latents_BFCYX: Tensor) -> Tensor:
        """The inverse of `normalize_latents`."""
        return latents_BFCYX * self._channels(self.latent_std) + self._channels(self.latent_mean)

    def _channels(self, values: Tensor) -> Tensor:
        return values.float()[:, None, None]

    @apply_forward_hook
    def encode(self, pixels_BFCYX: Tensor) -> Tensor:
        """Encode frames `[B, F, 3, Y, X]` in [-1, 1] to normalized latents `[B, F, C, Y', X']` float32, without noise."""
        return self.normalize_latents(self.encode_moments(pixels_BFCYX)[0])

    @apply_forward_hook
    def decode_block(self, latents_BFCYX: Tensor, state: DecodeState | None = None) -> tuple[Tensor, DecodeState]:
        """See `StreamingDecoder`. Each latent frame is one pixel frame."""
        C, side = self.config.latent_channels, self.latent_side
        if latents_BFCYX.ndim != 5 or tuple(latents_BFCYX.shape[2:]) != (C, side, side) or not latents_BFCYX.shape[1]:
            raise ValueError(f"latents must be [B, F, {C}, {side}, {side}], got {list(latents_BFCYX.shape)}")
        state = state or DecodeState()
        if state.parts and len(state.parts[0]) != len(latents_BFCYX):
            raise ValueError(f"the state is of {len(state.parts[0])} videos, the latents are of {len(latents_BFCYX)}")
        first = self.decoder.conv_in
        raw = self.denormalize_latents(latents_BFCYX).to(find_device(first), first.weight.dtype)
        pixels, past = self.decoder(raw, state.parts or None)
        return pixels.float(), DecodeState(state.frames + latents_BFCYX.shape[1], past)

    @apply_forward_hook
    def decode(self, latents_BFCYX: Tensor) -> Tensor:
        """Decode normalized latents of whole videos to frames `[B, F, 3, Y, X]` in [-1, 1], not clamped."""
        return self.decode_block(latents_BFCYX)[0]

    def forward(self, sample: Tensor) -> Tensor:
        """Encode and decode."""
        return self.decode(self.encode(sample))


class PreviewDecoder(QuantizedStorageMixin, ConfigMixin):
    """Decodes each latent frame, of any size, to one image: for scoring, many times cheaper than the full decoder.

    Routing between a small and a large video model scores every draft, and a full decoder can cost more than the draft. Frames
    are decoded independently, so there is no state of earlier blocks, and rollback is free.

    Args:
        latent_channels: number of latent channels C.
        widths: width at the latents' resolution, and at twice that resolution.
        stride: preview pixels per latent position along each side, an even number.
    """

    _no_split_modules: ClassVar[list[str]] = ["ConvBlock"]

    @register_to_config
    def __init__(
        self,
        latent_channels: int = 4,
        widths: tuple[int, int] = (64, 32),
        stride: int = 8,
        weight_format: str | None = None,
    ):
        super().__init__()
        if stride < 2 or stride % 2:
            raise ValueError(f"stride must be an even number of at least 2, got {stride}")
        coarse, fine = widths
        self.patch = stride // 2
        self.conv_in = nn.Conv2d(latent_channels, coarse, 3, padding=1)
        self.coarse = ConvBlock(coarse)
        self.up = PatchExpand(coarse, fine)
        self.fine = ConvBlock(fine)
        self.norm_out = ChannelLayerNorm(fine)
        self.conv_out = nn.Conv2d(fine, 3 * self.patch**2, 3, padding=1)

    def forward(self, latents_BFCYX: Tensor) -> Tensor:
        """Decode normalized latents to pixels `[B, F, 3, Y', X']`, about [-1, 1], not clamped."""
        h = self.conv_in(latents_BFCYX.flatten(0, 1).to(find_device(self.conv_in), self.conv_in.weight.dtype))
        h = self.fine(self.up(self.coarse(h)))
        pixels = depth_to_space(self.conv_out(F.silu(self.norm_out(h))), self.patch)
        return pixels.unflatten(0, latents_BFCYX.shape[:2])

    def decode_block(self, latents_BFCYX: Tensor, state: DecodeState | None = None) -> tuple[Tensor, DecodeState]:
        """See `StreamingDecoder`. Returns one frame per latent frame for any temporal stride of the latents."""
        C = self.config.latent_channels
        if latents_BFCYX.ndim != 5 or latents_BFCYX.shape[2] != C or not latents_BFCYX.shape[1]:
            raise ValueError(f"latents must be [B, F, {C}, Y, X], got {list(latents_BFCYX.shape)}")
        done = (state or DecodeState()).frames + latents_BFCYX.shape[1]
        return self(latents_BFCYX).float(), DecodeState(done)
