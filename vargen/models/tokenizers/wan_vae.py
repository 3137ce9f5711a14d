"""Wan2.1's video autoencoder, as diffusers has it, decoding a video while it is made.

diffusers decodes whole videos only: its cache of causal convolutions is emptied at both ends of a call. Here the cache is a
value that the caller keeps. The decoder takes one latent frame at a time and puts new tensors into the list that it is given,
never into old ones, so a copy of the list is a snapshot, and its tensors are shared.

Shape suffixes: B batch, F frames, C latent channels, Y/X rows and columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vargen.compat import ensure_torchvision

ensure_torchvision()

from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify

from vargen.models.tokenizers.video_vae import DecodeState


class WanStreamingDecoder:
    """Standardised latents to pixels, block by block, and pixels to latents; see `StreamDecoder`.

    The first latent frame of a video is one pixel frame, each later one `temporal_stride` of them. Tiling is not used.

    Raises:
        TypeError: if `vae` is another autoencoder.
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
        """Mean and standard deviation `[C, 1, 1, 1]`."""
        config: Any = self.vae.config
        found = torch.tensor([config.latents_mean, config.latents_std], dtype=torch.float32, device=like.device)
        mean, std = found[:, :, None, None, None]
        return mean, std

    def decode_block(self, latents_BFCYX: Tensor, state: DecodeState | None = None) -> tuple[Tensor, DecodeState]:
        """See `StreamDecoder`.

        Raises:
            ValueError: if the latents have another shape than this network's, or another batch than those before.
        """
        if latents_BFCYX.ndim != 5 or latents_BFCYX.shape[2] != self.channels or not latents_BFCYX.shape[1]:
            raise ValueError(f"latents must be [B, F, {self.channels}, Y, X], got {list(latents_BFCYX.shape)}")
        state = state or DecodeState()
        before = next((len(part) for part in state.parts if isinstance(part, Tensor)), len(latents_BFCYX))
        if before != len(latents_BFCYX):
            raise ValueError(f"the state is of {before} videos, the latents are of {len(latents_BFCYX)}")
        mean, std = self._statistics(latents_BFCYX)
        weight = next(self.vae.decoder.parameters())
        raw = (latents_BFCYX.transpose(1, 2).float() * std + mean).to(weight.dtype)
        kept: list[Any] = list(state.parts) or [None] * self._kept
        frames = []
        for i in range(raw.shape[2]):
            hidden = self.vae.post_quant_conv(raw[:, :, i : i + 1])
            first = state.frames + i == 0
            frames.append(self.vae.decoder(hidden, feat_cache=kept, feat_idx=[0], first_chunk=first))
        pixels = torch.cat(frames, 2)
        patch = getattr(self.vae.config, "patch_size", None)
        if patch is not None:
            pixels = unpatchify(pixels, patch_size=patch)
        return pixels.transpose(1, 2).float(), DecodeState(state.frames + raw.shape[2], tuple(kept))

    def encode(self, pixels_BFCYX: Tensor) -> Tensor:
        """Frames `[B, F, 3, Y, X]` in [-1, 1] to standardised latents `[B, 1 + (F - 1) / temporal_stride, C, Y', X']`, no
        noise.

        Raises:
            ValueError: if there are not 1 + a multiple of `temporal_stride` frames, or sides do not divide by the stride.
        """
        frames, three, Y, X = pixels_BFCYX.shape[1:]
        if (frames - 1) % self.temporal_stride or three != 3 or Y % self.spatial_stride or X % self.spatial_stride:
            wanted = f"[B, 1 + a multiple of {self.temporal_stride}, 3, Y, X] with sides that divide by {self.spatial_stride}"
            raise ValueError(f"pixels must be {wanted}, got {list(pixels_BFCYX.shape)}")
        weight = next(self.vae.encoder.parameters())
        mode = self.vae.encode(pixels_BFCYX.transpose(1, 2).to(weight.dtype)).latent_dist.mode()
        mean, std = self._statistics(mode)
        return ((mode.float() - mean) / std).transpose(1, 2)
