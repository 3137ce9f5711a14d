"""Distances between two sets of images, computed on their features.

Shape suffixes: N, M images of the two sets, D feature dimensions.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vargen.evaluation.reference_statistics import Statistics

logger = logging.getLogger("vargen")

USUAL = 2048  # images; with fewer, the bias of FID exceeds the differences of interest
_CHUNK = 512  # rows of a distance matrix computed at once


def frechet_distance(one: Statistics, other: Statistics) -> float:
    """|mu1 - mu2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)): FID if the features are Inception's (Heusel et al. 2017, equation 6).

    Raises:
        ValueError: the dimensions differ, or a set has no more images than dimensions: its covariance would be singular, and
            the distance would mostly reflect the number of images.
    """
    if one.dimensions != other.dimensions:
        raise ValueError(f"features must be of the same extractor, got {one.dimensions} and {other.dimensions} dimensions")
    for side in (one, other):
        if side.count is not None and side.count <= side.dimensions:
            raise ValueError(
                f"{side.count} pictures have a covariance of rank {side.count - 1} in {side.dimensions} dimensions: a Frechet "
                f"distance needs more than {side.dimensions} pictures, and {USUAL} or more to be worth reporting"
            )
        if side.count is not None and side.count < USUAL:
            logger.warning("a Frechet distance of %d pictures is biased upwards; %d or more are usual", side.count, USUAL)
    return _frechet(one.mean, one.covariance, other.mean, other.covariance)


def _frechet(mean1: Tensor, covariance1: Tensor, mean2: Tensor, covariance2: Tensor) -> float:
    # tr (S1 S2)^(1/2) is the sum of the square roots of the eigenvalues of S1^(1/2) S2 S1^(1/2), which is symmetric.
    values, vectors = torch.linalg.eigh(covariance1.double())
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    between = torch.linalg.eigvalsh(root @ covariance2.double() @ root).clamp_min(0).sqrt().sum()
    distance = (mean1 - mean2).double().square().sum() + covariance1.trace() + covariance2.trace() - 2 * between
    return max(0.0, float(distance))


def frechet_error(features: Tensor, reference: Statistics, repeats: int = 12, seed: int = 0) -> float | None:
    """Standard error of the Frechet distance of features `[N, D]` to `reference`, whose own sampling error is ignored.

    A delete-half jackknife (Shao and Wu 1989): the standard deviation of the distances of random halves estimates that of the
    whole set; the bias common to the halves cancels. None if half of the images are no more than the dimensions.
    """
    half = len(features) // 2
    if half <= features.shape[1] + 1:
        return None
    generator = torch.Generator().manual_seed(seed)
    distances = []
    for _ in range(repeats):
        part = Statistics.of(features[torch.randperm(len(features), generator=generator)[:half]], keep=False)
        distances.append(_frechet(part.mean, part.covariance, reference.mean, reference.covariance))
    return float(torch.tensor(distances, dtype=torch.float64).std())


@dataclass
class KernelDistance:
    """KID: `mean` over subsets of `subset` images, their standard deviation, and the 95 % interval."""

    mean: float
    std: float
    interval: tuple[float, float]
    subset: int
    subsets: int


def kernel_distance(one: Tensor, other: Tensor, subsets: int = 100, subset: int = 1000, seed: int = 0) -> KernelDistance:
    """KID (Binkowski et al. 2018): unbiased squared MMD with the kernel (x.y / D + 1)^3, averaged over random subsets.

    Args:
        one, other: features `[N, D]` and `[M, D]`.
        subset: images per subset; at most half of the smaller set, so that subsets differ, or all of it for a single subset.

    Raises:
        ValueError: the dimensions differ, or a set has fewer than two features (four for several subsets).
    """
    _check_pair(one, other)
    smaller = min(len(one), len(other))
    size = min(subset, smaller if subsets == 1 else smaller // 2)
    if size < 2:
        raise ValueError(f"KID needs at least {2 if subsets == 1 else 4} pictures in each set, got {len(one)} and {len(other)}")
    generator = torch.Generator().manual_seed(seed)
    values = []
    for _ in range(subsets):
        x = one[torch.randperm(len(one), generator=generator)[:size]].double()
        y = other[torch.randperm(len(other), generator=generator)[:size]].double()
        values.append(_unbiased_mmd2(_cubic(x, x), _cubic(y, y), _cubic(x, y)))
    found = torch.tensor(values, dtype=torch.float64)
    low, high = (float(found.quantile(share)) for share in (0.025, 0.975))
    deviation = float(found.std()) if subsets > 1 else 0.0
    return KernelDistance(float(found.mean()), deviation, (low, high), size, subsets)


def _cubic(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T / x.shape[1] + 1) ** 3


def _unbiased_mmd2(xx: Tensor, yy: Tensor, xy: Tensor) -> float:
    n, m = xy.shape
    within = (xx.sum() - xx.trace()) / (n * (n - 1)) + (yy.sum() - yy.trace()) / (m * (m - 1))
    return float(within - 2 * xy.mean())


def clip_mmd(one: Tensor, other: Tensor, sigma: float = 10.0, scale: float = 1000.0) -> float:
    """CMMD (Jayasumana et al. 2024): 1000 times the squared MMD of unit CLIP embeddings, Gaussian kernel of bandwidth 10.

    As published, the means include the kernel of each image with itself: biased by about 1 / N, and never negative.
    """
    _check_pair(one, other)
    gamma = 1 / (2 * sigma**2)

    def mean_kernel(x: Tensor, y: Tensor) -> float:
        parts = [torch.cdist(x[i : i + _CHUNK].double(), y.double(), compute_mode=_EXACT) for i in range(0, len(x), _CHUNK)]
        return sum(float((-gamma * part.square()).exp().sum()) for part in parts) / (len(x) * len(y))

    return scale * max(0.0, mean_kernel(one, one) + mean_kernel(other, other) - 2 * mean_kernel(one, other))


_EXACT = "donot_use_mm_for_euclid_dist"


def precision_recall(generated: Tensor, real: Tensor, k: int = 3) -> tuple[float, float]:
    """Fractions of generated images in the real manifold, and of real ones in the generated (Kynkaanniemi et al. 2019).

    The manifold of a set is the union of balls around its features `[N, D]`, each reaching to its k-th nearest neighbor.

    Raises:
        ValueError: the dimensions differ, or a set has k features or fewer.
    """
    _check_pair(generated, real)
    if min(len(generated), len(real)) <= k:
        raise ValueError(f"precision and recall need more than {k} pictures in each set, got {len(generated)} and {len(real)}")
    return _inside(generated, real, _radii(real, k)), _inside(real, generated, _radii(generated, k))


def _radii(features: Tensor, k: int) -> Tensor:
    """Return each feature's distance to its k-th nearest neighbor, not counting the feature itself."""
    parts = [
        _distances(features[i : i + _CHUNK], features).kthvalue(k + 1, dim=1).values for i in range(0, len(features), _CHUNK)
    ]
    return torch.cat(parts)


def _inside(points: Tensor, centres: Tensor, radii: Tensor) -> float:
    hits = [(_distances(points[i : i + _CHUNK], centres) <= radii).any(1) for i in range(0, len(points), _CHUNK)]
    return float(torch.cat(hits).double().mean())


def _distances(x: Tensor, y: Tensor) -> Tensor:
    """Euclidean distances by matrix products, in double precision: float32 would lose small distances to rounding."""
    return torch.cdist(x.double(), y.double())


def inception_score(logits: Tensor, splits: int = 10, seed: int = 2020) -> tuple[float, float]:
    """exp of the mean KL divergence of class probabilities from their mean (Salimans et al. 2016); mean, deviation.

    Args:
        logits: class scores `[N, classes]` as in the reference implementation: without bias, from FID's Inception.
        splits: random parts that are scored separately; ADM scores parts of 5,000, which is 10 of 50,000.

    Raises:
        ValueError: there are fewer images than splits.
    """
    if logits.dim() != 2 or len(logits) < splits:
        raise ValueError(f"the Inception Score needs class scores of at least {splits} pictures, got {list(logits.shape)}")
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed))
    scores = []
    for part in logits[order].double().tensor_split(splits):
        log_p = part.log_softmax(1)
        mean = log_p.logsumexp(0, keepdim=True) - math.log(len(part))
        scores.append(math.exp(float((log_p.exp() * (log_p - mean)).sum(1).mean())))
    found = torch.tensor(scores, dtype=torch.float64)
    return float(found.mean()), float(found.std(correction=0))


def _check_pair(one: Tensor, other: Tensor) -> None:
    if one.dim() != 2 or other.dim() != 2 or one.shape[1] != other.shape[1] or not len(one) or not len(other):
        raise ValueError(
            f"features must be [N, D] and [M, D] of the same extractor, got {list(one.shape)} and {list(other.shape)}"
        )
