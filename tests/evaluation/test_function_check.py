"""A function in NumPy is summed over all drafts and uniforms: exact where it is, as far off as it is where it is not."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from vargen.evaluation.function_check import enumerate_outcomes, sum_function


@pytest.fixture
def verify(repo_root: Path):
    return runpy.run_path(str(repo_root / "examples" / "check_function.py"))["verify"]


@pytest.mark.parametrize(("vocab", "drafts"), [(2, 1), (3, 2), (2, 4), (5, 2)])
def test_speculative_sampling_is_exact(verify, vocab: int, drafts: int) -> None:
    assert sum_function(verify, vocab=vocab, drafts=drafts, seed=vocab) < 1e-12


def residual_from_p(p, q, drafts, uniforms):
    for slot, token in enumerate(drafts):
        if not p[slot, token] / q[slot, token] > uniforms[slot]:
            return [*drafts[:slot], np.searchsorted(np.cumsum(p[slot]), uniforms[-1])]
    return [*drafts, np.searchsorted(np.cumsum(p[-1]), uniforms[-1])]


def one_uniform_for_all(p, q, drafts, uniforms):
    for slot, token in enumerate(drafts):
        if uniforms[0] >= p[slot, token] / q[slot, token]:
            residual = np.maximum(p[slot] - q[slot], 0)
            return [*drafts[:slot], np.searchsorted(np.cumsum(residual / residual.sum()), uniforms[-1])]
    return [*drafts, np.searchsorted(np.cumsum(p[-1]), uniforms[-1])]


@pytest.mark.parametrize("wrong", [residual_from_p, one_uniform_for_all])
def test_mistakes_are_found(wrong) -> None:
    assert sum_function(wrong, drafts=3, seed=1) > 1e-3


def test_outcomes_are_weighted_by_what_they_are_compared_with() -> None:
    found = sorted(enumerate_outcomes(lambda u: (u[0] < 0.25, 2 * u[0] < 1.0, u[1] > 0.9), 2))
    assert sum(weight for weight, _ in found) == pytest.approx(1) and len(found) == 6
    assert sum(weight for weight, (first, _, _) in found if first) == pytest.approx(0.25)
    assert all(second for _, (first, second, _) in found if first)


@pytest.mark.parametrize(("function", "error"), [
    (lambda p, q, d, u: [], ValueError), (lambda p, q, d, u: [3], ValueError), (lambda p, q, d, u: [0] * 4, ValueError),
    (lambda p, q, d, u: [int(float(u[0]) * 3)], TypeError), (lambda p, q, d, u: [1 - u[0]], TypeError),
])  # fmt: skip
def test_bad_functions(function, error) -> None:
    with pytest.raises(error):
        sum_function(function)


@pytest.mark.parametrize("sizes", [{"vocab": 1}, {"drafts": 0}])
def test_bad_sizes(verify, sizes) -> None:
    with pytest.raises(ValueError, match=next(iter(sizes))):
        sum_function(verify, **sizes)
