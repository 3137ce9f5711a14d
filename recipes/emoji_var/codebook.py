"""The codebook of a `MultiScaleVQModel` in training: a sum over scales with gradients, and codes that follow the latents.

Codes follow by exponential moving averages (van den Oord et al. 2017, appendix A.1), start from k-means and are moved to badly
served latents where nothing chooses them. Before a lookup, what is left of a latent is divided by its scale's running root mean
square: residuals shrink from scale to scale, and so one codebook serves them all.

Shape suffixes: B batch, C latent channels, R/G latent rows and columns, S scales, N vectors, V codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.emoji.codebook import Codebook
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel

_KMEANS_SAMPLES = 16384  # of each scale


@dataclass
class Quantised:
    """By scale: `tokens` `[B, s, s]`, `vectors` `[N, C]` that were looked up (over the gain), and `sums` `[B, C, R, G]`."""

    tokens: list[Tensor]
    vectors: list[Tensor]
    sums: list[Tensor]

    def errors(self, f_BCRG: Tensor) -> Tensor:
        """`[S]`: mean squared distance of each sum from the latent."""
        return torch.stack([F.mse_loss(f_hat, f_BCRG) for f_hat in self.sums])


def flat(z_BCss: Tensor) -> Tensor:
    return z_BCss.movedim(1, -1).flatten(0, 2)


def quantise(model: MultiScaleVQModel, f_BCRG: Tensor) -> Quantised:
    """Sum the scales up; gradients reach phi alone."""
    quantize, rest = model.quantize, f_BCRG.detach().float()
    out = Quantised([], [], [])
    f_hat: Tensor | float = 0.0
    for k in range(len(model.scales)):
        with torch.no_grad():
            z = quantize.shrink(rest, k)
            out.tokens.append(quantize.nearest(z, k))
            out.vectors.append(flat(z) / quantize.gain(k))
        h = quantize.lookup(out.tokens[-1], k)
        rest = rest - h.detach()
        f_hat = f_hat + h
        out.sums.append(f_hat)
    return out


class ScaleCodebook(Codebook):
    """Moving averages behind codes that scales share, the first scales only the first ones; nearness is Euclidean."""

    def __init__(self, model: MultiScaleVQModel, decay: float):
        super().__init__(model, decay)
        self.model = model

    def likeness(self, z_NE: Tensor, codes_VE: Tensor) -> Tensor:
        return torch.addmm(codes_VE.square().sum(-1) / -2, z_NE, codes_VE.T)

    def miss(self, z_NE: Tensor, codes_VE: Tensor) -> Tensor:
        return z_NE.square().sum(-1) - 2 * self.likeness(z_NE, codes_VE).amax(-1)

    def settle(self, sums: Tensor, counts: Tensor) -> Tensor:
        return sums / counts[:, None].clamp_min(1e-12)

    def groups(self) -> list[tuple[int, int, list[int]]]:
        """Codes `first` to `last`, and the scales for which `last` is the end of theirs."""
        found, first = [], 0
        for last, scales in groupby(range(len(self.model.scales)), key=self.model.scale_codes.__getitem__):
            found.append((first, last, list(scales)))
            first = last
        return found

    @torch.no_grad()
    def fit_scales(self, f_BCRG: Tensor, generator: torch.Generator) -> None:
        """k-means, scale after scale: the codes that a scale adds are fitted to what the scales before it leave."""
        quantize, rest = self.model.quantize, f_BCRG.float()
        for first, last, scales in self.groups():
            passing, samples = rest, []
            for k in scales:  # between scales of one group the vectors pass unquantised: their codes are not there yet
                z = quantize.shrink(passing, k)
                quantize.gains[k] = z.square().mean().sqrt()
                passing = passing - quantize.enlarge(z, k)
                vectors = flat(z) / quantize.gain(k)
                samples.append(vectors[torch.randint(len(vectors), (_KMEANS_SAMPLES,), generator=generator)])
            self.weight[first:last] = self.centres(torch.cat(samples), last - first, generator)
            for k in scales:
                rest = rest - quantize.lookup(quantize.nearest(quantize.shrink(rest, k), k), k)
        self.sums.copy_(self.weight)
        self.counts.fill_(1.0)

    @torch.no_grad()
    def follow(self, quantised: Quantised) -> None:
        """Move codes, and gains, a little towards these."""
        gains = self.model.quantize.gains
        for k, vectors in enumerate(quantised.vectors):
            gains[k].mul_(vectors.square().mean().sqrt() ** (1 - self.decay))
        self.update(torch.cat(quantised.vectors), torch.cat([tokens.flatten() for tokens in quantised.tokens]))

    def revive_groups(self, quantised: Quantised, generator: torch.Generator) -> int:
        """Move idle codes to badly served latents of the scales for which they were meant."""
        return sum(
            self.revive(torch.cat([quantised.vectors[k] for k in scales]), generator, first=first, last=last)
            for first, last, scales in self.groups()
        )


class Perturbation:
    """Replaces tokens by others near them: what a decoder should forgive, for a generator will err."""

    @torch.no_grad()
    def __init__(self, model: MultiScaleVQModel, near: int):
        self.model = model
        codes = model.codebook
        self.near = {}
        for count in set(model.scale_codes):
            distance = torch.cdist(codes[:count], codes[:count])
            # The first is the code itself; among few codes, only a few are near.
            self.near[count] = distance.topk(1 + min(near, max(1, count // 8)), largest=False).indices

    def __call__(self, tokens: list[Tensor], pictures: float, share: float, generator: torch.Generator) -> list[Tensor]:
        """Tokens of which, in a share `pictures` of the batch, a share is replaced."""
        B, device = len(tokens[0]), tokens[0].device
        chosen = torch.rand(B, 1, 1, generator=generator) < pictures
        out = []
        for k, of_scale in enumerate(tokens):
            table = self.near[self.model.scale_codes[k]]
            hit = (torch.rand(of_scale.shape, generator=generator) < share) & chosen
            other = torch.randint(table.shape[1], of_scale.shape, generator=generator).to(device)
            out.append(torch.where(hit.to(device), table[of_scale, other], of_scale))
        return out
