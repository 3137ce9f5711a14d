"""Infinity's image tokenizer: encodes pixels to bits of one grid per scale, coarse to fine, and decodes them.

Source: Han et al. 2024, "Infinity" (arXiv:2412.04431), section 3.2; binary spherical quantization is of Zhao et al. 2024
(arXiv:2406.07548). The latent is a sum over scales: the bits of scale k are the signs of the residual of the earlier scales; as
a unit vector, they are upsampled to the latent's size. Encoder and decoder are those of VQGAN without attention
(`vargen.models.tokenizers.blocks`). Parameter names are the official ones without the inner `.conv` and `.norm`.

Shape suffixes: B batch, d bits of a position of a latent, R/G latent rows and columns, Y/X pixel rows and columns, n tokens of
a scale, C bits of a token: d, or 4 d with patchify.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor

from vargen.models.storage import ModelMixin, QuantizedStorageMixin  # noqa: F401
from vargen.models.tokenizers.blocks import VQDecoder, VQEncoder, VQParameterNames

_NAMING = VQParameterNames("down", "up", "block", ("block_1", "", "block_2"), finest_first=True, attention=False)
_PATCH = 2  # positions along a side of a token with patchify
_STRIDE_8 = (1, 2, 4, 4)
# Arguments of `BSQModel` for the published tokenizers of 2B and 8B, by the bits of a token.
TOKENIZERS: dict[int, dict[str, Any]] = {
    32: {},
    56: {"bits": 14, "patchify": True, "encoder_ch_mult": _STRIDE_8, "decoder_ch_mult": _STRIDE_8},
}


@dataclass(frozen=True)
class BitQuantizer:
    """The mapping between bits and latents of images of some scales. It has no weights, and computes in float32.

    Tokens of a scale are its bits, int64 `[B, n * C]`: those of one token after another, in raster order.

    Args:
        bits: bits d of a position.
        patchify: whether a token is 2 x 2 positions.
        grids: rows and columns of the tokens of each scale, coarse to fine.
    """

    bits: int
    patchify: bool
    grids: tuple[tuple[int, int], ...]

    @property
    def scales(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the positions of each scale."""
        factor = _PATCH if self.patchify else 1
        return tuple((rows * factor, columns * factor) for rows, columns in self.grids)

    @property
    def scale_tokens(self) -> tuple[int, ...]:
        """Number of bits of each scale."""
        return tuple(rows * columns * self.bits for rows, columns in self.scales)

    def to_tokens(self, z_BdRG: Tensor) -> Tensor:
        """Arrange what positions have, `[B, d, rows, columns]`, by token: `[B, n, C]`."""
        parts = F.pixel_unshuffle(z_BdRG, _PATCH) if self.patchify else z_BdRG
        return parts.flatten(2).transpose(1, 2)

    def to_positions(self, tokens_BnC: Tensor, k: int) -> Tensor:
        """Undo `to_tokens` at scale k."""
        parts = tokens_BnC.transpose(1, 2).unflatten(2, self.grids[k])
        return F.pixel_shuffle(parts, _PATCH) if self.patchify else parts

    def downsample(self, z_BdRG: Tensor, k: int) -> Tensor:
        """Downsample a latent-sized map to the positions of scale k, by the mean over the area of each."""
        size = self.scales[k]
        return z_BdRG if size == z_BdRG.shape[2:] else F.interpolate(z_BdRG, size=size, mode="area")

    def find_nearest(self, z_BdRG: Tensor, k: int) -> Tensor:
        """Bits int64 `[B, n * C]` of the codes nearest to `z` at scale k: its signs."""
        return (self.to_tokens(z_BdRG) > 0).flatten(1).long()

    def spread(self, cells_B1RG: Tensor, k: int) -> Tensor:
        """The values of the positions of scale k for its bits, `[B, n * C]`."""
        return self.to_tokens(cells_B1RG.expand(-1, self.bits, -1, -1).contiguous()).flatten(1)

    def lookup(self, tokens: Tensor, k: int) -> Tensor:
        """Contribution of the bits `[B, n * C]` of scale k to the latent, float32 `[B, d, R, G]`."""
        rows, columns = self.grids[k]
        code = (2 * tokens.unflatten(1, (rows * columns, -1)).float() - 1) / self.bits**0.5
        return self._resize(self.to_positions(code, k), len(self.grids) - 1)

    def _resize(self, z_BdRG: Tensor, k: int) -> Tensor:
        """Resize a map to the positions of scale k."""
        size = self.scales[k]
        return z_BdRG if size == z_BdRG.shape[2:] else F.interpolate(z_BdRG, size=size, mode="bilinear")

    def quantize(self, latent_BdRG: Tensor) -> list[Tensor]:
        """Quantize latents to bits int64 `[B, n * C]` per scale: each scale quantizes the residual of the earlier ones."""
        rest, tokens = latent_BdRG.float(), list[Tensor]()
        for k in range(len(self.grids)):
            tokens.append(self.find_nearest(self.downsample(rest, k), k))
            rest = rest - self.lookup(tokens[-1], k)
        return tokens

    def transformer_input(self, latent_BdRG: Tensor, k: int) -> Tensor | None:
        """Transformer input of scale k, `[B, n, C]`, from the sum of earlier scales; None after the last scale."""
        return None if k == len(self.grids) else self.to_tokens(self._resize(latent_BdRG, k))


class BSQModel(QuantizedStorageMixin, ConfigMixin):
    """Infinity's image tokenizer. It encodes and decodes images of any size.

    Args:
        bits: bits d of a position of a latent, which are its channels.
        patchify: whether a token of the transformer is 2 x 2 positions.
        ch, encoder_ch_mult, decoder_ch_mult: base width and one multiplier per resolution, finest first.
        num_res_blocks: residual blocks per encoder level (the decoder has one more).
    """

    _no_split_modules: ClassVar[list[str]] = ["ResnetBlock"]
    layer_prefixes: ClassVar[dict[str, tuple[str, ...]]] = {"num_res_blocks": ("encoder.down.0.block.",)}

    @register_to_config
    def __init__(
        self,
        bits: int = 32,
        patchify: bool = False,
        ch: int = 128,
        encoder_ch_mult: tuple[int, ...] = (1, 2, 4, 4, 4),
        decoder_ch_mult: tuple[int, ...] = (1, 2, 4, 4, 4),
        num_res_blocks: int = 2,
        weight_format: str | None = None,
    ):
        super().__init__()
        if len(encoder_ch_mult) != len(decoder_ch_mult):
            found = f"{len(encoder_ch_mult)} and {len(decoder_ch_mult)}"
            raise ValueError(f"encoder_ch_mult and decoder_ch_mult must have as many resolutions, got {found}")
        self.encoder = VQEncoder(3, ch, tuple(ch * m for m in encoder_ch_mult), num_res_blocks, bits, _NAMING)
        self.decoder = VQDecoder(3, tuple(ch * m for m in decoder_ch_mult), num_res_blocks, bits, _NAMING)

    @property
    def downsampling(self) -> int:
        """Pixels per latent position along one side."""
        return int(2 ** (len(self.config.encoder_ch_mult) - 1))

    @property
    def stride(self) -> int:
        """Pixels per token along one side."""
        return self.downsampling * (_PATCH if self.config.patchify else 1)

    @property
    def token_bits(self) -> int:
        """Bits C of a token."""
        return self.config.bits * (_PATCH**2 if self.config.patchify else 1)

    def quantizer(self, grids: tuple[tuple[int, int], ...]) -> BitQuantizer:
        """Return the quantizer of images whose scales have these rows and columns of tokens."""
        return BitQuantizer(self.config.bits, self.config.patchify, grids)

    @apply_forward_hook
    def encode_latent(self, pixels_B3YX: Tensor) -> Tensor:
        """Encode pixels in [-1, 1] to latents `[B, d, R, G]` before quantization."""
        side = self.downsampling
        if any(size % side for size in pixels_B3YX.shape[2:]):
            Y, X = pixels_B3YX.shape[2:]
            raise ValueError(f"pixels must be multiples of {side} high and wide, got {Y}x{X}")
        return self.encoder(pixels_B3YX)

    @apply_forward_hook
    def decode_latent(self, latent_BdRG: Tensor) -> Tensor:
        """Decode a latent, such as the sum of the first scales (a preview) or of all, to pixels `[B, 3, Y, X]` in [-1, 1]."""
        return self.decoder(latent_BdRG.to(next(self.decoder.parameters()).dtype)).clamp(-1, 1)
