"""The metrics of a table, with their uncertainty, from images' measurements: speed, scores, distances, similarity.

KID, the Inception Score, precision and recall are torch-fidelity's. The Fréchet distance is computed here, because its error
bar needs it many times: symmetric eigenvalues take a fraction of the time that general ones take.

Shape suffixes: N, M images of the two sets, D feature dimensions.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vargen.compat import import_torch_fidelity
from vargen.eval.features import FeatureStatistics
from vargen.eval.measurement import SIMILARITY, Measurements
from vargen.eval.run_directory import Record

logger = logging.getLogger("vargen")

RECOMMENDED_IMAGES = 2048  # with fewer, the bias of FID exceeds the differences of interest
KID_SUBSET = 1000  # images per subset, as in the paper
_CHUNK = 512  # rows of a distance matrix computed at once
_Z = 1.959964  # a 95 % interval of a normal distribution, in standard deviations
Metrics = dict[str, Any]

# -- distances -------------------------------------------------------------------------------------------------------


def frechet_distance(one: FeatureStatistics, other: FeatureStatistics) -> float:
    """|mu1 - mu2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)): FID if the features are Inception's (Heusel et al. 2017, equation 6)."""
    if one.dimensions != other.dimensions:
        raise ValueError(f"features must be of the same extractor, got {one.dimensions} and {other.dimensions} dimensions")
    for side in (one, other):
        if (caveat := frechet_caveat(side)) is not None:
            logger.warning("%s", caveat)
    return _frechet(one.mean, one.covariance, other.mean, other.covariance)


def frechet_caveat(side: FeatureStatistics) -> str | None:
    """Return why a Frechet distance to statistics of few images is to be read with care; None if they are many enough."""
    if side.count is None or side.count >= RECOMMENDED_IMAGES:
        return None
    text = f"a Frechet distance of {side.count} images is biased upwards; use {RECOMMENDED_IMAGES}"
    if side.count > side.dimensions:
        return text
    rank = f"their covariance has rank {side.count - 1} of {side.dimensions}"
    return f"{text}: {rank}, so only distances of equally many images can be compared"


def _frechet(mean1: Tensor, covariance1: Tensor, mean2: Tensor, covariance2: Tensor) -> float:
    # tr (S1 S2)^(1/2) is the sum of the square roots of the eigenvalues of S1^(1/2) S2 S1^(1/2), which is symmetric.
    values, vectors = torch.linalg.eigh(covariance1.double())
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    between = torch.linalg.eigvalsh(root @ covariance2.double() @ root).clamp_min(0).sqrt().sum()
    distance = (mean1 - mean2).double().square().sum() + covariance1.trace() + covariance2.trace() - 2 * between
    return max(0.0, float(distance))


def frechet_standard_error(features_ND: Tensor, reference: FeatureStatistics, repeats: int = 12, seed: int = 0) -> float | None:
    """Standard error of the Frechet distance of features to `reference`, whose own sampling error is ignored.

    A delete-half jackknife (Shao and Wu 1989): the standard deviation of the distances of random halves estimates that of the
    whole set; the bias common to them cancels. None if half of the images are no more than the dimensions.
    """
    half = len(features_ND) // 2
    if half <= features_ND.shape[1] + 1:
        return None
    generator = torch.Generator().manual_seed(seed)
    distances = []
    for _ in range(repeats):
        chosen = torch.randperm(len(features_ND), generator=generator)[:half]
        part = FeatureStatistics.from_features(features_ND[chosen], keep=False)
        distances.append(_frechet(part.mean, part.covariance, reference.mean, reference.covariance))
    return float(torch.tensor(distances, dtype=torch.float64).std())


def kernel_inception_distance(one_ND: Tensor, other_MD: Tensor, subsets: int = 100, subset: int = KID_SUBSET) -> Metrics:
    """KID (Binkowski et al. 2018): mean and standard deviation over random subsets, by torch-fidelity.

    Args:
        subset: images per subset; at most half of the smaller set, so that subsets differ, or all of it for a single subset.

    Raises:
        ValueError: the dimensions differ, or a set has fewer than two features (four for several subsets).
        ImportError: torch-fidelity is not installed.
    """
    _check_pair(one_ND, other_MD)
    smaller = min(len(one_ND), len(other_MD))
    size = min(subset, smaller if subsets == 1 else smaller // 2)
    if size < 2:
        raise ValueError(f"KID needs at least {2 if subsets == 1 else 4} images in each set, got {smaller} in one")
    metric_kid = import_torch_fidelity("metric_kid")
    settings = {"kid_subsets": subsets, "kid_subset_size": size, "verbose": False}
    found = metric_kid.kid_features_to_metric(one_ND.double(), other_MD.double(), **settings)
    mean, std = (found[f"kernel_inception_distance_{name}"] for name in ("mean", "std"))
    return {"kid": mean, "kid_std": std, "kid_subset": size}


def precision_recall(generated_ND: Tensor, real_MD: Tensor, k: int = 3) -> Metrics:
    """Precision and recall by balls that reach to the k-th nearest neighbor (Kynkaanniemi et al. 2019), by torch-fidelity."""
    _check_pair(generated_ND, real_MD)
    if min(len(generated_ND), len(real_MD)) <= k:
        counts = f"{len(generated_ND)} and {len(real_MD)}"
        raise ValueError(f"precision and recall need more than {k} images in each set, got {counts}")
    metric_prc = import_torch_fidelity("metric_prc")
    # In double precision, because float32 would lose small distances to rounding; in blocks, because of the memory.
    settings = {"prc_neighborhood": k, "prc_batch_size": _CHUNK, "save_cpu_ram": True, "verbose": False}
    found = metric_prc.prc_features_to_metric(generated_ND.double(), real_MD.double(), **settings)
    return {name: found[name] for name in ("precision", "recall")}


def inception_score(logits: Tensor, splits: int = 10) -> Metrics:
    """Inception Score (Salimans et al. 2016): mean and standard deviation over random parts, by torch-fidelity.

    Args:
        logits: class scores `[N, classes]` as in the reference implementation: without bias, from FID's Inception.
        splits: parts that are scored separately; ADM scores parts of 5,000, which is 10 of 50,000.
    """
    if logits.dim() != 2 or len(logits) < splits:
        raise ValueError(f"the Inception Score needs class scores of at least {splits} images, got {list(logits.shape)}")
    return dict(import_torch_fidelity("metric_isc").isc_features_to_metric(logits, splits))


def cmmd(one_ND: Tensor, other_MD: Tensor, sigma: float = 10.0, scale: float = 1000.0) -> float:
    """CMMD (Jayasumana et al. 2024): 1000 times the squared MMD of unit CLIP embeddings, Gaussian kernel of bandwidth 10.

    As published, the means include the kernel of each image with itself: biased by about 1 / N, and never negative.
    """
    _check_pair(one_ND, other_MD)
    gamma = 1 / (2 * sigma**2)

    def mean_kernel(x: Tensor, y: Tensor) -> float:
        exact = "donot_use_mm_for_euclid_dist"
        parts = [torch.cdist(part.double(), y.double(), compute_mode=exact) for part in x.split(_CHUNK)]
        return sum(float((-gamma * part.square()).exp().sum()) for part in parts) / (len(x) * len(y))

    return scale * max(0.0, mean_kernel(one_ND, one_ND) + mean_kernel(other_MD, other_MD) - 2 * mean_kernel(one_ND, other_MD))


def _check_pair(one: Tensor, other: Tensor) -> None:
    if one.dim() != 2 or other.dim() != 2 or one.shape[1] != other.shape[1] or not len(one) or not len(other):
        raise ValueError(
            f"features must be [N, D] and [M, D] of the same extractor, got {list(one.shape)} and {list(other.shape)}"
        )


# -- a row of the table ----------------------------------------------------------------------------------------------


@dataclass
class MethodMetrics:
    """Metrics of one method, or of one folder of images. A metric that could not be computed is missing; `notes` say why.

    Attributes:
        num_images: number of images measured. requested_images: number of images of the run.
        speed: seconds, speedup, tokens per pass, relaxation, and `batch1`, those of images generated alone; empty for images
            from other sources.
        scores: by scorer, mean and half-width of the 95 % interval, also of the paired difference to the baseline.
        distances: to the reference. similarity: to the baseline's images of the same prompts and seeds.
    """

    name: str
    kind: str = ""
    num_images: int = 0
    requested_images: int = 0
    speed: Metrics = field(default_factory=dict)
    scores: dict[str, Metrics] = field(default_factory=dict)
    distances: Metrics = field(default_factory=dict)
    similarity: Metrics = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def mean_with_ci(values: Tensor) -> Metrics:
    """Return the mean and the half-width of its 95 % interval by the normal approximation, which is None for a single value."""
    half = float(_Z * values.double().std() / len(values) ** 0.5) if len(values) > 1 else None
    return {"mean": float(values.double().mean()), "ci95_half_width": half, "num_images": len(values)}


def summarize_speed(records: Sequence[Record], baseline: Mapping[int, Record]) -> Metrics:
    """Compute the speed metrics of a method from its manifest records, and the baseline's records by index."""
    seconds = [record["seconds"] for record in records]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    pairs = [(baseline[r["index"]]["seconds"], r["seconds"]) for r in records if r["index"] in baseline and r["seconds"] > 0]
    passes = sum(record["active_passes"] for record in records)
    return {
        "seconds": middle,
        "seconds_quartiles": [low, high],
        "speedup": statistics.median(slow / fast for slow, fast in pairs) if pairs else None,
        "tokens_per_pass": sum(record["tokens"] for record in records) / passes if passes else None,
        "passes": statistics.mean(record["passes"] for record in records),
        "relaxation": statistics.mean(record["relaxation"] for record in records),
        "batch": max(record["batch"] for record in records),
        "threads": sorted({record["threads"] for record in records}),
    }


def summarize_scores(columns: Mapping[str, Tensor], baseline: Mapping[str, Tensor] | None) -> Metrics:
    """Return the mean of `scores`, and of their differences to the baseline's scores at the same `indices`."""
    found = mean_with_ci(columns["scores"])
    if baseline is not None:
        of_baseline = dict(zip(baseline["indices"].tolist(), baseline["scores"].tolist(), strict=True))
        scores = zip(columns["indices"].tolist(), columns["scores"].tolist(), strict=True)
        differences = [score - of_baseline[index] for index, score in scores if index in of_baseline]
        if differences:
            found["difference_to_baseline"] = mean_with_ci(torch.tensor(differences))
    return found


def compute_distances(
    features_ND: Tensor, logits: Tensor | None, reference: FeatureStatistics | None, normalized: bool
) -> tuple[Metrics, list[str]]:
    """Return distances of features to `reference`, and notes on those that are missing or unreliable."""
    found: Metrics = {}
    notes: list[str] = []
    if logits is not None and len(logits) >= 10:
        try:
            found |= inception_score(logits)
        except ImportError as missing:
            notes.append(f"no Inception Score: {missing}")
    if reference is None:
        return found, [*notes, "no distances to real images: no reference is given"]
    if len(features_ND) > 1:
        own = FeatureStatistics.from_features(features_ND, keep=False)
        found["frechet"] = _frechet(own.mean, own.covariance, reference.mean, reference.covariance)
        error = frechet_standard_error(features_ND, reference)
        found["frechet_ci95_half_width"] = None if error is None else _Z * error
        notes += [caveat for caveat in (frechet_caveat(own), frechet_caveat(reference)) if caveat is not None]
    if reference.features is None:
        notes.append("no KID, precision or recall: the reference holds no features, only their mean and covariance")
        return found, notes
    if min(len(features_ND), len(reference.features)) < 4:
        notes.append("no KID, precision or recall: fewer than four images")
    else:
        try:
            found |= kernel_inception_distance(features_ND, reference.features)
            found |= precision_recall(features_ND, reference.features)
            if found["kid_subset"] < KID_SUBSET:
                notes.append(f"KID over subsets of {found['kid_subset']} images; {KID_SUBSET:,} are usual")
        except ImportError as missing:
            notes.append(f"no KID, precision or recall: {missing}")
    if normalized:
        found["cmmd"] = cmmd(features_ND, reference.features)
    return found, notes


def compare_to_baseline(columns: Mapping[str, Tensor], features: Tensor | None, baseline: Tensor | None) -> Metrics:
    """Compare with the baseline's images: fraction of identical ones, mean PSNR and SSIM of the others, Frechet distance."""
    known = columns["identical"].isfinite()
    if not known.any():
        return {}
    identical = columns["identical"][known]
    found: Metrics = {"identical_fraction": float(identical.mean()), "num_images": int(known.sum())}
    differing = known & (columns["identical"] == 0)
    for name in ("psnr", "ssim"):
        values = columns[name][differing]
        if len(values) and values.isfinite().all():
            found[name] = float(values.mean())
    if features is not None and baseline is not None and min(len(features), len(baseline)) > features.shape[1]:
        both = (FeatureStatistics.from_features(each, keep=False) for each in (features, baseline))
        found["frechet"] = frechet_distance(*both)
    return found


def compute_metrics(
    name: str,
    measured: Measurements,
    baseline: Measurements | None,
    reference: FeatureStatistics | None,
    normalized: bool,
    titles: Mapping[str, str],
) -> MethodMetrics:
    """Compute all metrics except speed.

    Args:
        titles: name of each scorer in tables, by specification.
    """
    columns = measured.columns
    of_baseline = {} if baseline is None else baseline.columns
    row = MethodMetrics(name, num_images=max((len(each["indices"]) for each in columns.values()), default=0))
    for spec, title in titles.items():
        if spec in columns:
            row.scores[title] = summarize_scores(columns[spec], of_baseline.get(spec))
    extracted = columns.get("extractor", {})
    features = extracted.get("features")
    if features is not None:
        row.distances, row.notes = compute_distances(features, extracted.get("logits"), reference, normalized)
    if SIMILARITY in columns:
        others = of_baseline.get("extractor", {}).get("features")
        row.similarity = compare_to_baseline(columns[SIMILARITY], features, others)
    if measured.unreadable:
        row.notes.append(f"files that could not be read and are left out: {len(measured.unreadable)}")
    return row
