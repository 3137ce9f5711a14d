"""Metrics against closed forms, sums over all pairs, sets made by hand, and torch-fidelity's Frechet distance."""

from __future__ import annotations

import itertools
import logging
import math

import numpy as np
import pytest
import torch

from vargen.compat import import_torch_fidelity
from vargen.eval.features import FeatureStatistics
from vargen.eval.metrics import (
    cmmd,
    compute_distances,
    frechet_distance,
    frechet_standard_error,
    inception_score,
    kernel_inception_distance,
    precision_recall,
)
from vargen.eval.report import Column, latex_table
from vargen.eval.score import note_speed


def gaussian(count: int, dim: int, seed: int, shift: float = 0.0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)) * scale + shift


# -- Frechet ---------------------------------------------------------------------------------------------------------------


def test_frechet_of_two_gaussians_is_the_closed_form() -> None:
    """Diagonal covariances: |m|^2 + sum (s1 - s2)^2; rotating both alike changes nothing."""
    m1, m2 = torch.tensor([1.0, 2, 3]).double(), torch.tensor([0.0, 2, 5]).double()
    s1, s2 = torch.tensor([1.0, 4, 0.0]).double(), torch.tensor([9.0, 1, 0.25]).double()
    expected = float((m1 - m2).square().sum() + (s1 - s2).square().sum())
    plain = frechet_distance(FeatureStatistics(m1, torch.diag(s1**2)), FeatureStatistics(m2, torch.diag(s2**2)))
    q, _ = torch.linalg.qr(gaussian(3, 3, 1).double())
    rotated = (FeatureStatistics(q @ m, q @ torch.diag(s**2) @ q.T) for m, s in ((m1, s1), (m2, s2)))
    assert plain == pytest.approx(expected, abs=1e-6) and frechet_distance(*rotated) == pytest.approx(expected, abs=1e-6)


def test_frechet_of_covariances_that_do_not_commute() -> None:
    a, b = (FeatureStatistics.from_features(gaussian(400, 6, seed) @ gaussian(6, 6, seed + 9)) for seed in (1, 2))
    fidelity = import_torch_fidelity("metric_fid").fid_statistics_to_metric
    numbers = [{"mu": each.mean.numpy(), "sigma": each.covariance.numpy()} for each in (a, b)]
    assert frechet_distance(a, b) == pytest.approx(next(iter(fidelity(*numbers, False).values())), rel=1e-6)
    roots = np.linalg.eigvals(a.covariance.numpy() @ b.covariance.numpy()).astype(complex) ** 0.5
    expected = float((a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace()) - 2 * roots.sum().real
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-8)
    assert frechet_distance(a, a) == pytest.approx(0.0, abs=1e-8)


def test_frechet_of_small_sets_is_measured_with_a_caveat(caplog: pytest.LogCaptureFixture) -> None:
    """Also of sets that do not span the dimensions, against roots by general eigenvalues."""
    few, enough, usual = (FeatureStatistics.from_features(gaussian(n, 8, n)) for n in (8, 9, 2048))
    with caplog.at_level(logging.WARNING, "vargen"):
        frechet_distance(usual, usual)
        assert not caplog.records
        frechet_distance(enough, usual)
        assert "9 images is biased" in caplog.text and "rank" not in caplog.text
        found = frechet_distance(few, usual)
    assert "8 images is biased" in caplog.text and "rank 7 of 8" in caplog.text
    roots = np.linalg.eigvals(few.covariance.numpy() @ usual.covariance.numpy()).astype(complex) ** 0.5
    traces = float(few.covariance.trace() + usual.covariance.trace())
    assert found == pytest.approx(float((few.mean - usual.mean).square().sum()) + traces - 2 * roots.sum().real, rel=1e-5)
    with pytest.raises(ValueError, match="8 and 7 dimensions"):
        frechet_distance(usual, FeatureStatistics.from_features(gaussian(2048, 7, 1)))


def test_the_jackknife_knows_the_spread_of_frechet_distances() -> None:
    """Against the true deviation over many independent sets."""
    reference = FeatureStatistics.from_features(gaussian(4000, 3, 0))
    distances, errors = [], []
    for seed in range(60):
        features = gaussian(300, 3, 100 + seed, shift=0.5)
        distances.append(frechet_distance(FeatureStatistics.from_features(features), reference))
        errors.append(frechet_standard_error(features, reference))
    ratio = float(torch.tensor(errors).mean() / torch.tensor(distances).std())
    assert 0.75 < ratio < 1.3
    assert frechet_standard_error(gaussian(8, 3, 1), reference) is None


# -- KID and CMMD --------------------------------------------------------------------------------------------------------


def test_kid_is_the_unbiased_estimate_with_the_cubic_kernel() -> None:
    x, y = gaussian(5, 2, 1), gaussian(5, 2, 2, shift=0.7)

    def k(a: torch.Tensor, b: torch.Tensor) -> float:
        return (float(a.double() @ b.double()) / 2 + 1) ** 3

    within = [sum(k(s[i], s[j]) for i, j in itertools.permutations(range(5), 2)) / 20 for s in (x, y)]
    whole = sum(within) - 2 * sum(k(a, b) for a in x for b in y) / 25
    assert kernel_inception_distance(x, y, subsets=1, subset=5)["kid"] == pytest.approx(whole, rel=1e-6)


def test_cmmd_is_the_sum_over_all_pairs() -> None:
    x, y = (torch.nn.functional.normalize(gaussian(n, 6, n), dim=1) for n in (5, 4))

    def mean(a: torch.Tensor, b: torch.Tensor) -> float:
        return sum(math.exp(-float((p - q).double().square().sum()) / 200) for p in a for q in b) / len(a) / len(b)

    assert cmmd(x, y) == pytest.approx(1000 * (mean(x, x) + mean(y, y) - 2 * mean(x, y)), rel=1e-6)
    assert cmmd(x, x) == 0.0


# -- precision, recall, Inception Score --------------------------------------------------------------------------------------


def test_precision_and_recall_of_hand_made_sets() -> None:
    """Real: two clusters. Generated: one of them, and outliers."""
    cluster = torch.tensor([[0.0, 0], [1, 0], [0, 1], [1, 1]])
    real = torch.cat([cluster, cluster + 100])
    assert precision_recall(cluster + 0.1, real, k=3) == {"precision": 1.0, "recall": 0.5}
    outliers = torch.tensor([[1e3, 0], [1e4, 0], [-1e5, 0], [1e6, 0]])
    assert precision_recall(torch.cat([cluster, outliers]), cluster, k=1) == {"precision": 0.5, "recall": 1.0}
    with pytest.raises(ValueError, match="more than 3 images"):
        precision_recall(cluster[:3], real)


def test_inception_score_of_known_predictions() -> None:
    certain = torch.eye(4).repeat(5, 1) * 200  # each image one class, all classes equally often
    assert inception_score(certain, splits=1)["inception_score_mean"] == pytest.approx(4.0)
    uniform = inception_score(torch.zeros(20, 4), splits=2)
    assert (uniform["inception_score_mean"], uniform["inception_score_std"]) == pytest.approx((1.0, 0.0), abs=1e-9)
    with pytest.raises(ValueError, match="at least 10"):
        inception_score(certain[:9])


def test_without_torch_fidelity_its_metrics_are_missing_and_a_note_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    x = gaussian(40, 3, 1)
    found, notes = compute_distances(x, gaussian(40, 5, 2), FeatureStatistics.from_features(gaussian(40, 3, 3)), True)
    assert set(found) == {"frechet", "frechet_ci95_half_width", "cmmd"}
    assert sum('pip install "vargen[eval]"' in note for note in notes) == 2


# -- the report ----------------------------------------------------------------------------------------------------------


def test_a_method_that_is_slower_than_the_baseline_is_named() -> None:
    fast = {"batch": 8, "speedup": 1.2, "batch1": {"speedup": 2.0}}
    assert note_speed(fast, "ar") == [] == note_speed({**fast, "speedup": None, "batch1": None}, "ar")
    (note,) = note_speed({**fast, "speedup": 0.5}, "ar")
    assert "slower than ar" in note and "2.00 times as long at batch 8" in note and "batch 1" not in note.replace("batch 8", "")
    (note,) = note_speed({**fast, "batch1": {"speedup": 0.8}}, "ar")
    assert "1.25 times as long at batch 1" in note


def test_latex_escapes_what_it_would_read_as_commands() -> None:
    columns = [Column("method", lambda row: row[0]), Column("KID x 1000", lambda row: row[1])]
    lines = latex_table(columns, [("a_b & 50 %", "1.0 ± 0.2"), ("#$", "-")])
    assert lines[0] == r"\begin{tabular}{lr}" and lines[2] == r"method & KID x 1000 \\"
    assert lines[4] == r"a\_b \& 50 \% & 1.0 $\pm$ 0.2 \\" and lines[5] == r"\#\$ & -- \\"
