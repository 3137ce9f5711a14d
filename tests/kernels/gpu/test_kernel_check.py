"""The check over shapes: right kernels pass, and a wrong one is named."""

import itertools
from typing import Any

import pytest
import torch

from vargen.evaluation import kernel_check
from vargen.evaluation.device_checks import check_kernels
from vargen.evaluation.device_report import WrongResult
from vargen.kernels import self_check, tree_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_kernels_are_right_and_a_wrong_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_check, "_TOKENS", (5,))
    monkeypatch.setattr(kernel_check, "_HEADS", ((4, 2, 20),))
    monkeypatch.setattr(kernel_check, "_CACHED", (3,))
    monkeypatch.setattr(kernel_check, "_VOCABULARIES", (64,))
    monkeypatch.setattr(self_check, "CHECKS", {"tree attention": self_check.CHECKS["tree attention"]})
    results = {row["result"] for row in check_kernels(DEVICE) if "compute-sanitizer" not in str(row["case"])}
    assert results == {"right"}
    real = tree_attention.tree_attention

    def wrong(*args: Any, **options: Any) -> torch.Tensor:
        return real(*args, **options) * 1.01

    monkeypatch.setattr(tree_attention, "tree_attention", wrong)
    found = list(itertools.islice((row for row in kernel_check.compare_kernels(torch.device(DEVICE)) if row[2]), 2))
    assert [kernel for kernel, _, _ in found] == ["tree attention", "tree attention"] and "off by" in found[0][2]
    with pytest.raises(WrongResult, match="tree attention"):
        list(check_kernels(DEVICE))
