"""Negative controls with draft trees: mistakes, of released implementations or likely ones, that a check must detect.

Shape suffixes: B images, S drafts, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import (
    Accelerator,
    Draft,
    JacobiTree,
    Noise,
    SpeculativeTree,
    StaticTree,
    Tree,
    Verdict,
    acceptance_rule,
    recursive_rejection,
    traversal,
)
from vargen.decoding.next_token.acceptance import SiblingDecision, Siblings, verify_siblings
from vargen.decoding.next_token.trees.shapes import make_fan, make_k_ary

TREE = ("chain", "tree")
BINARY_TREE = StaticTree(make_k_ary(2, 2))


# -- rules --------------------------------------------------------------------------------------------------------------


def _inverted(siblings: Siblings) -> SiblingDecision:
    p, q = siblings.p_and_q
    assert siblings.q is not None
    return SiblingDecision(p / q, (siblings.q - siblings.p).clamp(min=0))


@acceptance_rule(exact=True, topologies=TREE)
def inverted_residual(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """LANTERN's static trees as released: after a rejection the residual is q - p instead of p - q."""
    return verify_siblings(_inverted, probs, draft, noise)


class _SharedUniform(Noise):
    def branch(self, number: Any) -> Noise:
        return self


@acceptance_rule(exact=True, topologies=TREE)
def shared_uniform(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """All siblings share one uniform."""
    return recursive_rejection(probs, draft, _SharedUniform(noise.seeds, noise.position, noise.step), relaxation)


@acceptance_rule(exact=True, topologies=TREE)
def stale_uniforms(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Sequoia as released: uniforms are sampled once per tree slot and reused in every pass."""
    return recursive_rejection(probs, draft, Noise(noise.seeds, noise.position - noise.position[:, :1]), relaxation)


stale_traversal = acceptance_rule(exact=True, topologies=TREE)(traversal.function)


# -- drafters -----------------------------------------------------------------------------------------------------------


def _first_of_pair(tree: Tree) -> Tensor:
    """Return for each draft `[S]` its parent's first child: the draft itself or its earlier sibling."""
    return tree.children[tree.parents[1:], 0] - 1


@dataclasses.dataclass(frozen=True)
class IgnoresEarlierSiblings(SpeculativeTree):
    """SJD-PAC as released: sampled without replacement, but recorded with the probabilities of the first sibling."""

    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        assert draft.probs is not None
        return dataclasses.replace(draft, probs=draft.probs[:, _first_of_pair(draft.tree)])


@dataclasses.dataclass(frozen=True)
class RemovesEarlierSiblings(SpeculativeTree):
    """Sampled with replacement, but recorded as sampled without."""

    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        assert draft.probs is not None
        earlier = draft.tokens[:, _first_of_pair(draft.tree)]
        less = draft.probs.scatter(2, earlier[..., None], 0.0)
        less = less / less.sum(-1, keepdim=True).clamp_min(1e-30)
        later = (draft.tree.sibling_rank[1:] > 0)[:, None]
        return dataclasses.replace(draft, probs=torch.where(later, less, draft.probs))


@dataclasses.dataclass(frozen=True)
class SortsSiblings(SpeculativeTree):
    """Sampling order lost: the more probable of two siblings comes first, as if it had been sampled first."""

    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        assert draft.probs is not None and draft.tree.max_children == 2 and draft.tree.max_path == 2
        q = draft.probs[:, :1]
        tokens = draft.tokens.gather(1, q[:, 0].gather(1, draft.tokens).argsort(1, descending=True))
        less = q.scatter(2, tokens[:, :1, None], 0.0)
        return dataclasses.replace(draft, tokens=tokens, probs=torch.cat([q, less / less.sum(-1, keepdim=True)], 1))


@dataclasses.dataclass(frozen=True)
class KeepsLikeliest(SpeculativeTree):
    """Re-ranking after sampling: only the more probable of two siblings is kept, with the q that it was sampled from."""

    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        assert draft.probs is not None and draft.tree.max_children == 2 and draft.tree.max_path == 2
        best = draft.probs[:, 0].gather(1, draft.tokens).argmax(1, keepdim=True)
        probs = draft.probs[torch.arange(len(best))[:, None], best]
        return Draft(draft.tokens.gather(1, best), Tree.make_chain(1, best.device), probs, draft.valid)


@dataclasses.dataclass(frozen=True)
class RecordsBestAsSampled(SpeculativeTree):
    """MCSD as released, at temperature 0: the most probable children, recorded as if they had been sampled."""

    def propose(self, *arguments: Any) -> Draft:
        best = super().propose(*arguments)
        sampled = dataclasses.replace(self, child_sampling="without-replacement")
        probs = super(RecordsBestAsSampled, sampled).propose(*arguments).probs
        assert probs is not None
        return dataclasses.replace(best, probs=probs[:, :1].expand(-1, 2, -1) if best.tree.max_path == 2 else probs)


TWO_SIBLINGS = StaticTree((-1, 0, 0))
WRONG_TREES = {
    "an inverted residual": Accelerator(drafter=SpeculativeTree(BINARY_TREE), acceptance=inverted_residual),
    "one uniform for all siblings": Accelerator(drafter=SpeculativeTree(BINARY_TREE), acceptance=shared_uniform),
    "uniforms of the first pass in all": Accelerator(drafter=SpeculativeTree(BINARY_TREE), acceptance=stale_uniforms),
    "without replacement, recorded as with": Accelerator(
        drafter=IgnoresEarlierSiblings(BINARY_TREE), acceptance=recursive_rejection
    ),
    "with replacement, recorded as without": Accelerator(
        drafter=RemovesEarlierSiblings(BINARY_TREE, "with-replacement"), acceptance=recursive_rejection
    ),
    "siblings sorted after sampling": Accelerator(drafter=SortsSiblings(TWO_SIBLINGS), acceptance=recursive_rejection),
    "the likelier of two samples kept": Accelerator(drafter=KeepsLikeliest(TWO_SIBLINGS), acceptance=recursive_rejection),
    "the most probable recorded as sampled": Accelerator(
        drafter=RecordsBestAsSampled(TWO_SIBLINGS, "top-k"), acceptance=recursive_rejection
    ),
    "a Jacobi window verified by traversal": Accelerator(
        drafter=JacobiTree(make_fan(8, 2, 2), "maximal"), acceptance=stale_traversal
    ),
}
REQUIRED_CONTROLS = ("an inverted residual", "with replacement, recorded as without", "the likelier of two samples kept")
