"""Fused acceptance kernels: the same verdicts in one launch, where `vargen.kernels.dispatch` enables kernels.

Shape suffixes: B images, T tokens fed in one pass, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vargen.decoding.noise import Noise
from vargen.decoding.tree import Draft, Verdict
from vargen.kernels.dispatch import supports_rows


def is_available(probs: Tensor) -> bool:
    """Return whether kernels verify drafts for these probabilities `[B, T, V]`."""
    return supports_rows(probs) and not torch.is_grad_enabled()


def verify_chain(
    probs: Tensor,
    draft: Draft,
    noise: Noise,
    accept_prob: Tensor | None = None,
    relaxation: Tensor | None = None,
    budget: float | None = None,
    tightening: float = 0.0,
) -> Verdict:
    """Verdict of `speculative_sampling` on a chain, or of a relaxed rule, given its acceptance probabilities `[B, T - 1]`."""
    from vargen.kernels.verify_chain import verify_chain

    given = (probs, draft.tokens, draft.probs, draft.valid, *noise.key)
    count, next_token, spent = verify_chain(
        *given, accept_prob=accept_prob, relaxation=relaxation, budget=budget, tightening=tightening
    )
    path = torch.arange(probs.shape[1], device=probs.device).expand(len(probs), -1)
    return Verdict(path, count, next_token, relaxation=spent)


def verify_shared_noise(sampled: Tensor, draft: Draft) -> Verdict:
    """Verdict of `shared_noise`, given the tokens int64 `[B, T]` that the noise selects after each slot."""
    from vargen.kernels.verify_tree import verify_shared_noise

    path, count, next_token = verify_shared_noise(sampled, draft.tokens, draft.tree.children, draft.tree.max_path)
    return Verdict(path, count, next_token, sampled=sampled)


def verify_traversal(probs: Tensor, draft: Draft, noise: Noise) -> Verdict:
    """Verdict of `traversal`."""
    from vargen.kernels.verify_traversal import verify_traversal

    tree = draft.tree
    given = (probs, draft.tokens, draft.probs, draft.valid, tree.children, tree.parents, tree.depth, tree.postorder)
    return Verdict(*verify_traversal(*given, tree.max_path, *noise.key))
