"""The multi-scale image tokenizer of VAR: pixels to grids of codes, one for each scale from coarse to fine, and back.

Source: Tian et al. 2024, "Visual Autoregressive Modeling" (VAR), section 3.2, algorithms 1 and 2. A latent map is a sum over
scales: the codes of scale k, looked up, enlarged to the latent's size and passed through a convolution phi, correct what the
scales before have left. Parameter names are the official ones, so an official state dict loads strictly.

Shape suffixes: B batch, C latent channels (the width of a code), Y/X pixel rows and columns, R/G latent rows and columns,
s side of a scale, N = s*s, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from vargen.compat import ensure_torchvision

ensure_torchvision()

from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.utils import BaseOutput
from diffusers.utils.accelerate_utils import apply_forward_hook

from vargen.models.tokenizers.hybrid_blocks import HEAD_WIDTH, HybridDecoder, HybridEncoder
from vargen.models.tokenizers.multi_scale_quantizer import MultiScaleQuantizer
from vargen.models.tokenizers.vq_blocks import NORM_GROUPS, Decoder, Encoder, Naming
from vargen.models.weight_storage import ModelMixin, QuantizedStorageMixin, check_format  # noqa: F401

SCALES_256 = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
SCALES_512 = (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)
ARCHITECTURES = ("convolutional", "hybrid")
_NAMING = Naming("down", "up", "block", ("block_1", "attn_1", "block_2"), fused=True, finest_first=True)


@dataclass
class MultiScaleVQOutput(BaseOutput):
    """`sample`: reconstructed pixels `[B, 3, Y, X]` in [-1, 1]; `tokens`: int64 `[B, s, s]` for each scale."""

    sample: Tensor
    tokens: list[Tensor]


class MultiScaleVQModel(QuantizedStorageMixin, ConfigMixin):
    """VAR's image tokenizer, and a small variant of it.

    Args:
        architecture: `"convolutional"`, as published; `"hybrid"`, convolutions on patches and a transformer over the latent
            grid, several times cheaper.
        codebook_size: number of codes V. codebook_embed_dim: width C of a code and of the latent.
        ch, ch_mult: base width and one multiplier per resolution, finest first; k+1 of them downsample by 2^k.
        num_res_blocks: residual blocks per encoder level (the decoder has one more).
        scales: sides of the grids of codes, coarse to fine; the last one is the latent's side.
        shared_phi: how many convolutions phi the scales share.
        scale_codes: for each scale, how many of the codes (the first ones) it uses. Default: all.
        scale_gains: whether the codes of each scale have a factor of their own.
        patch_size, transformer_blocks: of the hybrid: side of the patches that its finest level sees, and blocks of the
            encoder's transformer (the decoder has one more), which takes the place of the last level's convolutions.
        weight_format: how `save_pretrained` stores the weights; see `QuantizedStorageMixin`.

    Raises:
        ValueError: for an unknown architecture, scales that do not grow from a first of at least 1, codes per scale that do not
            fit, or widths that do not divide into norm groups or attention heads.
    """

    _no_split_modules: ClassVar[list[str]] = ["ResnetBlock", "AttnBlock", "ConvBlock", "TransformerBlock"]

    kept: ClassVar[tuple[str, ...]] = ("quantize.embedding.weight", "ema_vocab_hit_SV")

    @register_to_config
    def __init__(
        self,
        architecture: str = "convolutional",
        codebook_size: int = 4096,
        codebook_embed_dim: int = 32,
        ch: int = 160,
        ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4),
        num_res_blocks: int = 2,
        scales: tuple[int, ...] = SCALES_256,
        shared_phi: int = 4,
        scale_codes: tuple[int, ...] | None = None,
        scale_gains: bool = False,
        patch_size: int = 4,
        transformer_blocks: int = 3,
        weight_format: str | None = None,
    ):
        super().__init__()
        check_format(weight_format)
        scales = tuple(scales)
        scale_codes = tuple(scale_codes) if scale_codes is not None else (codebook_size,) * len(scales)
        _check(architecture, scales, scale_codes, codebook_size, shared_phi, ch, tuple(ch_mult))
        self.scales = scales
        self.scale_codes = scale_codes
        C, widths = codebook_embed_dim, tuple(ch * m for m in ch_mult)
        if architecture == "hybrid":
            shape = (patch_size, widths, scales[-1], num_res_blocks, transformer_blocks, C)
            self.encoder: nn.Module = HybridEncoder(*shape)
            self.decoder: nn.Module = HybridDecoder(*shape)
            self.quant_conv: nn.Module = nn.Identity()  # the hybrid ends and begins with such a layer
            self.post_quant_conv: nn.Module = nn.Identity()
        else:
            self.encoder = Encoder(3, ch, tuple(ch_mult), num_res_blocks, C, _NAMING)
            self.decoder = Decoder(3, ch, tuple(ch_mult), num_res_blocks, C, _NAMING)
            self.quant_conv = nn.Conv2d(C, C, 3, padding=1)
            self.post_quant_conv = nn.Conv2d(C, C, 3, padding=1)
        self.quantize = MultiScaleQuantizer(scales, codebook_size, C, shared_phi, scale_codes, scale_gains)

    @property
    def downsampling(self) -> int:
        """Pixels per latent position along one side."""
        patch = self.config.patch_size if self.config.architecture == "hybrid" else 1
        return int(patch * 2 ** (len(self.config.ch_mult) - 1))

    @property
    def image_size(self) -> int:
        """Side of the pictures in pixels, which the last scale fixes."""
        return self.scales[-1] * self.downsampling

    @property
    def tokens(self) -> int:
        """Codes per picture, over all scales."""
        return sum(side * side for side in self.scales)

    @property
    def codebook(self) -> Tensor:
        """`[V, C]` float32: the code vectors, before a scale's gain."""
        return self.quantize.codebook()

    # -- pixels to tokens --------------------------------------------------------------------------------------------

    @apply_forward_hook
    def latent(self, pixels_BCYX: Tensor) -> Tensor:
        """The latent `[B, C, R, G]` of pixels in [-1, 1], before quantisation.

        Raises:
            ValueError: if the pictures are not of `image_size`.
        """
        if tuple(pixels_BCYX.shape[-2:]) != (self.image_size, self.image_size):
            Y, X = pixels_BCYX.shape[-2:]
            raise ValueError(f"pixels must be {self.image_size}x{self.image_size} for scales {self.scales}, got {Y}x{X}")
        return self.quant_conv(self.encoder(pixels_BCYX))

    def quantize_latent(self, f_BCRG: Tensor) -> list[Tensor]:
        """Tokens int64 `[B, s, s]` of each scale; see `MultiScaleQuantizer.quantise`."""
        return self.quantize.quantise(f_BCRG)

    @apply_forward_hook  # so that CPU offload moves the weights in
    def encode(self, pixels_BCYX: Tensor) -> list[Tensor]:
        """Tokens int64 `[B, s, s]` of each scale, of pixels `[B, 3, Y, X]` in [-1, 1]."""
        return self.quantize_latent(self.latent(pixels_BCYX))

    # -- tokens to pixels --------------------------------------------------------------------------------------------

    def empty_latent(self, batch: int) -> Tensor:
        """The sum before the first scale: zeros `[B, C, R, G]`."""
        side = self.scales[-1]
        return torch.zeros(batch, self.config.codebook_embed_dim, side, side, device=self.quantize.embedding.weight.device)

    def next_input(self, f_hat_BCRG: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor | None]:
        """One step of the sum over scales, which teacher forcing and sampling share. Nothing is changed in place.

        Args:
            f_hat_BCRG: the sum of the scales before k, at first `empty_latent`.
            tokens: of scale k, `[B, s, s]` or `[B, s*s]`. k: from 0.

        Returns:
            The sum with scale k, and the transformer's input at scale k+1 `[B, N, C]` (None after the last scale).

        Raises:
            ValueError: if the tokens are not of scale k.
        """
        f_hat = f_hat_BCRG + self.quantize.lookup(self._square(tokens, k), k)
        return f_hat, self.quantize.input_of(f_hat, k + 1)

    def teacher_inputs(self, tokens: Sequence[Tensor]) -> Tensor:
        """The transformer's inputs `[B, N of scales 1 to S-1, C]` where the tokens of every scale are known."""
        f_hat, inputs = self.empty_latent(len(tokens[0])), []
        for k in range(len(self.scales) - 1):
            f_hat, following = self.next_input(f_hat, tokens[k], k)
            inputs.append(following)
        return torch.cat(inputs, dim=1)  # type: ignore[arg-type]

    def sum_latent(self, tokens: Sequence[Tensor]) -> Tensor:
        """The latent `[B, C, R, G]` that tokens of the first scales, or of all, add up to.

        Raises:
            ValueError: for no scale, more than there are, or tokens that are not of their scale.
        """
        if not 1 <= len(tokens) <= len(self.scales):
            raise ValueError(f"tokens must be of 1 to {len(self.scales)} scales, got {len(tokens)}")
        f_hat = self.empty_latent(len(tokens[0]))
        for k, of_scale in enumerate(tokens):
            f_hat = f_hat + self.quantize.lookup(self._square(of_scale, k), k)
        return f_hat

    def reconstruct(self, f_hat_BCRG: Tensor) -> Tensor:
        """What the decoder makes of a latent: pixels `[B, 3, Y, X]` that may lie a little outside of [-1, 1]."""
        f_hat_BCRG = f_hat_BCRG.to(next(self.decoder.parameters()).dtype)
        if not torch.is_grad_enabled():  # convolutions pass the format on; on a CPU the official decoder takes a tenth less
            f_hat_BCRG = f_hat_BCRG.to(memory_format=torch.channels_last)
        return self.decoder(self.post_quant_conv(f_hat_BCRG))

    @apply_forward_hook
    def decode_latent(self, f_hat_BCRG: Tensor) -> Tensor:
        """Pixels `[B, 3, Y, X]` in [-1, 1] of a latent, such as the sum of the first scales (a preview) or of all."""
        return self.reconstruct(f_hat_BCRG).clamp(-1, 1)

    @apply_forward_hook
    def decode(self, tokens: Sequence[Tensor]) -> Tensor:
        """Pixels `[B, 3, Y, X]` in [-1, 1] of the tokens of each scale, `[B, s, s]` or `[B, s*s]`; the first scales alone give
        a coarse picture. Raises as `sum_latent`."""
        return self.decode_latent(self.sum_latent(tokens))

    def forward(self, sample: Tensor, return_dict: bool = True) -> MultiScaleVQOutput | tuple[Tensor, list[Tensor]]:
        """Reconstruct pixels `[B, 3, Y, X]` in [-1, 1] through the codebook."""
        tokens = self.encode(sample)
        decoded = self.decode(tokens)
        return MultiScaleVQOutput(sample=decoded, tokens=tokens) if return_dict else (decoded, tokens)

    def _square(self, tokens: Tensor, k: int) -> Tensor:
        side = self.scales[k]
        if tokens.shape[1:] not in ((side, side), (side * side,)):
            shape = list(tokens.shape)
            raise ValueError(f"tokens of scale {k} must be [B, {side}, {side}] or [B, {side * side}], got {shape}")
        return tokens.view(-1, side, side)


def _check(
    architecture: str,
    scales: tuple[int, ...],
    scale_codes: tuple[int, ...],
    codebook_size: int,
    shared_phi: int,
    ch: int,
    ch_mult: tuple[int, ...],
) -> None:
    """Raise ValueError for what no model can be made of."""
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture must be one of {', '.join(ARCHITECTURES)}, got {architecture!r}")
    if not scales or scales[0] < 1 or any(a >= b for a, b in pairwise(scales)):
        raise ValueError(f"scales must grow from a first of at least 1, got {scales}")
    grow = all(a <= b for a, b in pairwise((1, *scale_codes, codebook_size)))
    if len(scale_codes) != len(scales) or not grow:
        allowed = f"{len(scales)} numbers from 1 to {codebook_size}, none falling"
        raise ValueError(f"scale_codes must be {allowed}, got {scale_codes}")
    if shared_phi < 1:
        raise ValueError(f"shared_phi must be at least 1, got {shared_phi}")
    hybrid = architecture == "hybrid"
    divisor, width, name = (HEAD_WIDTH, ch * ch_mult[-1], "ch * ch_mult[-1]") if hybrid else (NORM_GROUPS, ch, "ch")
    reason = "attention heads" if hybrid else "group norm"
    if width % divisor:
        raise ValueError(f"{name} must be a multiple of {divisor} ({reason}), got {width}")
