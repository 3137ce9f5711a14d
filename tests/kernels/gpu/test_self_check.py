"""The check that every kernel passes on a device before it is used: it passes, and it finds a kernel that is wrong."""

import pytest
import torch

from vargen.kernels import (
    accept_chain,
    accept_traversal,
    accept_tree,
    accept_wanted,
    commit,
    dispatch,
    sampler,
    self_check,
    tree_attention,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_kernels_pass_their_check() -> None:
    assert self_check.trouble(DEVICE) is None


def off_by_one(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value + 1 if value.dtype != torch.bool else ~value
    return type(value)(*map(off_by_one, value)) if hasattr(value, "_fields") else value


@pytest.mark.parametrize(("module", "name", "said"), [
    (tree_attention, "tree_attention", "tree attention: torch.float32 is off by 1"),
    (sampler, "sample", "sampler: "),
    (accept_chain, "verify_chain", "acceptance: a chain is judged wrongly"),
    (sampler, "race", "acceptance: a token without probability wins a race"),
    (accept_tree, "verify_recursive_rejection", "acceptance: a tree is judged wrongly"),
    (accept_traversal, "verify_traversal", "acceptance: a tree is judged wrongly"),
    (accept_wanted, "grouped_accept_prob", "relaxed acceptance: a mass of 0.6 is taken for 1.6"),
    (accept_wanted, "neighborhood_accept_prob", "relaxed acceptance: a mass of 0.7 is taken for 1.7"),
])  # fmt: skip
def test_a_wrong_kernel_is_named(module, name, said, monkeypatch) -> None:
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given, **options: off_by_one(right(*given, **options)))
    assert self_check.trouble(DEVICE).startswith(said)


def test_a_relaxed_chain_is_checked_apart(monkeypatch) -> None:
    right = accept_chain.verify_chain
    monkeypatch.setattr(accept_chain, "verify_chain", lambda *given, **options: right(*given))
    assert self_check.trouble(DEVICE).startswith("acceptance: ")


def test_a_commit_that_moves_nothing_is_named(monkeypatch) -> None:
    monkeypatch.setattr(commit, "keep", lambda *given, **options: None)
    assert self_check.trouble(DEVICE) == "commit: pointers are wrong"


def test_what_fails_is_not_used(monkeypatch, caplog) -> None:
    def broken(device):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(self_check, "CHECKS", {"sampler": broken})
    dispatch._trouble.cache_clear()
    assert dispatch._trouble("cpu") == "sampler: RuntimeError: no such instruction"
    assert "torch runs instead" in caplog.text
    dispatch._trouble.cache_clear()
