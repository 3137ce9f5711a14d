"""Recursive rejection sampling: the exact p/q rule for siblings."""

from __future__ import annotations

from torch import Tensor

from vargen.decoding.acceptance import fused
from vargen.decoding.acceptance.rule import acceptance_rule
from vargen.decoding.acceptance.siblings import Siblings, Tested, sibling_by_sibling
from vargen.decoding.draft import Draft, Verdict
from vargen.decoding.noise import Noise


@acceptance_rule(exact=True, topologies=("chain", "tree"))
def recursive_rejection(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Siblings one after the other: accept x while u < p(x) / q(x); at a refusal p becomes norm((p - q)+) for the next.

    One rule for three kinds of drafts, told apart by the q that is recorded of each sibling: drawn with replacement, all from
    one q (Miao et al. 2024, SpecInfer); without, q less the elder siblings (Jeon et al. 2024, RSD; Chen et al. 2024, Sequoia);
    not drawn at all, q one on the token itself, so that x is accepted with p(x) and then left out of p (Li et al. 2024,
    EAGLE-2). On a chain it is `exact`. The output follows the target if each q is what the sibling was really drawn with.
    Arguments: see `AcceptanceRule`.
    """
    if fused.applies(probs):
        return fused.walked(probs, draft, noise)
    return sibling_by_sibling(_test, probs, draft, noise)


def _test(siblings: Siblings) -> Tested:
    p, q = siblings.own
    return Tested(p / q)
