"""A small preview decoder of video latents, accurate enough for scoring and many times cheaper than the full decoder.

Routing between a small and a large video model scores every draft, and a full decoder can cost more than the draft. Frames are
decoded independently, so a preview has no state of earlier blocks, and rollback is free.

Shape suffixes: B batch, F frames, C latent channels, Y/X rows and columns.
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from vargen.compat import ensure_torchvision

ensure_torchvision()

from diffusers.configuration_utils import ConfigMixin, register_to_config

from vargen.models.offloading import find_device
from vargen.models.storage import ModelMixin, QuantizedStorageMixin, validate_weight_format  # noqa: F401
from vargen.models.tokenizers.hybrid_blocks import ChannelLayerNorm, ConvBlock, PatchExpand, depth_to_space
from vargen.models.tokenizers.video_vae import DecodeState


class PreviewDecoder(QuantizedStorageMixin, ConfigMixin):
    """Decodes each latent frame, of any size, to one image; see `StreamingDecoder`.

    Args:
        latent_channels: number of latent channels C.
        widths: width at the latents' resolution, and at twice that resolution.
        stride: preview pixels per latent position along each side, an even number.
        weight_format: storage format of `save_pretrained`; see `QuantizedStorageMixin`.
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
        validate_weight_format(weight_format)
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
