"""Relaxation: acceptance granted beyond the exact rule's min(1, p / q), capped by a budget and summed in one place.

Shape suffixes: B images, T fed tokens of one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vargen.decoding.draft import Draft, Verdict


def within_budget(granted: Tensor, draft: Draft, relaxation: Tensor, budget: float | None) -> Tensor:
    """What may be granted to each draft of a chain, float `[B, T - 1]`: nothing to invalid ones, and in sum along the chain no
    more than the budget leaves.

    Args:
        granted: float `[B, T - 1]`, at least 0, what the rule would grant.
        relaxation: float32 `[B]`, granted by earlier passes.
        budget: most relaxation of an image; None: no limit.
    """
    if draft.valid is not None:
        granted = granted * draft.valid
    if budget is None:
        return granted
    total = torch.minimum(granted.cumsum(1), (budget - relaxation).clamp_min(0)[:, None])
    return total.diff(dim=1, prepend=torch.zeros_like(total[:, :1]))


def granted_in(granted: Tensor, verdict: Verdict, draft: Draft) -> Tensor:
    """Relaxation of a pass, float `[B]`: what was granted to the drafts that were examined, the first refused one included."""
    examined = torch.arange(granted.shape[1], device=granted.device) < verdict.count[:, None]
    if draft.valid is not None:
        examined = examined & draft.valid
    return (granted * examined).sum(1)
