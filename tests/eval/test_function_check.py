"""A function in NumPy is summed over all drafts and uniforms: exact where it is, as far off as it is where it is not."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def example(repo_root: Path) -> dict[str, Any]:
    return runpy.run_path(str(repo_root / "examples" / "check_function.py"))


@pytest.mark.parametrize(("vocab", "drafts"), [(2, 1), (3, 2), (2, 4), (5, 2)])
def test_speculative_sampling_is_exact(example, vocab: int, drafts: int) -> None:
    assert example["sum_function"](example["verify"], vocab=vocab, drafts=drafts, seed=vocab) < 1e-12


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
def test_mistakes_are_found(example, wrong) -> None:
    assert example["sum_function"](wrong, drafts=3, seed=1) > 1e-3
