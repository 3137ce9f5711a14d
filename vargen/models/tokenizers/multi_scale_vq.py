"""The multi-scale image tokenizer of VAR: encodes pixels to one token grid per scale, coarse to fine, and decodes them.

Source: Tian et al. 2024, "Visual Autoregressive Modeling" (VAR), section 3.2, algorithms 1 and 2. The latent is a sum over
scales: the embeddings of scale k, upsampled to the latent's size and passed through a convolution phi, correct the residual of
the earlier scales. Parameter names are the official ones, so an official state dict loads strictly.

Shape suffixes: B batch, C latent channels (the code dimension), Y/X pixel rows and columns, R/G latent rows and columns,
s side of a scale, N = s*s, V codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor, nn

from vargen.models.storage import ModelMixin, QuantizedStorageMixin, read_weight  # noqa: F401
from vargen.models.tokenizers.blocks import (
    HEAD_WIDTH,
    NORM_GROUPS,
    HybridDecoder,
    NormalizedEncoder,
    VQDecoder,
    VQEncoder,
    VQParameterNames,
)

SCALES_256 = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
SCALES_512 = (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)
_NAMING = VQParameterNames("down", "up", "block", ("block_1", "attn_1", "block_2"), fused=True, finest_first=True)


def assign_phi(scales: int, shared: int) -> tuple[int, ...]:
    """Return which of `shared` convolutions each scale uses: the one whose tick is nearest to the scale's position in [0, 1].

    Ticks are evenly spaced, from 1/12 to 11/12 for four convolutions and from 1/(2n) to 1 - 1/(2n) for any other number n. With
    ten scales, the third and the eighth are midway between two ticks. The official code decides such ties by rounding errors,
    which select the later tick. Exact fractions make the choice the same on every machine.
    """
    edge = Fraction(1, 12) if shared == 4 else Fraction(1, 2 * shared)
    ticks = [edge + (1 - 2 * edge) * Fraction(i, max(shared - 1, 1)) for i in range(shared)]
    places = [Fraction(k, max(scales - 1, 1)) for k in range(scales)]
    return tuple(min(range(shared), key=lambda i: (abs(ticks[i] - place), -i)) for place in places)


class Phi(nn.Conv2d):
    """Mean of the input and its 3x3 convolution, which compensates for the blur of upsampling."""

    def __init__(self, channels: int):
        super().__init__(channels, channels, 3, padding=1)

    def forward(self, h_BCRG: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(h_BCRG.dtype)
        return 0.5 * h_BCRG + 0.5 * F.conv2d(h_BCRG, self.weight.to(h_BCRG.dtype), bias, padding=1)


class MultiScaleQuantizer(nn.Module):
    """The codebook shared by all scales, and the mapping between tokens and latents, in float32 for any weight dtype."""

    def __init__(
        self, scales: tuple[int, ...], codes: int, width: int, shared_phi: int, scale_codes: tuple[int, ...], gains: bool
    ):
        super().__init__()
        self.scales, self.scale_codes = scales, scale_codes
        self.phi_of_scale = assign_phi(len(scales), shared_phi)
        self.embedding = nn.Embedding(codes, width)
        self.quant_resi = nn.ModuleDict({"qresi_ls": nn.ModuleList(Phi(width) for _ in range(shared_phi))})
        self.register_buffer("ema_vocab_hit_SV", torch.zeros(len(scales), codes))
        if gains:
            self.register_buffer("gains", torch.ones(len(scales)))

    @property
    def scale_tokens(self) -> tuple[int, ...]:
        """Number of tokens of each scale."""
        return tuple(side * side for side in self.scales)

    def codebook(self) -> Tensor:
        """`[V, C]` float32."""
        return read_weight(self.embedding).float()

    def gain(self, k: int) -> Tensor | float:
        """Factor of the embeddings of scale k. Residuals decrease from scale to scale, while the codes are shared."""
        return read_weight(self, "gains")[k].float() if hasattr(self, "gains") else 1.0

    def downsample(self, rest_BCRG: Tensor, k: int) -> Tensor:
        """Downsample a latent-sized map to scale k, `[B, C, s, s]`, by the mean over the area of each cell."""
        side = self.scales[k]
        return rest_BCRG if side == rest_BCRG.shape[-1] else F.interpolate(rest_BCRG, size=(side, side), mode="area")

    def find_nearest(self, z_BCss: Tensor, k: int) -> Tensor:
        """Indices `[B, s, s]` of the codes nearest to `z` at scale k."""
        z = z_BCss.float().movedim(1, -1) / self.gain(k)
        codes = self.codebook()[: self.scale_codes[k]]
        # argmin |z - c|^2 without the constant |z|^2; on a CPU, max is twice as fast as argmax
        likeness = torch.addmm(codes.square().sum(-1) / -2, z.flatten(0, 2), codes.T)
        return likeness.max(-1).indices.view(z.shape[:-1])

    def upsample(self, h_BCss: Tensor, k: int) -> Tensor:
        """Upsample embeddings of scale k, `[B, C, s, s]`, to the latent's size, and apply phi."""
        side = self.scales[-1]
        if h_BCss.shape[-1] != side:
            h_BCss = F.interpolate(h_BCss, size=(side, side), mode="bicubic")
        return self.quant_resi["qresi_ls"][self.phi_of_scale[k]](h_BCss)

    def lookup(self, tokens: Tensor, k: int) -> Tensor:
        """Contribution of tokens `[B, s, s]` or `[B, s*s]` of scale k to the latent, float32 `[B, C, R, G]`."""
        tokens = tokens.reshape(-1, self.scales[k], self.scales[k])
        return self.upsample(self.embedding(tokens).float().movedim(-1, 1) * self.gain(k), k)

    def spread(self, cells_B1ss: Tensor, k: int) -> Tensor:
        """The values of the cells of scale k for its tokens, `[B, n]`."""
        return cells_B1ss.flatten(1)

    def quantize(self, f_BCRG: Tensor) -> list[Tensor]:
        """Quantize latents to tokens int64 `[B, s, s]` per scale: each scale quantizes the residual of the earlier ones."""
        rest, tokens = f_BCRG.float(), []
        for k in range(len(self.scales)):
            tokens.append(self.find_nearest(self.downsample(rest, k), k))
            rest = rest - self.lookup(tokens[-1], k)
        return tokens

    def transformer_input(self, f_hat_BCRG: Tensor, k: int) -> Tensor | None:
        """Transformer input of scale k, `[B, N, C]`, from the sum `f_hat` of earlier scales; None after the last scale."""
        if k == len(self.scales):
            return None
        return self.downsample(f_hat_BCRG, k).flatten(2).transpose(1, 2)


class MultiScaleVQModel(QuantizedStorageMixin, ConfigMixin):
    """VAR's image tokenizer, and a small variant of it.

    Args:
        architecture: `"convolutional"`, as published; or `"hybrid"`, convolutions on patches and a transformer over the latent
            grid, which is several times cheaper.
        codebook_size, codebook_embed_dim: number of codes V, and dimension C of codes and latents.
        ch, ch_mult: base width and one multiplier per resolution, finest first; k+1 of them downsample by 2^k.
        num_res_blocks: residual blocks per encoder level (the decoder has one more).
        scales: sides of the token grids, coarse to fine; the last one is the latent's side.
        shared_phi: number of convolutions phi that the scales share.
        scale_codes: number of codes that each scale uses, the first ones of the codebook. Default: all.
        scale_gains: whether each scale has its own factor for embeddings.
        patch_size, transformer_blocks: only for the hybrid: patch size of its finest level, and blocks of the encoder's
            transformer (the decoder has one more), which replaces the convolutions of the last level.
    """

    _no_split_modules: ClassVar[list[str]] = ["ResnetBlock", "AttnBlock", "ConvBlock", "ViTBlock"]
    layer_prefixes: ClassVar[dict[str, tuple[str, ...]]] = {  # of both architectures
        "num_res_blocks": ("encoder.down.0.block.", "encoder.levels.0."),
        "transformer_blocks": ("encoder.trunk.blocks.",),
        "shared_phi": ("quantize.quant_resi.qresi_ls.",),
    }
    unquantized_suffixes: ClassVar[tuple[str, ...]] = ("quantize.embedding.weight", "ema_vocab_hit_SV")

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
        scales = tuple(scales)
        scale_codes = tuple(scale_codes) if scale_codes is not None else (codebook_size,) * len(scales)
        if not scales or scales[0] < 1 or any(a >= b for a, b in pairwise(scales)):
            raise ValueError(f"scales must grow from a first of at least 1, got {scales}")
        if len(scale_codes) != len(scales) or any(a > b for a, b in pairwise((1, *scale_codes, codebook_size))):
            allowed = f"{len(scales)} numbers from 1 to {codebook_size}, none falling"
            raise ValueError(f"scale_codes must be {allowed}, got {scale_codes}")
        if shared_phi < 1:
            raise ValueError(f"shared_phi must be at least 1, got {shared_phi}")
        if architecture not in ("convolutional", "hybrid"):
            raise ValueError(f"architecture must be convolutional or hybrid, got {architecture!r}")
        C, widths = codebook_embed_dim, tuple(ch * m for m in ch_mult)
        if architecture == "hybrid" and widths[-1] % HEAD_WIDTH:
            raise ValueError(f"ch * ch_mult[-1] must be a multiple of {HEAD_WIDTH} (attention heads), got {widths[-1]}")
        if architecture == "convolutional" and ch % NORM_GROUPS:
            raise ValueError(f"ch must be a multiple of {NORM_GROUPS} (group norm), got {ch}")
        self.scales, self.scale_codes = scales, scale_codes
        if architecture == "hybrid":
            grid = (patch_size, widths, scales[-1])
            self.encoder: nn.Module = NormalizedEncoder(*grid, num_res_blocks, transformer_blocks, C)
            self.decoder: nn.Module = HybridDecoder(*grid, num_res_blocks + 1, transformer_blocks + 1, C)
            self.quant_conv: nn.Module = nn.Identity()  # the hybrid has such layers at its own end and start
            self.post_quant_conv: nn.Module = nn.Identity()
        else:
            self.encoder = VQEncoder(3, ch, widths, num_res_blocks, C, _NAMING)
            self.decoder = VQDecoder(3, widths, num_res_blocks, C, _NAMING)
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
        """Width and height of images in pixels, determined by the last scale."""
        return self.scales[-1] * self.downsampling

    @property
    def tokens(self) -> int:
        """Number of tokens of an image, over all scales."""
        return sum(side * side for side in self.scales)

    @property
    def codebook(self) -> Tensor:
        """Codebook `[V, C]` float32, before the gains of scales."""
        return self.quantize.codebook()

    @apply_forward_hook
    def encode_latent(self, pixels_BCYX: Tensor) -> Tensor:
        """Encode pixels in [-1, 1] to latents `[B, C, R, G]` before quantization."""
        if tuple(pixels_BCYX.shape[-2:]) != (self.image_size, self.image_size):
            Y, X = pixels_BCYX.shape[-2:]
            raise ValueError(f"pixels must be {self.image_size}x{self.image_size} for scales {self.scales}, got {Y}x{X}")
        return self.quant_conv(self.encoder(pixels_BCYX))

    @apply_forward_hook  # lets CPU offload load the weights
    def encode(self, pixels_BCYX: Tensor) -> list[Tensor]:
        """Encode pixels `[B, 3, Y, X]` in [-1, 1] to tokens int64 `[B, s, s]` per scale."""
        return self.quantize.quantize(self.encode_latent(pixels_BCYX))

    def accumulate_latents(self, tokens: Sequence[Tensor]) -> Tensor:
        """Return the latent `[B, C, R, G]`, the sum over the given first scales or all scales."""
        if not 1 <= len(tokens) <= len(self.scales):
            raise ValueError(f"tokens must be of 1 to {len(self.scales)} scales, got {len(tokens)}")
        parts = (self.quantize.lookup(self._square(of_scale, k), k) for k, of_scale in enumerate(tokens))
        return reduce(torch.add, parts)

    def decode_unclamped(self, f_hat_BCRG: Tensor) -> Tensor:
        """Decode a latent to pixels `[B, 3, Y, X]`, which may be slightly outside [-1, 1]."""
        f_hat_BCRG = f_hat_BCRG.to(next(self.decoder.parameters()).dtype)
        if not torch.is_grad_enabled():  # convolutions keep the format; saves a tenth of the time on a CPU
            f_hat_BCRG = f_hat_BCRG.to(memory_format=torch.channels_last)
        return self.decoder(self.post_quant_conv(f_hat_BCRG))

    @apply_forward_hook
    def decode_latent(self, f_hat_BCRG: Tensor) -> Tensor:
        """Decode a latent, such as the sum of the first scales (a preview) or of all, to pixels `[B, 3, Y, X]` in [-1, 1]."""
        return self.decode_unclamped(f_hat_BCRG).clamp(-1, 1)

    @apply_forward_hook
    def decode(self, tokens: Sequence[Tensor]) -> Tensor:
        """Decode tokens per scale, `[B, s, s]` or `[B, s*s]`, to pixels `[B, 3, Y, X]` in [-1, 1].

        The first scales alone give a coarse image.
        """
        return self.decode_latent(self.accumulate_latents(tokens))

    def forward(self, sample: Tensor) -> Tensor:
        """Reconstruct pixels `[B, 3, Y, X]` in [-1, 1] through the codebook."""
        return self.decode(self.encode(sample))

    def _square(self, tokens: Tensor, k: int) -> Tensor:
        side = self.scales[k]
        if tokens.shape[1:] not in ((side, side), (side * side,)):
            shape = list(tokens.shape)
            raise ValueError(f"tokens of scale {k} must be [B, {side}, {side}] or [B, {side * side}], got {shape}")
        return tokens.view(-1, side, side)
