"""Recursive rejection: verify siblings in order, each against what earlier ones left of p."""

from __future__ import annotations

from torch import Tensor

from vargen.decoding.noise import Noise
from vargen.decoding.rules import acceptance_rule
from vargen.decoding.tree import Draft, Verdict
from vargen.decoding.tree_rules import DraftTokens, SiblingDecision, verify_siblings


@acceptance_rule(exact=True, topologies=("chain", "tree"))
def recursive_rejection(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Verify siblings in order: accept x if u < p(x) / q(x); after a rejection, p becomes norm((p - q)+) for the next sibling.

    The recorded q of each sibling selects one of three published variants. Sampled with replacement, all siblings from one q:
    Miao et al. 2024, SpecInfer. Sampled without replacement, q excluding the earlier siblings: Jeon et al. 2024, RSD; Chen et
    al. 2024, Sequoia. Not sampled, q being one on the token itself, so that x is accepted with probability p(x) and then
    removed from p: Li et al. 2024, EAGLE-2.

    On a chain it equals `speculative_sampling`. The output is distributed as the target provided that each q is the
    distribution its sibling was actually sampled from. Arguments: see `AcceptanceRule`.
    """
    return verify_siblings(_test_ratio, probs, draft, noise, relaxation)


def _test_ratio(drafted: DraftTokens) -> SiblingDecision:
    p, q = drafted.p_and_q
    return SiblingDecision(p / q)
