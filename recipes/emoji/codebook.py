"""The codebook of an image tokenizer in training: kept in use by construction, with one code for each plain colour.

It follows the encoder by exponential moving averages (van den Oord et al. 2017, appendix A.1), here on the unit sphere: it
starts from spherical k-means on real latents, and codes that nothing chooses are moved to badly served latents.

Shape suffixes: N latents, B pictures, R/G latent rows and columns, E width of a code, V codes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.tokenizers.vq import VQModel


class Codebook:
    """Moving averages behind the codes: `sums [V, E]`, `counts [V]`. Codes and latents are of unit norm."""

    def __init__(self, model: VQModel | MultiScaleVQModel, decay: float):
        self.weight = model.quantize.embedding.weight
        self.decay = decay
        self.sums = self.weight.detach().clone()
        self.counts = torch.ones(len(self.weight), device=self.weight.device)

    def likeness(self, z_NE: Tensor, codes_VE: Tensor) -> Tensor:
        """`[N, V]`, greatest for the code that serves a latent best."""
        return z_NE @ codes_VE.T

    def miss(self, z_NE: Tensor, codes_VE: Tensor) -> Tensor:
        """`[N]`: how badly each latent is served by the best code."""
        return 1 - self.likeness(z_NE, codes_VE).amax(-1)

    def settle(self, sums: Tensor, counts: Tensor) -> Tensor:
        """The codes of cells with these sums and counts of latents."""
        return F.normalize(sums, dim=-1)

    @torch.no_grad()
    def centres(self, z_NE: Tensor, V: int, generator: torch.Generator, rounds: int = 8) -> Tensor:
        """k-means: `[V, E]`."""
        # Flat background gives thousands of equal latents: jitter lets their codes part instead of tying.
        picks = torch.randint(len(z_NE), (V,), generator=generator).to(z_NE.device)
        jitter = 1e-3 * torch.randn(V, z_NE.shape[1], generator=generator).to(z_NE.device)
        centres = self.settle(z_NE[picks] + jitter, torch.ones(V, device=z_NE.device))
        for _ in range(rounds):
            nearest = torch.cat([self.likeness(part, centres).max(-1).indices for part in z_NE.split(8192)])
            counts = torch.bincount(nearest, minlength=V)
            sums = torch.zeros_like(centres).index_add_(0, nearest, z_NE)
            spare = torch.randint(len(z_NE), (V,), generator=generator).to(z_NE.device)
            centres = self.settle(torch.where(counts[:, None] > 0, sums, z_NE[spare]), counts.clamp_min(1))
        return centres

    @torch.no_grad()
    def fit(self, z_NE: Tensor, generator: torch.Generator) -> None:
        """Start from the centres of these latents."""
        self.weight.copy_(self.centres(z_NE, len(self.weight), generator))
        self.sums.copy_(self.weight)
        self.counts.fill_(1.0)

    @torch.no_grad()
    def update(self, z_NE: Tensor, indices_N: Tensor) -> None:
        V = len(self.weight)
        counts = torch.bincount(indices_N, minlength=V).float()
        sums = torch.zeros_like(self.sums).index_add_(0, indices_N, z_NE)
        self.counts.lerp_(counts, 1 - self.decay)
        self.sums.lerp_(sums, 1 - self.decay)
        self.weight.copy_(self.settle(self.sums, self.counts))

    @torch.no_grad()
    def revive(
        self, z_NE: Tensor, generator: torch.Generator, threshold: float = 0.03, first: int = 0, last: int | None = None
    ) -> int:
        """Move those of the codes `first` to `last` that nearly nothing chooses to latents that the codes up to `last` serve
        badly; returns how many."""
        dead = first + (self.counts[first:last] < threshold).nonzero()[:, 0]
        if len(dead):
            miss = self.miss(z_NE, self.weight[:last]).clamp_min(1e-6)
            picks = torch.multinomial(miss.cpu(), min(len(dead), len(z_NE)), generator=generator).to(z_NE.device)
            dead = dead[: len(picks)]
            self.weight[dead] = z_NE[picks]
            self.sums[dead] = z_NE[picks] * 0.1
            self.counts[dead] = 0.1
        return len(dead)


def quantise_together(model: VQModel, z_BERG: Tensor, colours_BRG: Tensor) -> Tensor:
    """Indices of the nearest codes, where all plain patches of one colour take the code nearest to the mean of their latents.

    A latent sees more of the picture than its patch, so by itself plain white gets a hundred codes, which say nothing to an eye
    and which a generator has to guess token by token. Trained towards one code for each colour, the encoder finds it alone.
    """
    indices = model.quantize.nearest(z_BERG)
    plain = colours_BRG >= 0
    if not plain.any():
        return indices
    _, group = colours_BRG[plain].unique(return_inverse=True)
    z_NE = z_BERG.detach().movedim(1, -1)[plain]
    sums = z_NE.new_zeros(int(group.max()) + 1, z_NE.shape[1]).index_add_(0, group, z_NE)
    shared = model.quantize.nearest(F.normalize(sums, dim=-1).T[None, :, :, None]).flatten()
    indices = indices.clone()
    indices[plain] = shared[group]
    return indices
