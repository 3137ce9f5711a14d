"""From images, scores and features to the metrics of a table, with their uncertainty."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vargen.evaluation.distances import (
    USUAL,
    clip_mmd,
    frechet_distance,
    frechet_error,
    inception_score,
    kernel_distance,
    precision_recall,
)
from vargen.evaluation.kept import DRIFT
from vargen.evaluation.measurement import Measured
from vargen.evaluation.reference_statistics import Statistics
from vargen.evaluation.run_directory import Record

_Z = 1.959964  # a 95 % interval of a normal distribution, in standard deviations
Numbers = dict[str, Any]


@dataclass
class Quality:
    """Metrics of one method, or of one folder of images. A metric that could not be computed is missing; `notes` say why.

    Attributes:
        pictures: number of images measured. asked: number of images of the run.
        speed: seconds, speedup, tokens per pass, relaxation; empty for images from other sources.
        scores: by scorer, mean and half-width of the 95 % interval, also of the paired difference to the baseline.
        distances: to the reference. drift: similarity to the baseline's images of the same prompts and seeds.
    """

    name: str
    kind: str = ""
    pictures: int = 0
    asked: int = 0
    speed: Numbers = field(default_factory=dict)
    scores: dict[str, Numbers] = field(default_factory=dict)
    distances: Numbers = field(default_factory=dict)
    drift: Numbers = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def mean_interval(values: Tensor) -> Numbers:
    """Return the mean and the half-width of its 95 % interval by the normal approximation, which is None for a single value."""
    half = float(_Z * values.double().std() / len(values) ** 0.5) if len(values) > 1 else None
    return {"mean": float(values.double().mean()), "half_interval": half, "pictures": len(values)}


def speed_of(records: Sequence[Record], baseline: Mapping[int, Record]) -> Numbers:
    """Compute the speed metrics of a method from its manifest records, and the baseline's records by index."""
    seconds = [record["seconds"] for record in records]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    ratios = [baseline[r["item"]]["seconds"] / r["seconds"] for r in records if r["item"] in baseline and r["seconds"] > 0]
    turns = sum(record["turns"] for record in records)
    return {
        "seconds": middle,
        "seconds_quartiles": [low, high],
        "ratio": statistics.median(ratios) if ratios else None,
        "tokens_per_pass": sum(record["tokens"] for record in records) / turns if turns else None,
        "passes": statistics.mean(record["passes"] for record in records),
        "relaxation": statistics.mean(record["relaxation"] for record in records),
        "batch": max(record["batch"] for record in records),
        "threads": sorted({record["threads"] for record in records}),
    }


def scores_of(own: Mapping[str, Tensor], baseline: Mapping[str, Tensor] | None) -> Numbers:
    """Return the mean of `scores`, and of their differences to the baseline's scores at the same `items`."""
    found = mean_interval(own["scores"])
    if baseline is not None:
        theirs = dict(zip(baseline["items"].tolist(), baseline["scores"].tolist(), strict=True))
        pairs = [(s, theirs[i]) for i, s in zip(own["items"].tolist(), own["scores"].tolist(), strict=True) if i in theirs]
        if pairs:
            found["to_baseline"] = mean_interval(torch.tensor([a - b for a, b in pairs]))
    return found


def distances_of(
    features: Tensor, logits: Tensor | None, reference: Statistics | None, normalized: bool
) -> tuple[Numbers, list[str]]:
    """Return distances of features `[N, D]` to `reference`, and notes on those that are missing or unreliable."""
    found: Numbers = {}
    notes: list[str] = []
    if logits is not None and len(logits) >= 10:
        found["inception_score"], found["inception_score_deviation"] = inception_score(logits)
    if reference is None:
        return found, ["no distances to real pictures: no reference is given"]
    if len(features) > 1:
        try:
            found["frechet"] = frechet_distance(Statistics.of(features, keep=False), reference)
            error = frechet_error(features, reference)
            found["frechet_half_interval"] = None if error is None else _Z * error
            if len(features) < USUAL:
                notes.append(f"Frechet distance of {len(features)} pictures: biased upwards; {USUAL} or more are usual")
        except ValueError as error:
            notes.append(f"no Frechet distance: {error}")
    if reference.features is None:
        notes.append("no KID, precision or recall: the reference holds no features, only their mean and covariance")
        return found, notes
    if min(len(features), len(reference.features)) >= 4:
        kid = kernel_distance(features, reference.features)
        found |= {"kid": kid.mean, "kid_deviation": kid.std, "kid_interval": list(kid.interval), "kid_subset": kid.subset}
        found["precision"], found["recall"] = precision_recall(features, reference.features)
        if kid.subset < 1000:
            notes.append(f"KID over subsets of {kid.subset} pictures; 1,000 are usual")
    else:
        notes.append("no KID, precision or recall: fewer than four pictures")
    if normalized:
        found["cmmd"] = clip_mmd(features, reference.features)
    return found, notes


def drift_of(own: Mapping[str, Tensor], features: Tensor | None, baseline: Tensor | None) -> Numbers:
    """Compare with the baseline's images: fraction of equal ones, mean PSNR and SSIM of the others, Frechet distance."""
    known = own["same"].isfinite()
    if not known.any():
        return {}
    same = own["same"][known]
    found: Numbers = {"same": float(same.mean()), "pictures": int(known.sum())}
    differing = known & (own["same"] == 0)
    for name in ("psnr", "ssim"):
        values = own[name][differing]
        if len(values) and values.isfinite().all():
            found[name] = float(values.mean())
    if features is not None and baseline is not None and min(len(features), len(baseline)) > features.shape[1]:
        found["frechet"] = frechet_distance(Statistics.of(features, keep=False), Statistics.of(baseline, keep=False))
    return found


def quality_of(
    name: str,
    measured: Measured,
    baseline: Measured | None,
    reference: Statistics | None,
    normalized: bool,
    names: Mapping[str, str],
) -> Quality:
    """Compute all metrics except speed.

    Args:
        names: name of each scorer in tables, by specification.
    """
    arrays = measured.arrays
    found = Quality(name, pictures=max((len(each["items"]) for each in arrays.values()), default=0))
    for spec, title in names.items():
        if spec in arrays:
            found.scores[title] = scores_of(arrays[spec], None if baseline is None else baseline.arrays.get(spec))
    extracted = arrays.get("extractor")
    features = None if extracted is None else extracted["features"]
    if extracted is not None and features is not None:
        found.distances, found.notes = distances_of(features, extracted.get("logits"), reference, normalized)
    if DRIFT in arrays:
        theirs = None if baseline is None else baseline.arrays.get("extractor", {}).get("features")
        found.drift = drift_of(arrays[DRIFT], features, theirs)
    if measured.unreadable:
        found.notes.append(f"files that could not be read and are left out: {len(measured.unreadable)}")
    return found
