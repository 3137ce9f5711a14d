"""The multi-scale residual quantizer of VAR's image tokenizer: latents to tokens of all scales, and back to their sum.

Source: Tian et al. 2024, "Visual Autoregressive Modeling" (VAR), section 3.2, algorithms 1 and 2. The embeddings of scale k,
upsampled to the latent's size and passed through a convolution phi, correct the residual of the earlier scales. Parameter
names are the official ones.

Shape suffixes: B batch, C latent channels (the code dimension), R/G latent rows and columns, s side of a scale, N = s*s, S
scales, V codes.
"""

from __future__ import annotations

from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vargen.models.offloading import read_weight


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
        self.scales = scales
        self.scale_codes = scale_codes
        self.phi_of_scale = assign_phi(len(scales), shared_phi)
        self.embedding = nn.Embedding(codes, width)
        self.quant_resi = nn.ModuleDict({"qresi_ls": nn.ModuleList(Phi(width) for _ in range(shared_phi))})
        self.register_buffer("ema_vocab_hit_SV", torch.zeros(len(scales), codes))
        if gains:
            self.register_buffer("gains", torch.ones(len(scales)))

    def codebook(self) -> Tensor:
        """`[V, C]` float32."""
        weight = self.embedding.weight
        if weight.is_meta:  # offloaded layer by layer: weights are available only in forward
            weight = self.embedding(torch.arange(len(weight)))
        return weight.float()

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
        """Contribution of tokens `[B, s, s]` of scale k to the latent, float32 `[B, C, R, G]`."""
        return self.upsample(self.embedding(tokens).float().movedim(-1, 1) * self.gain(k), k)

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
