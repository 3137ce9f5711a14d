"""Shared-noise coupling: the draft and the target are drawn with the same Gumbel noise, and must be equal.

Shape suffixes: B images, T fed tokens of one pass, A slots of the longest path, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from vargen.decoding.acceptance import fused
from vargen.decoding.acceptance.rule import acceptance_rule
from vargen.decoding.acceptance.siblings import followed
from vargen.decoding.draft import Draft, Verdict
from vargen.decoding.noise import Noise, Purpose


@acceptance_rule(exact=True, topologies=("chain", "tree"))
def shared_noise(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Exact, and the sequential picture itself: a draft stands where it equals what its position's noise draws.

    With the Gumbel noise G fixed per image and position, the token at a position *is* argmax(log p + G) (Maddison et al. 2014);
    a draft is accepted exactly when it is that token. With an empty draft this is sequential sampling. The draft's own
    probabilities do not matter. Arguments: see `AcceptanceRule`.
    """
    drawn = noise.draw(probs, Purpose.TOKEN)  # [B, T]: what follows each slot
    if fused.applies(probs):
        return fused.matched(drawn, draft)
    tree = draft.tree
    agrees = drawn.new_ones(drawn.shape).bool()
    agrees[:, 1:] = draft.tokens == drawn.gather(1, tree.parents[..., 1:].expand(len(drawn), -1))
    if tree.widest > 1:  # siblings may be alike
        agrees = agrees & ~(agrees[:, None, :] & tree.elders).any(-1)
    path, count, _ = followed(agrees, tree)
    last = path.gather(1, count[:, None] - 1)
    return Verdict(path=path, count=count, next_token=drawn.gather(1, last)[:, 0], drawn=drawn)
