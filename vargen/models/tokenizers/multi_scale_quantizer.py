"""The quantizer of VAR's image tokenizer: a latent map to codes of all scales, and the sum that they are looked up to.

Source: Tian et al. 2024, "Visual Autoregressive Modeling" (VAR), section 3.2, algorithms 1 and 2. The codes of scale k, looked
up, enlarged to the latent's size and passed through a convolution phi, correct what the scales before have left. Parameter
names are the official ones.

Shape suffixes: B batch, C latent channels (the width of a code), R/G latent rows and columns, s side of a scale, N = s*s, S
scales, V codes.
"""

from __future__ import annotations

from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def phi_table(scales: int, shared: int) -> tuple[int, ...]:
    """Which of `shared` convolutions each of `scales` scales uses: the one whose tick is nearest the scale's place in [0, 1].

    The ticks are spaced evenly from 1/12 to 11/12 for four, from 1/(2n) to 1 - 1/(2n) for another number n. With ten scales,
    the third and the eighth lie midway between two ticks; the official code decides by rounding errors, which means the later
    tick. Exact fractions make the choice the same on every machine.
    """
    edge = Fraction(1, 12) if shared == 4 else Fraction(1, 2 * shared)
    ticks = [edge + (1 - 2 * edge) * Fraction(i, max(shared - 1, 1)) for i in range(shared)]
    places = [Fraction(k, max(scales - 1, 1)) for k in range(scales)]
    return tuple(min(range(shared), key=lambda i: (abs(ticks[i] - place), -i)) for place in places)


class Phi(nn.Conv2d):
    """Half the input, half its 3x3 convolution: repairs what enlarging has blurred."""

    def __init__(self, channels: int):
        super().__init__(channels, channels, 3, padding=1)

    def forward(self, h_BCRG: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(h_BCRG.dtype)
        return 0.5 * h_BCRG + 0.5 * F.conv2d(h_BCRG, self.weight.to(h_BCRG.dtype), bias, padding=1)


class MultiScaleQuantizer(nn.Module):
    """The codebook that all scales share, and the map between codes and latents: float32, whatever the weights are."""

    def __init__(
        self, scales: tuple[int, ...], codes: int, width: int, shared_phi: int, scale_codes: tuple[int, ...], gains: bool
    ):
        super().__init__()
        self.scales = scales
        self.scale_codes = scale_codes
        self.phi_of_scale = phi_table(len(scales), shared_phi)
        self.embedding = nn.Embedding(codes, width)
        self.quant_resi = nn.ModuleDict({"qresi_ls": nn.ModuleList(Phi(width) for _ in range(shared_phi))})
        self.register_buffer("ema_vocab_hit_SV", torch.zeros(len(scales), codes))
        if gains:
            self.register_buffer("gains", torch.ones(len(scales)))

    def codebook(self) -> Tensor:
        """`[V, C]` float32."""
        weight = self.embedding.weight
        if weight.is_meta:  # offloaded layer by layer: weights come only with their module's forward
            weight = self.embedding(torch.arange(len(weight)))
        return weight.float()

    def gain(self, k: int) -> Tensor | float:
        """What the codes of scale k are multiplied by: residuals shrink from scale to scale, codes need not."""
        return self.gains[k].float() if hasattr(self, "gains") else 1.0

    def shrink(self, rest_BCRG: Tensor, k: int) -> Tensor:
        """A map of the latent's size to scale k: `[B, C, s, s]`, each cell the mean of its area."""
        side = self.scales[k]
        return rest_BCRG if side == rest_BCRG.shape[-1] else F.interpolate(rest_BCRG, size=(side, side), mode="area")

    def nearest(self, z_BCss: Tensor, k: int) -> Tensor:
        """Indices `[B, s, s]` of the codes of scale k that are nearest to `z`."""
        z = z_BCss.float().movedim(1, -1) / self.gain(k)
        codes = self.codebook()[: self.scale_codes[k]]
        # argmin |z - c|^2, without the |z|^2 that all codes have in common; max finds it twice as fast as argmax on a CPU
        likeness = torch.addmm(codes.square().sum(-1) / -2, z.flatten(0, 2), codes.T)
        return likeness.max(-1).indices.view(z.shape[:-1])

    def enlarge(self, h_BCss: Tensor, k: int) -> Tensor:
        """Code vectors of scale k `[B, C, s, s]`, at the latent's size, through phi."""
        side = self.scales[-1]
        if h_BCss.shape[-1] != side:
            h_BCss = F.interpolate(h_BCss, size=(side, side), mode="bicubic")
        return self.quant_resi["qresi_ls"][self.phi_of_scale[k]](h_BCss)

    def lookup(self, tokens: Tensor, k: int) -> Tensor:
        """What tokens `[B, s, s]` of scale k add to the latent: float32 `[B, C, R, G]`."""
        return self.enlarge(self.embedding(tokens).float().movedim(-1, 1) * self.gain(k), k)

    def quantise(self, f_BCRG: Tensor) -> list[Tensor]:
        """Tokens int64 `[B, s, s]` of each scale: each scale takes the codes nearest to what the ones before have left."""
        rest, tokens = f_BCRG.float(), []
        for k in range(len(self.scales)):
            tokens.append(self.nearest(self.shrink(rest, k), k))
            rest = rest - self.lookup(tokens[-1], k)
        return tokens

    def input_of(self, f_hat_BCRG: Tensor, k: int) -> Tensor | None:
        """What a transformer is fed at scale k, `[B, N, C]`, where `f_hat` is the sum of those before; None behind the last."""
        if k == len(self.scales):
            return None
        return self.shrink(f_hat_BCRG, k).flatten(2).transpose(1, 2)
