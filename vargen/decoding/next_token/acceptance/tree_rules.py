"""The exact acceptance rule of draft trees: traversal verification.

Shape suffixes: B images, T tokens fed in one pass, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vargen.decoding.next_token.acceptance import fused
from vargen.decoding.next_token.acceptance.function_rule import acceptance_rule
from vargen.decoding.next_token.acceptance.siblings import trace_path
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.tree import Draft, Verdict


@acceptance_rule(exact=True, topologies=("chain", "tree"), requires=("independent-per-pass",), leaves_first=True)
def traversal(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Accept the first path that passes, starting from the leaves (Weng et al. 2025, traversal verification).

    Each slot has a reach probability r, 1 for the root. For a child it is min(1, r p(x) / q(x)), with r and p of its parent. A
    slot is accepted, with all its ancestors, if u < r; its children are tested first. When a child is rejected, its parent gets
    p' = norm((r p - q)+) and r' = S / (S + 1 - r), where S is the sum of (r p - q)+. On a chain this is block verification (Sun
    et al. 2024).

    A path is inspected to its leaf before it is rejected, so all draft tokens must be resampled in every pass, each branch with
    its own uniforms. Reach probabilities do not depend on the rule's uniforms, so one ordered sweep over the slots computes
    them, and then the first slot that passes is selected. Arguments: see `AcceptanceRule`.
    """
    if fused.is_available(probs):
        return fused.verify_traversal(probs, draft, noise)
    B, T, _ = probs.shape
    tree, image = draft.tree, torch.arange(B, device=probs.device)
    parents = tree.parents.expand(B, T)
    residual, reach = probs.clone(), torch.ones_like(probs[..., 0])
    for slot in range(1, T):
        parent, token = parents[:, slot], draft.tokens[:, slot - 1, None]
        p, r = residual[image, parent], reach[image, parent]
        reachable = p * r[:, None]
        own = reachable.gather(1, token)[:, 0]
        if draft.probs is None:
            accept_prob, rest = own, reachable.scatter(1, token, 0.0)
        else:
            q = draft.probs[:, slot - 1]
            accept_prob, rest = own / q.gather(1, token)[:, 0], (reachable - q).clamp_min_(0)
        total = rest.sum(1)
        fixed = torch.where((total > 0) | (r < 1), total / (total + (1 - r)), 1.0)  # p equals q: the child is never rejected
        rest = torch.where(total[:, None] > 0, rest / total[:, None], p)
        accept_prob = accept_prob.clamp(max=1.0).nan_to_num(0.0)  # q is 0 for tokens that were not sampled
        if draft.valid is not None:
            valid = draft.valid[:, slot - 1]
            accept_prob, fixed = torch.where(valid, accept_prob, 0.0), torch.where(valid, fixed, r)
            rest = torch.where(valid[:, None], rest, p)
        reach[:, slot] = accept_prob
        residual[image, parent], reach[image, parent] = rest, fixed
    slots = torch.arange(T, device=probs.device)
    passes = noise.fold_in(slots).uniform(Purpose.ACCEPT) < reach
    passes[:, 0] = True
    last = torch.where(passes, tree.postorder, T).argmin(1)
    path, count = trace_path(last, tree)
    next_token = noise.select_slot(last).sample(residual[image, last][:, None], Purpose.RESIDUAL)[:, 0]
    return Verdict(path=path, count=count, next_token=next_token)
