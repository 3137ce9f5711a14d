"""The VQ image tokenizer of LlamaGen: encodes pixels to a grid of codebook indices, and decodes them.

Source: Sun et al. 2024, "Autoregressive Model Beats Diffusion" (LlamaGen), section 3.1; the network descends from VQGAN
(Esser et al. 2021). Parameter names are the official ones, so an official state dict loads strictly.

Shape suffixes: B batch, C channels, Y/X pixel rows and columns, R/G grid rows and columns, N = R*G tokens, E code dimension.
"""

from __future__ import annotations

import hashlib
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor, nn

from vargen.models.storage import ModelMixin, QuantizedStorageMixin, read_weight  # noqa: F401
from vargen.models.tokenizers.blocks import NORM_GROUPS, VQDecoder, VQEncoder, VQParameterNames

_NAMING = VQParameterNames(down="conv_blocks", up="conv_blocks", blocks="res", middle=("0", "1", "2"))
CODEBOOK_USED_SLOTS = 65536  # length of the usage buffer that official files carry


class NonFinitePixelsError(RuntimeError):
    """The image tokenizer returned NaN or infinite values, so no image or tokens are returned."""

    @classmethod
    def check(cls, pixels_BCYX: Tensor) -> None:
        """Raise for the first non-finite pixel. It takes one reduction, right before pixels are copied to the host."""
        if pixels_BCYX.isfinite().all():
            return
        image, _, row, column = (~pixels_BCYX.isfinite()).nonzero()[0].tolist()
        B, _, Y, X = pixels_BCYX.shape
        raise cls(
            f"the image tokenizer returned NaN or infinite pixels, first in image {image + 1} of {B} at row {row}, column "
            f"{column} of {Y} x {X}; no image is made of them. Check the checkpoint's vqvae, or run it in float32"
        )


class VectorQuantizer(nn.Module):
    """Nearest code on the unit sphere: latents and codebook rows are L2-normalized before they are compared."""

    def __init__(self, codebook_size: int, codebook_embed_dim: int):
        super().__init__()
        self.embedding = nn.Embedding(codebook_size, codebook_embed_dim)
        nn.init.normal_(self.embedding.weight)
        self.register_buffer("codebook_used", torch.zeros(CODEBOOK_USED_SLOTS))

    def codebook(self) -> Tensor:
        """Return the codebook used in decoding, `[V, E]`, float32 rows of unit norm for any weight dtype."""
        return F.normalize(read_weight(self.embedding).float(), dim=-1)

    def digest(self) -> str | None:
        """Digest of the codebook in float16; None if the weights have lower precision or are not loaded."""
        weight = self.embedding.weight
        if weight.is_meta or weight.dtype not in (torch.float16, torch.float32):
            return None
        return hashlib.sha256(weight.detach().half().cpu().numpy().tobytes()).hexdigest()[:16]

    def find_nearest(self, z_BERG: Tensor) -> Tensor:
        """Indices `[B, R, G]` int64 of the nearest codes, which have the greatest cosine similarity."""
        return self.cosines(z_BERG).argmax(-1)

    def cosines(self, z_BERG: Tensor) -> Tensor:
        """Cosine similarities of all latents and codes, `[B, R, G, V]` float32."""
        return F.normalize(z_BERG.float().movedim(1, -1), dim=-1) @ self.codebook().T

    def lookup(self, indices_BRG: Tensor) -> Tensor:
        """Embeddings `[B, E, R, G]` float32 of indices `[B, R, G]`."""
        return F.normalize(self.embedding(indices_BRG).float(), dim=-1).movedim(-1, 1)


class VQModel(QuantizedStorageMixin, ConfigMixin):
    """LlamaGen's image tokenizer.

    Args:
        codebook_size, codebook_embed_dim: number of codes V, and their dimension E.
        ch: base width. The width of a level is `ch` times its multiplier, and must be divisible by 32.
        encoder_ch_mult, decoder_ch_mult: one multiplier per resolution, finest first; k+1 of them downsample by 2^k.
            `(1, 1, 2, 2, 4)` is VQ-16, `(1, 2, 2, 4)` is VQ-8.
        num_res_blocks: residual blocks per encoder level (the decoder has one more). Official files have 2.
        z_channels: width of the features before and after the quantizer.
        blank_code: the code that a generator was trained to expect in blank patches; see `BackgroundTokenizer`.
    """

    _no_split_modules: ClassVar[list[str]] = ["ResnetBlock", "AttnBlock"]
    layer_prefixes: ClassVar[dict[str, tuple[str, ...]]] = {
        "num_res_blocks": ("encoder.conv_blocks.0.res.",),
        "encoder_ch_mult": ("encoder.conv_blocks.",),
        "decoder_ch_mult": ("decoder.conv_blocks.",),
    }
    unquantized_suffixes: ClassVar[tuple[str, ...]] = ("quantize.embedding.weight", "codebook_used")

    @register_to_config
    def __init__(
        self,
        codebook_size: int = 16384,
        codebook_embed_dim: int = 8,
        ch: int = 128,
        encoder_ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4),
        decoder_ch_mult: tuple[int, ...] = (1, 1, 2, 2, 4),
        num_res_blocks: int = 2,
        z_channels: int = 256,
        in_channels: int = 3,
        out_channels: int = 3,
        weight_format: str | None = None,
        blank_code: int | None = None,
    ):
        super().__init__()
        if blank_code is not None and not 0 <= blank_code < codebook_size:
            raise ValueError(f"blank_code must be None or from 0 to {codebook_size - 1}, got {blank_code}")
        if len(encoder_ch_mult) != len(decoder_ch_mult):
            raise ValueError(f"encoder_ch_mult {encoder_ch_mult} and decoder_ch_mult {decoder_ch_mult} must have equal length")
        if ch % NORM_GROUPS:
            raise ValueError(f"ch must be a multiple of {NORM_GROUPS} (group norm), got {ch}")
        narrow, wide = ([ch * m for m in each] for each in (encoder_ch_mult, decoder_ch_mult))
        self.encoder = VQEncoder(in_channels, ch, narrow, num_res_blocks, z_channels, _NAMING)
        self.decoder = VQDecoder(out_channels, wide, num_res_blocks, z_channels, _NAMING)
        self.quantize = VectorQuantizer(codebook_size, codebook_embed_dim)
        self.quant_conv = nn.Conv2d(z_channels, codebook_embed_dim, 1)
        self.post_quant_conv = nn.Conv2d(codebook_embed_dim, z_channels, 1)

    @property
    def downsampling(self) -> int:
        """Pixels per token along one side."""
        return 2 ** (len(self.config.encoder_ch_mult) - 1)

    def encode_latents(self, pixels_BCYX: Tensor) -> Tensor:
        """Encode pixels in [-1, 1] to unit-norm latents `[B, E, R, G]` before quantization."""
        Y, X = pixels_BCYX.shape[-2:]
        if Y % self.downsampling or X % self.downsampling:
            raise ValueError(f"pixels must have sides divisible by {self.downsampling}, got {Y}x{X}")
        return F.normalize(self.quant_conv(self.encoder(pixels_BCYX)), dim=1)

    @apply_forward_hook  # lets CPU offload load the weights
    def encode(self, pixels_BCYX: Tensor) -> Tensor:
        """Encode pixels `[B, 3, Y, X]` in [-1, 1] to token indices `[B, R, G]` int64."""
        cosines = self.quantize.cosines(self.encode_latents(pixels_BCYX))
        indices = cosines.argmax(-1)  # selects NaN if there is one
        bad = ~cosines.gather(-1, indices[..., None])[..., 0].isfinite()
        if bad.any():
            image, row, column = bad.nonzero()[0].tolist()
            B, R, G = bad.shape
            raise NonFinitePixelsError(
                f"the image tokenizer found no nearest code, first in image {image + 1} of {B} at token row {row}, column "
                f"{column} of {R} x {G}: its weights or the pixels hold NaN. Check the checkpoint's vqvae, or run it in float32"
            )
        return indices

    def decode_latents(self, z_BERG: Tensor) -> Tensor:
        """Decode embeddings `[B, E, R, G]` to pixels `[B, 3, Y, X]`, about [-1, 1]."""
        return self.decoder(self.post_quant_conv(z_BERG.to(self.post_quant_conv.weight.dtype)))

    @apply_forward_hook
    def decode(self, indices: Tensor) -> Tensor:
        """Decode indices `[B, R, G]`, or `[B, N]` of a square grid, to pixels `[B, 3, Y, X]`, about [-1, 1]."""
        if indices.dim() == 2:
            side = math.isqrt(indices.shape[1])
            if side * side != indices.shape[1]:
                raise ValueError(f"flat indices must fill a square grid, got {indices.shape[1]} per row; pass [B, R, G]")
            indices = indices.view(-1, side, side)
        return self.decode_latents(self.quantize.lookup(indices))

    def forward(self, sample: Tensor) -> Tensor:
        """Reconstruct pixels `[B, 3, Y, X]` in [-1, 1] through the codebook."""
        return self.decode(self.encode(sample))
