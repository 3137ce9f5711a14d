"""Streaming decoding with Wan2.1's video VAE of diffusers.

diffusers only decodes whole videos: it clears its cache of causal convolutions at the start and the end of a call. Here the
cache is a value that the caller keeps. The decoder processes one latent frame at a time, and puts new tensors into the given
list without modifying earlier tensors, so a copy of the list is a snapshot that shares its tensors.

Shape suffixes: B batch, F frames, C latent channels, Y/X rows and columns.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify
from torch import Tensor

from vargen.models.tokenizers.video_vae import DecodeState


class WanStreamingDecoder:
    """Decodes normalized latents to pixels, block by block, and encodes pixels to latents; see `StreamingDecoder`.

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
