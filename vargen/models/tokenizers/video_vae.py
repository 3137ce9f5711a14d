"""Streaming video decoding, block by block with rollback, a small causal video VAE, a preview decoder, and Wan2.1's VAE.

The state of a causal decoder is an immutable value. A decoder returns a new state instead of changing the given one, so a
caller that keeps an earlier state can roll back a block by continuing from that state.

Shape suffixes: B batch, F frames, C latent channels, Y/X rows and columns, N positions of a frame, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor, nn

from vargen.models.storage import ModelMixin, QuantizedStorageMixin, find_device, read_weight  # noqa: F401
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
        conv_blocks, transformer_blocks: residual blocks at each level except the coarsest, and transformer blocks at this one.
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


class WanStreamingDecoder:
    """Wan2.1's video VAE of diffusers as a `StreamingDecoder`, which also encodes.

    diffusers only decodes whole videos: it clears its cache of causal convolutions at the start and the end of a call. Here the
    cache is a value that the caller keeps. The decoder processes one latent frame at a time, and puts new tensors into the list
    without modifying earlier ones, so a copy of the list is a snapshot that shares its tensors.

    The first latent frame of a video is one pixel frame, each later one `temporal_stride` pixel frames.

    After `vae.enable_tiling()`, a block is decoded in overlapping tiles, each with its own causal features, which are blended.
    The frames then differ slightly from those decoded whole.
    """

    def __init__(self, vae: AutoencoderKLWan):
        if not isinstance(vae, AutoencoderKLWan):
            raise TypeError(f"vae must be an AutoencoderKLWan, got {type(vae).__name__}")
        self.vae = vae
        config: Any = vae.config
        self.temporal_stride, self.spatial_stride = int(config.scale_factor_temporal), int(config.scale_factor_spatial)
        self.channels = int(config.z_dim)
        self._kept = sum(isinstance(module, WanCausalConv3d) for module in vae.decoder.modules())

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of latents, `[C, 1, 1, 1]` each."""
        config: Any = self.vae.config
        found = torch.tensor([config.latents_mean, config.latents_std], dtype=torch.float32, device=like.device)
        return found[0, :, None, None, None], found[1, :, None, None, None]

    def decode_block(self, latents_BFCYX: Tensor, state: DecodeState | None = None) -> tuple[Tensor, DecodeState]:
        """See `StreamingDecoder`."""
        if latents_BFCYX.ndim != 5 or latents_BFCYX.shape[2] != self.channels or not latents_BFCYX.shape[1]:
            raise ValueError(f"latents must be [B, F, {self.channels}, Y, X], got {list(latents_BFCYX.shape)}")
        state = state or DecodeState()
        tiles = self._tiles(*latents_BFCYX.shape[3:])
        if state.parts and len(state.parts) != len(tiles) * self._kept:
            raise ValueError("tiling must not change within a video: the state is of another number of tiles")
        before = next((len(part) for part in state.parts if isinstance(part, Tensor)), len(latents_BFCYX))
        if before != len(latents_BFCYX):
            raise ValueError(f"the state is of {before} videos, the latents are of {len(latents_BFCYX)}")
        mean, std = self._statistics(latents_BFCYX)
        weight = next(self.vae.decoder.parameters())
        raw = (latents_BFCYX.transpose(1, 2).float() * std + mean).to(weight.dtype)
        parts: list[Any] = []
        pixels, total = None, None
        for number, (rows, columns) in enumerate(tiles):
            kept = list(state.parts[number * self._kept : (number + 1) * self._kept]) or [None] * self._kept
            tile = self._decode_tile(raw[..., rows, columns], kept, state.frames)
            parts += kept
            if len(tiles) == 1:
                pixels = tile
                continue
            if pixels is None or total is None:
                size = [(self.spatial_stride * side) for side in raw.shape[3:]]
                pixels, total = tile.new_zeros(*tile.shape[:3], *size), tile.new_zeros(size)
            place = tuple(slice(self.spatial_stride * part.start, self.spatial_stride * part.stop) for part in (rows, columns))
            weight = _ramp(tile.shape[3], tile)[:, None] * _ramp(tile.shape[4], tile)
            pixels[..., *place] += tile * weight
            total[place] += weight
        assert pixels is not None
        if total is not None:
            pixels /= total
        return pixels.transpose(1, 2), DecodeState(state.frames + raw.shape[2], tuple(parts))

    def _tiles(self, height: int, width: int) -> list[tuple[slice, slice]]:
        """Return the rows and columns of latents of each tile; one for the whole frame without tiling."""
        vae = self.vae
        if not vae.use_tiling:
            return [(slice(0, height), slice(0, width))]
        rows, columns = (
            _spans(side, tile // self.spatial_stride, stride // self.spatial_stride)
            for side, tile, stride in (
                (height, vae.tile_sample_min_height, vae.tile_sample_stride_height),
                (width, vae.tile_sample_min_width, vae.tile_sample_stride_width),
            )
        )
        return [(row, column) for row in rows for column in columns]

    def _decode_tile(self, raw_BCFYX: Tensor, kept: list[Any], start: int) -> Tensor:
        """Decode raw latents after `start` frames to pixels, float32 `[B, 3, F', Y, X]`; replaces the features in `kept`."""
        frames = []
        for i in range(raw_BCFYX.shape[2]):
            hidden = self.vae.post_quant_conv(raw_BCFYX[:, :, i : i + 1])
            frames.append(self.vae.decoder(hidden, feat_cache=kept, feat_idx=[0], first_chunk=start + i == 0))
        pixels = torch.cat(frames, 2)
        patch = getattr(self.vae.config, "patch_size", None)
        return (pixels if patch is None else unpatchify(pixels, patch_size=patch)).float()

    def encode(self, pixels_BFCYX: Tensor) -> Tensor:
        """Encode frames `[B, F, 3, Y, X]` in [-1, 1] to normalized latents `[B, F', C, Y', X']`, without noise."""
        frames, three, Y, X = pixels_BFCYX.shape[1:]
        if (frames - 1) % self.temporal_stride or three != 3 or Y % self.spatial_stride or X % self.spatial_stride:
            wanted = f"[B, 1 + a multiple of {self.temporal_stride}, 3, Y, X] with sides that divide by {self.spatial_stride}"
            raise ValueError(f"pixels must be {wanted}, got {list(pixels_BFCYX.shape)}")
        weight = next(self.vae.encoder.parameters())
        mode = self.vae.encode(pixels_BFCYX.transpose(1, 2).to(weight.dtype)).latent_dist.mode()
        mean, std = self._statistics(mode)
        return ((mode.float() - mean) / std).transpose(1, 2)


def _spans(side: int, tile: int, stride: int) -> list[slice]:
    """Cover a side with tiles, the last of which ends at the border; a side of at most a tile is one."""
    last = max(0, side - tile)
    starts = [*range(0, last, max(1, stride)), last]
    return [slice(start, min(side, start + tile)) for start in starts]


def _ramp(length: int, like: Tensor) -> Tensor:
    """Return weights `[length]` that rise from the borders of a tile to its center, so that tiles blend where they overlap."""
    distance = torch.arange(1, length + 1, device=like.device, dtype=like.dtype)
    return torch.minimum(distance, distance.flip(0))
