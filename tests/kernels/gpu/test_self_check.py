"""The check that every kernel passes on a device before it is used: it passes, and it finds a kernel that is wrong."""

import pytest
import torch

from vargen.kernels import dispatch
from vargen.kernels.triton import attention, sampler, verification

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_kernels_pass_their_check() -> None:
    assert dispatch.find_failure(DEVICE) is None


def off_by_one(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value + 1 if value.dtype != torch.bool else ~value
    return tuple(map(off_by_one, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize(("module", "name", "said"), [
    (attention, "tree_attention", "tree attention: torch.float32 is off by 1"),
    (sampler, "probs_from_logits", "sampler: "),
    (verification, "verify_chain", "verification: a chain"),
    (sampler, "sample_gumbel_max", "sampler: "),
    (verification, "verify_shared_noise", "verification: a tree"),
    (verification, "verify_traversal", "verification: a tree"),
])  # fmt: skip
def test_a_wrong_kernel_is_named(module, name, said, monkeypatch) -> None:
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given, **options: off_by_one(right(*given, **options)))
    assert dispatch.find_failure(DEVICE).startswith(said)


def test_a_relaxed_chain_is_checked_apart(monkeypatch) -> None:
    right = verification.verify_chain
    monkeypatch.setattr(verification, "verify_chain", lambda *given, **options: right(*given))
    assert dispatch.find_failure(DEVICE).startswith("verification: ")


def test_what_fails_is_not_used(monkeypatch, caplog) -> None:
    def broken(device):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(dispatch, "CHECKS", {"sampler": broken})
    dispatch._run_self_check.cache_clear()
    assert dispatch._run_self_check("cpu") == "sampler: RuntimeError: no such instruction"
    assert "torch runs instead" in caplog.text
    dispatch._run_self_check.cache_clear()
