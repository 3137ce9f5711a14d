"""The codebook of an image tokenizer in training, which stays in use by construction; flat patches; reconstruction losses.

The codebook follows the encoder by exponential moving averages (van den Oord et al. 2017, appendix A.1), here on the unit
sphere: it starts from spherical k-means on real latents, and unused codes are moved to latents far from all codes.

Shape suffixes: N latents, B images, R/G latent rows and columns, E width of a code, V codes, Y/X pixels.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.tokenizers.vq import VQModel


class Codebook:
    """Codes and the moving averages they are computed from: `sums [V, E]`, `counts [V]`. Codes and latents have unit norm."""

    def __init__(self, model: VQModel | MultiScaleVQModel, decay: float):
        self.weight = model.quantize.embedding.weight
        self.decay = decay
        self.sums = self.weight.detach().clone()
        self.counts = torch.ones(len(self.weight), device=self.weight.device)

    def similarity(self, z_NE: Tensor, codes_VE: Tensor) -> Tensor:
        """Return `[N, V]`, greatest for the code nearest to a latent."""
        return z_NE @ codes_VE.T

    def distance(self, z_NE: Tensor, codes_VE: Tensor) -> Tensor:
        """Return the distance of each latent to its nearest code, `[N]`."""
        return 1 - self.similarity(z_NE, codes_VE).amax(-1)

    def update_centroids(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return the codes of cells with these sums and counts of latents."""
        return F.normalize(sums, dim=-1)

    @torch.no_grad()
    def kmeans(self, z_NE: Tensor, V: int, generator: torch.Generator, rounds: int = 8) -> Tensor:
        """Return V centroids of the latents, `[V, E]`."""
        # Flat background gives thousands of equal latents: jitter separates their codes, which would tie otherwise.
        picks = torch.randint(len(z_NE), (V,), generator=generator).to(z_NE.device)
        jitter = 1e-3 * torch.randn(V, z_NE.shape[1], generator=generator).to(z_NE.device)
        centroids = self.update_centroids(z_NE[picks] + jitter, torch.ones(V, device=z_NE.device))
        for _ in range(rounds):
            nearest = torch.cat([self.similarity(part, centroids).max(-1).indices for part in z_NE.split(8192)])
            counts = torch.bincount(nearest, minlength=V)
            sums = torch.zeros_like(centroids).index_add_(0, nearest, z_NE)
            spare = torch.randint(len(z_NE), (V,), generator=generator).to(z_NE.device)
            centroids = self.update_centroids(torch.where(counts[:, None] > 0, sums, z_NE[spare]), counts.clamp_min(1))
        return centroids

    @torch.no_grad()
    def fit(self, z_NE: Tensor, generator: torch.Generator) -> None:
        """Set the codes to centroids of these latents."""
        self.weight.copy_(self.kmeans(z_NE, len(self.weight), generator))
        self.sums.copy_(self.weight)
        self.counts.fill_(1.0)

    @torch.no_grad()
    def update(self, z_NE: Tensor, indices_N: Tensor) -> None:
        """Move the codes toward the latents that were quantized to them."""
        V = len(self.weight)
        counts = torch.bincount(indices_N, minlength=V).float()
        sums = torch.zeros_like(self.sums).index_add_(0, indices_N, z_NE)
        self.counts.lerp_(counts, 1 - self.decay)
        self.sums.lerp_(sums, 1 - self.decay)
        self.weight.copy_(self.update_centroids(self.sums, self.counts))

    @torch.no_grad()
    def replace_dead_codes(
        self, z_NE: Tensor, generator: torch.Generator, threshold: float = 0.03, first: int = 0, last: int | None = None
    ) -> int:
        """Move codes that are almost unused to latents far from all codes; returns the number of codes moved.

        Args:
            threshold: codes with a lower count are moved.
            first, last: only codes in this range are moved; only codes up to `last` count as near.
        """
        dead = first + (self.counts[first:last] < threshold).nonzero()[:, 0]
        if len(dead):
            distance = self.distance(z_NE, self.weight[:last]).clamp_min(1e-6)
            picks = torch.multinomial(distance.cpu(), min(len(dead), len(z_NE)), generator=generator).to(z_NE.device)
            dead = dead[: len(picks)]
            self.weight[dead] = z_NE[picks]
            self.sums[dead] = z_NE[picks] * 0.1
            self.counts[dead] = 0.1
        return len(dead)


def flat_color_codes(pixels: Tensor, patch: int, step: int = 4, tolerance: int = 2) -> Tensor:
    """Find patches of one color.

    Args:
        pixels: float `[B, 3, Y, X]` in [-1, 1]. patch: side of a patch in pixels.
        step: levels of 256 that count as one color. tolerance: maximum difference of levels within a flat patch.

    Returns:
        int64 `[B, Y/patch, X/patch]`: a number for the color, -1 where the patch is not flat.
    """
    levels = (pixels.float() + 1) * 127.5
    high, low = F.max_pool2d(levels, patch), -F.max_pool2d(-levels, patch)
    red, green, blue = ((high + low) / 2).round().long().div(step, rounding_mode="floor").unbind(1)
    color = (red * 256 + green) * 256 + blue
    return torch.where(((high - low) <= tolerance + 0.5).all(1), color, -1)


def quantize_flat_patches_together(model: VQModel, z_BERG: Tensor, colors_BRG: Tensor) -> Tensor:
    """Return indices of the nearest codes; all flat patches of one color get the code nearest to the mean of their latents.

    A latent depends on more of the image than its patch, so otherwise plain white gets a hundred codes, which look alike but
    have to be predicted token by token. Trained toward one code per color, the encoder later finds it without this help.

    Args:
        colors_BRG: of `flat_color_codes`.
    """
    indices = model.quantize.find_nearest(z_BERG)
    flat = colors_BRG >= 0
    if not flat.any():
        return indices
    _, group = colors_BRG[flat].unique(return_inverse=True)
    z_NE = z_BERG.detach().movedim(1, -1)[flat]
    sums = z_NE.new_zeros(int(group.max()) + 1, z_NE.shape[1]).index_add_(0, group, z_NE)
    shared = model.quantize.find_nearest(F.normalize(sums, dim=-1).T[None, :, :, None]).flatten()
    indices = indices.clone()
    indices[flat] = shared[group]
    return indices


class ReconstructionWeights(Protocol):
    """The fields of a config that weight the terms of `reconstruction_loss`."""

    @property
    def l1_weight(self) -> float: ...
    @property
    def mse_weight(self) -> float: ...
    @property
    def gradient_weight(self) -> float: ...
    @property
    def color_weight(self) -> float: ...


def reconstruction_loss(predicted: Tensor, target: Tensor, config: ReconstructionWeights, patch: int) -> Tensor:
    """Return L1 and MSE on pixels, L1 on their differences (edges), and L1 and MSE on the mean color of each patch.

    The mean color also enters the pixel terms, but a token can always represent it, and without its own weight early
    reconstructions were pale.
    """
    error = predicted - target
    gradient = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    color = F.avg_pool2d(error, patch)
    return (
        config.l1_weight * error.abs().mean()
        + config.mse_weight * error.square().mean()
        + config.gradient_weight * gradient
        + config.color_weight * (color.abs().mean() + color.square().mean())
    )
