"""Acceptance rules: pure, batched functions from the target's laws and a draft to a `Verdict`."""

from __future__ import annotations

from torch import Tensor

from vargen.decoding.noise import race
from vargen.decoding.types import Draft, Verdict


def same_noise(law: Tensor, draft: Draft, seeds: Tensor, position: Tensor) -> Verdict:
    """Exact, and the sequential picture itself: a draft stands where it equals what its position's noise draws.

    With the Gumbel noise G fixed per image and position, the token at a position *is* argmax(log p + G) (Maddison et al. 2014);
    a draft is accepted exactly when it is that token. With an empty draft this is sequential sampling.

    Args:
        law: float32 `[B, T, V]`; row t is the target's law after fed slot t.
        draft: T - 1 tokens per image; siblings must differ.
        seeds: int64 `[B]`. position: int64 `[B, T]`.
    """
    drawn = race(law, seeds, position)  # [B, T]: what follows each slot
    tree = draft.tree
    if drawn.shape[1] == 1:
        count = drawn.new_ones(len(drawn))
        return Verdict(path=drawn.new_zeros(len(drawn), 1), count=count, next_token=drawn[:, 0])
    agrees = drawn.new_ones(drawn.shape).bool()
    agrees[:, 1:] = draft.tokens == drawn[:, tree.parents[1:]]
    accepted = (agrees[:, None, :] | ~tree.ancestors).all(-1)  # itself and every ancestor agree
    count = accepted.sum(1)
    # Stable: accepted slots first, parents before children.
    path = accepted.to(drawn.dtype).argsort(dim=1, descending=True, stable=True)[:, : tree.longest]
    last = path.gather(1, count[:, None] - 1)
    return Verdict(path=path, count=count, next_token=drawn.gather(1, last)[:, 0])
