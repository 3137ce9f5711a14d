"""The codebook of a `MultiScaleVQModel` in training: a differentiable sum over scales, and codes that follow the latents.

Codes follow by exponential moving averages (van den Oord et al. 2017, appendix A.1), start from k-means, and are moved to
latents far from all codes if unused. Before a lookup, the residual of a latent is divided by its scale's running root mean
square: residuals shrink from scale to scale, and this way one codebook serves all scales.

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

_KMEANS_SAMPLES = 16384  # per scale


@dataclass
class QuantizedScales:
    """A quantized latent, by scale.

    Attributes:
        tokens: `[B, s, s]`. vectors: `[N, C]` that were looked up, divided by the gain. sums: `[B, C, R, G]`, up to each scale.
    """

    tokens: list[Tensor]
    vectors: list[Tensor]
    sums: list[Tensor]

    def errors(self, f_BCRG: Tensor) -> Tensor:
        """Return the mean squared distance of each sum from the latent, `[S]`."""
        return torch.stack([F.mse_loss(f_hat, f_BCRG) for f_hat in self.sums])


def flatten_vectors(z_BCss: Tensor) -> Tensor:
    """Return the vectors `[N, C]` of a latent."""
    return z_BCss.movedim(1, -1).flatten(0, 2)


def quantize_scales(model: MultiScaleVQModel, f_BCRG: Tensor) -> QuantizedScales:
    """Quantize a latent scale by scale; only phi gets gradients."""
    quantize, rest = model.quantize, f_BCRG.detach().float()
    out = QuantizedScales([], [], [])
    f_hat: Tensor | float = 0.0
    for k in range(len(model.scales)):
        with torch.no_grad():
            z = quantize.downsample(rest, k)
            out.tokens.append(quantize.find_nearest(z, k))
            out.vectors.append(flatten_vectors(z) / quantize.gain(k))
        h = quantize.lookup(out.tokens[-1], k)
        rest = rest - h.detach()
        f_hat = f_hat + h
        out.sums.append(f_hat)
    return out


class ScaleCodebook(Codebook):
    """Codes shared by scales, of which the first scales use only the first ones; distances are Euclidean."""

    def __init__(self, model: MultiScaleVQModel, decay: float):
        super().__init__(model, decay)
        self.model = model

    def similarity(self, z_NE: Tensor, codes_VE: Tensor) -> Tensor:
        return torch.addmm(codes_VE.square().sum(-1) / -2, z_NE, codes_VE.T)

    def distance(self, z_NE: Tensor, codes_VE: Tensor) -> Tensor:
        return z_NE.square().sum(-1) - 2 * self.similarity(z_NE, codes_VE).amax(-1)

    def update_centroids(self, sums: Tensor, counts: Tensor) -> Tensor:
        return sums / counts[:, None].clamp_min(1e-12)

    def groups(self) -> list[tuple[int, int, list[int]]]:
        """Return (`first`, `last`, scales): codes `first` to `last` are new for these scales, which use all codes to `last`."""
        found, first = [], 0
        for last, scales in groupby(range(len(self.model.scales)), key=self.model.scale_codes.__getitem__):
            found.append((first, last, list(scales)))
            first = last
        return found

    @torch.no_grad()
    def fit_scales(self, f_BCRG: Tensor, generator: torch.Generator) -> None:
        """Set the codes by k-means, group by group: new codes of a group are fitted to the residuals of the earlier groups."""
        quantize, rest = self.model.quantize, f_BCRG.float()
        for first, last, scales in self.groups():
            passing, samples = rest, []
            for k in scales:  # within a group, vectors are subtracted without quantization: there are no codes yet
                z = quantize.downsample(passing, k)
                quantize.gains[k] = z.square().mean().sqrt()
                passing = passing - quantize.upsample(z, k)
                vectors = flatten_vectors(z) / quantize.gain(k)
                samples.append(vectors[torch.randint(len(vectors), (_KMEANS_SAMPLES,), generator=generator)])
            self.weight[first:last] = self.kmeans(torch.cat(samples), last - first, generator)
            for k in scales:
                rest = rest - quantize.lookup(quantize.find_nearest(quantize.downsample(rest, k), k), k)
        self.sums.copy_(self.weight)
        self.counts.fill_(1.0)

    @torch.no_grad()
    def ema_update(self, quantized: QuantizedScales) -> None:
        """Move codes and gains toward these latents."""
        gains = self.model.quantize.gains
        for k, vectors in enumerate(quantized.vectors):
            gains[k].mul_(vectors.square().mean().sqrt() ** (1 - self.decay))
        self.update(torch.cat(quantized.vectors), torch.cat([tokens.flatten() for tokens in quantized.tokens]))

    def replace_dead_codes_by_scale(self, quantized: QuantizedScales, generator: torch.Generator) -> int:
        """Move unused codes to latents of their own scales that are far from all codes; returns the number moved."""
        return sum(
            self.replace_dead_codes(torch.cat([quantized.vectors[k] for k in scales]), generator, first=first, last=last)
            for first, last, scales in self.groups()
        )


class TokenPerturbation:
    """Replaces tokens by similar ones, so that a decoder learns to tolerate errors of a generator."""

    @torch.no_grad()
    def __init__(self, model: MultiScaleVQModel, near: int):
        self.model = model
        codes = model.codebook
        self.near = {}
        for count in set(model.scale_codes):
            distance = torch.cdist(codes[:count], codes[:count])
            # The first is the code itself; among few codes, only a few are near.
            self.near[count] = distance.topk(1 + min(near, max(1, count // 8)), largest=False).indices

    def __call__(
        self, tokens: list[Tensor], image_fraction: float, token_fraction: float, generator: torch.Generator
    ) -> list[Tensor]:
        """Replace `token_fraction` of the tokens in `image_fraction` of the images."""
        B, device = len(tokens[0]), tokens[0].device
        perturbed = torch.rand(B, 1, 1, generator=generator) < image_fraction
        out = []
        for k, of_scale in enumerate(tokens):
            table = self.near[self.model.scale_codes[k]]
            replaced = (torch.rand(of_scale.shape, generator=generator) < token_fraction) & perturbed
            other = torch.randint(table.shape[1], of_scale.shape, generator=generator).to(device)
            out.append(torch.where(replaced.to(device), table[of_scale, other], of_scale))
        return out
