"""Distances against closed forms, sums over everything, sets made by hand, and torch-fidelity where it is installed."""

from __future__ import annotations

import itertools
import logging
import math

import numpy as np
import pytest
import torch

from vargen.evaluation.distances import (
    clip_mmd,
    frechet_distance,
    frechet_error,
    inception_score,
    kernel_distance,
    precision_recall,
)
from vargen.evaluation.reference_statistics import Statistics


def gaussian(count: int, dim: int, seed: int, shift: float = 0.0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)) * scale + shift


# -- Frechet ---------------------------------------------------------------------------------------------------------------


def test_frechet_of_two_gaussians_is_the_closed_form() -> None:
    """Diagonal covariances: |m|^2 + sum (s1 - s2)^2; rotating both alike changes nothing."""
    m1, m2 = torch.tensor([1.0, 2, 3]).double(), torch.tensor([0.0, 2, 5]).double()
    s1, s2 = torch.tensor([1.0, 4, 0.0]).double(), torch.tensor([9.0, 1, 0.25]).double()
    expected = float((m1 - m2).square().sum() + (s1 - s2).square().sum())
    plain = frechet_distance(Statistics(m1, torch.diag(s1**2)), Statistics(m2, torch.diag(s2**2)))
    q, _ = torch.linalg.qr(gaussian(3, 3, 1).double())
    turned = frechet_distance(Statistics(q @ m1, q @ torch.diag(s1**2) @ q.T), Statistics(q @ m2, q @ torch.diag(s2**2) @ q.T))
    assert plain == pytest.approx(expected, abs=1e-6) and turned == pytest.approx(expected, abs=1e-6)


def test_frechet_of_covariances_that_do_not_commute() -> None:
    """Against the trace of the principal root of S1 S2, by its eigenvalues."""
    a, b = (Statistics.of(gaussian(400, 6, seed) @ gaussian(6, 6, seed + 9)) for seed in (1, 2))
    roots = np.linalg.eigvals(a.covariance.numpy() @ b.covariance.numpy()).astype(complex) ** 0.5
    expected = float((a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace()) - 2 * roots.sum().real
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-8)
    assert frechet_distance(a, a) == pytest.approx(0.0, abs=1e-8)


def test_frechet_refuses_sets_that_do_not_span_the_dimensions_and_warns_of_small_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    few, enough, usual = (Statistics.of(gaussian(n, 8, n)) for n in (8, 9, 2048))
    for pair in ((few, usual), (usual, few)):
        with pytest.raises(ValueError, match="needs more than 8 pictures"):
            frechet_distance(*pair)
    with caplog.at_level(logging.WARNING, "vargen"):
        frechet_distance(usual, usual)
        assert not caplog.records
        frechet_distance(enough, usual)
    assert "9 pictures is biased" in caplog.text
    with pytest.raises(ValueError, match="8 and 7 dimensions"):
        frechet_distance(usual, Statistics.of(gaussian(2048, 7, 1)))


def test_the_jackknife_knows_the_spread_of_frechet_distances() -> None:
    """Against the true deviation over many independent sets."""
    reference = Statistics.of(gaussian(4000, 3, 0))
    distances, errors = [], []
    for seed in range(60):
        features = gaussian(300, 3, 100 + seed, shift=0.5)
        distances.append(frechet_distance(Statistics.of(features), reference))
        errors.append(frechet_error(features, reference))
    ratio = float(torch.tensor(errors).mean() / torch.tensor(distances).std())
    assert 0.75 < ratio < 1.3
    assert frechet_error(gaussian(8, 3, 1), reference) is None


# -- KID and CMMD --------------------------------------------------------------------------------------------------------


def test_kid_is_unbiased() -> None:
    """The mean over all pairs of subsets of tiny sets is the estimate of the whole sets."""
    x, y = gaussian(5, 2, 1), gaussian(5, 2, 2, shift=0.7)

    def k(a: torch.Tensor, b: torch.Tensor) -> float:
        return (float(a.double() @ b.double()) / 2 + 1) ** 3

    within = [sum(k(s[i], s[j]) for i, j in itertools.permutations(range(5), 2)) / 20 for s in (x, y)]
    whole = sum(within) - 2 * sum(k(a, b) for a in x for b in y) / 25
    assert kernel_distance(x, y, subsets=1, subset=5).mean == pytest.approx(whole, rel=1e-6)
    halves = [
        kernel_distance(x[list(a)], y[list(b)], subsets=1, subset=3).mean
        for a in itertools.combinations(range(5), 3)
        for b in itertools.combinations(range(5), 3)
    ]
    assert sum(halves) / len(halves) == pytest.approx(whole, rel=1e-6)


def test_kid_tells_sets_and_says_its_protocol() -> None:
    same, other = gaussian(300, 4, 1), gaussian(300, 4, 2, shift=0.3)
    null = kernel_distance(same, gaussian(300, 4, 3))
    found = kernel_distance(same, other)
    assert found.subset == 150 and found.subsets == 100 and found.interval[0] < found.mean < found.interval[1]
    assert abs(null.mean) < 0.2 * found.mean and null.interval[0] < 0 < found.interval[0]
    assert kernel_distance(same, other) == found, "not repeatable"
    for pair in ((same, gaussian(300, 5, 1)), (same, same[:3]), (same, same[:0])):
        with pytest.raises(ValueError):
            kernel_distance(*pair)


def test_cmmd_is_the_sum_over_all_pairs() -> None:
    x, y = (torch.nn.functional.normalize(gaussian(n, 6, n), dim=1) for n in (5, 4))

    def mean(a: torch.Tensor, b: torch.Tensor) -> float:
        return sum(math.exp(-float((p - q).double().square().sum()) / 200) for p in a for q in b) / len(a) / len(b)

    assert clip_mmd(x, y) == pytest.approx(1000 * (mean(x, x) + mean(y, y) - 2 * mean(x, y)), rel=1e-6)
    assert clip_mmd(x, x) == 0.0


# -- precision, recall, Inception Score --------------------------------------------------------------------------------------


def test_precision_and_recall_of_hand_made_sets() -> None:
    """Real: two clusters. Generated: one of them, and outliers."""
    cluster = torch.tensor([[0.0, 0], [1, 0], [0, 1], [1, 1]])
    real = torch.cat([cluster, cluster + 100])
    assert precision_recall(cluster + 0.1, real, k=3) == (1.0, 0.5)  # every picture good, half of the world missing
    outliers = torch.tensor([[1e3, 0], [1e4, 0], [-1e5, 0], [1e6, 0]])
    precision, recall = precision_recall(torch.cat([cluster, outliers]), cluster, k=1)
    assert (precision, recall) == (0.5, 1.0)
    assert precision_recall(real, real) == (1.0, 1.0)
    with pytest.raises(ValueError, match="more than 3 pictures"):
        precision_recall(cluster[:3], real)


def test_inception_score_of_known_predictions() -> None:
    sure = torch.eye(4).repeat(5, 1) * 200  # each picture one class, all classes alike
    assert inception_score(sure, splits=1)[0] == pytest.approx(4.0)
    assert inception_score(torch.zeros(20, 4), splits=2) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-9))
    with pytest.raises(ValueError, match="at least 10"):
        inception_score(sure[:9])


# -- torch-fidelity ----------------------------------------------------------------------------------------------------------


def test_torch_fidelity_agrees() -> None:
    from vargen.compat import ensure_torchvision

    ensure_torchvision()
    pytest.importorskip("torch_fidelity", reason="torch-fidelity, an oracle, is not installed")
    from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
    from torch_fidelity.metric_isc import isc_features_to_metric
    from torch_fidelity.metric_kid import kid_features_to_metric
    from torch_fidelity.metric_prc import prc_features_to_metric

    x, y = gaussian(240, 16, 1) @ gaussian(16, 16, 7), gaussian(250, 16, 2, shift=0.4) @ gaussian(16, 16, 7)
    fid = fid_statistics_to_metric(*map(fid_features_to_statistics, (x.double(), y.double())), False)
    assert frechet_distance(Statistics.of(x), Statistics.of(y)) == pytest.approx(next(iter(fid.values())), rel=1e-6)
    kid = kid_features_to_metric(x.double(), y[:240].double(), kid_subsets=1, kid_subset_size=240, verbose=False)
    assert kernel_distance(x, y[:240], 1, 240).mean == pytest.approx(kid["kernel_inception_distance_mean"], rel=1e-6)
    prc = prc_features_to_metric(x, y, verbose=False)
    assert precision_recall(x, y) == pytest.approx((prc["precision"], prc["recall"]), abs=1e-6)
    isc = isc_features_to_metric(x, splits=1)
    assert inception_score(x, splits=1)[0] == pytest.approx(isc["inception_score_mean"], rel=1e-9)
