"""Negative controls: mistakes of released implementations, and likely ones, that an exactness check must detect.

Shape suffixes: B images, S draft tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import (
    Accelerator,
    Draft,
    DynamicTree,
    Jacobi,
    Noise,
    PassResult,
    Purpose,
    Sampling,
    ScaleSchedule,
    Speculative,
    Stage,
    TokenState,
    Tree,
    Verdict,
    acceptance_rule,
    speculative_sampling,
    traversal,
)
from vargen.decoding.experimental import JacobiTree, SampledTree, SpeculativeTree, recursive_rejection
from vargen.decoding.experimental.eagle_children import TopK
from vargen.decoding.rules import gather_p_and_q, resample_rejected
from vargen.decoding.tree_rules import DraftTokens, SiblingDecision, verify_siblings
from vargen.kernels.ops import filter_logits
from vargen.verify.tables import TableModel

TREE = ("chain", "tree")
# With all candidates kept: complete trees.
BINARY_TREE, TWO_SIBLINGS = DynamicTree(6, 2, 2), DynamicTree(2, 1, 2)


@dataclass(frozen=True)
class Control:
    """A method with a mistake.

    Attributes:
        mistake, source: what is wrong, and where it was released.
        method: the method.
        kind: `"chain"`, `"window"` (drafts stay for the next pass), `"tree"` or `"scale"`.
        passes: number of passes after which the mistake shows.
        sampling: temperature and filters.
        change: makes the wrong target from the right one, which then runs without temperature and filters.
    """

    mistake: str
    source: str
    method: Accelerator | ScaleSchedule
    kind: str
    passes: int = 1
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    change: Callable[[TableModel, Sampling], TableModel] | None = None


# -- chains and windows -------------------------------------------------------------------------------------------------


@acceptance_rule(exact=True)
def resample_from_p(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """A rejected token is resampled from p instead of the residual."""
    verdict = speculative_sampling(probs, draft, noise, relaxation)
    row = probs[torch.arange(len(probs)), verdict.count - 1]
    resampled = noise.select_slot(verdict.count - 1).fold_in(1).sample(row[:, None], Purpose.RESIDUAL)[:, 0]
    return replace(verdict, next_token=resampled)


@acceptance_rule(exact=True)
def uniform_bonus(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """If the whole draft is accepted, a uniformly distributed token is committed."""
    verdict = speculative_sampling(probs, draft, noise, relaxation)
    last = noise.select_slot(verdict.count - 1).fold_in(1)
    whole = (verdict.count == probs.shape[1])[:, None]
    weights = torch.where(whole, torch.ones_like(probs[:, 0]), one_hot(verdict.next_token, probs.shape[2]))
    return replace(verdict, next_token=last.sample(weights[:, None], Purpose.RESIDUAL)[:, 0])


def one_hot(tokens: Tensor, vocab: int) -> Tensor:
    """float32 `[B, V]`."""
    return torch.nn.functional.one_hot(tokens, vocab).float()


@dataclass(frozen=True)
class OffByThreePercent(Speculative):
    """Records 0.97 q + 0.03 / V instead of q."""

    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        assert draft.probs is not None
        return replace(draft, probs=0.97 * draft.probs + 0.03 / draft.probs.shape[2])


def filter_first(model: TableModel, sampling: Sampling) -> TableModel:
    """Return the model with the temperature applied after the filters."""
    wrong = copy(model)
    wrong.table = (
        filter_logits(model.table, sampling.top_k, sampling.top_p, sampling.min_p).clamp(min=-1e4) / sampling.temperature
    )
    return wrong


@dataclass(frozen=True)
class KeepsOldProbs(Jacobi):
    """Draft tokens that the coupling kept are recorded with their old q."""

    def observe(self, state: TokenState, result: PassResult) -> None:
        super().observe(state, result)
        if result.draft.probs is None or self.probs is None:
            return
        position, image = result.noise.position[:, :-1], torch.arange(len(state.seeds))[:, None]
        kept = self.drafted.gather(1, position) == result.draft.tokens
        place = position % self.width
        self.probs[image, place] = torch.where(kept[..., None], result.draft.probs, self.probs[image, place])


def couple_by_one_uniform(result: PassResult) -> Tensor:
    """The maximal coupling, with the uniform of the first slot for all slots."""
    noise = result.noise
    first = replace(noise, position=noise.position[:, :1].expand_as(noise.position))
    p, q = gather_p_and_q(result.probs, result.draft)
    kept = first.uniform(Purpose.RESAMPLE_ACCEPT)[:, :-1] * q < p
    return resample_rejected(result.probs, result.draft, noise, kept)


stale_traversal = acceptance_rule(exact=True, topologies=TREE, leaves_first=True)(traversal.function)


# -- trees --------------------------------------------------------------------------------------------------------------


def _inverted(siblings: DraftTokens) -> SiblingDecision:
    p, q = siblings.p_and_q
    assert siblings.q is not None
    return SiblingDecision(p / q, (siblings.q - siblings.p).clamp(min=0))


@acceptance_rule(exact=True, topologies=TREE)
def inverted_residual(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """After a rejection the residual is q - p instead of p - q."""
    return verify_siblings(_inverted, probs, draft, noise, relaxation)


class _SharedUniform:
    """Noise whose `fold_in` changes nothing."""

    def __init__(self, noise: Noise):
        self.noise = noise

    def fold_in(self, number: Any) -> Noise:
        return replace(self.noise.fold_in(number), position=self.noise.position)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.noise, name)


@acceptance_rule(exact=True, topologies=TREE)
def shared_uniform(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """All siblings share one uniform."""
    wrong: Any = _SharedUniform(noise)
    return recursive_rejection(probs, draft, wrong, relaxation)


@acceptance_rule(exact=True, topologies=TREE)
def reused_uniforms(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Uniforms are sampled once per tree slot and reused in every pass."""
    return recursive_rejection(
        probs, draft, replace(noise, position=noise.position - noise.position[:, :1], step=0), relaxation
    )


def _first_of_pair(tree: Tree) -> Tensor:
    """Return for each draft token `[S]` its parent's first child: the draft token itself or its earlier sibling."""
    children, parents = (each[0] if tree.parents.dim() == 2 else each for each in (tree.children, tree.parents))
    return children[parents[1:], 0] - 1


@dataclass(frozen=True)
class IgnoresEarlierSiblings(SpeculativeTree):
    """Sampled without replacement, but recorded with the probabilities of the first sibling."""

    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        assert draft.probs is not None
        return replace(draft, probs=draft.probs[:, _first_of_pair(draft.tree)])


@dataclass(frozen=True)
class RemovesEarlierSiblings(SampledTree):
    """Sampled with replacement, but recorded as sampled without."""

    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        assert draft.probs is not None
        earlier = draft.tokens[:, _first_of_pair(draft.tree)]
        less = draft.probs.scatter(2, earlier[..., None], 0.0)
        less = less / less.sum(-1, keepdim=True).clamp_min(1e-30)
        later = (draft.tree.sibling_rank[1:] > 0)[:, None]
        return replace(draft, probs=torch.where(later, less, draft.probs))


@dataclass(frozen=True)
class SortsSiblings(SpeculativeTree):
    """Sampling order lost: the more probable of two siblings comes first, as if it had been sampled first."""

    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        assert draft.probs is not None and draft.tree.max_children == 2 and draft.tree.max_path == 2
        q = draft.probs[:, :1]
        tokens = draft.tokens.gather(1, q[:, 0].gather(1, draft.tokens).argsort(1, descending=True))
        less = q.scatter(2, tokens[:, :1, None], 0.0)
        return replace(draft, tokens=tokens, probs=torch.cat([q, less / less.sum(-1, keepdim=True)], 1))


@dataclass(frozen=True)
class KeepsLikeliest(SpeculativeTree):
    """Re-ranking after sampling: only the more probable of two siblings is kept, with the q that it was sampled from."""

    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        assert draft.probs is not None and draft.tree.max_children == 2 and draft.tree.max_path == 2
        best = draft.probs[:, 0].gather(1, draft.tokens).argmax(1, keepdim=True)
        probs = draft.probs[torch.arange(len(best))[:, None], best]
        valid = None if draft.valid is None else draft.valid[:, :1]
        return Draft(draft.tokens.gather(1, best), Tree.make_chain(1, best.device), probs, valid)


class _BestAsSampled(TopK):
    def probs(self, q: Tensor, tokens: Tensor, tree: Tree) -> Tensor:  # type: ignore[override]
        return q


@dataclass(frozen=True)
class RecordsBestAsSampled(SpeculativeTree):
    """The most probable children, recorded as if they had been sampled."""

    children = _BestAsSampled()


def _tree(drafter: Any, rule: Any = recursive_rejection) -> Accelerator:
    return Accelerator(drafter=drafter, acceptance=rule)


CONTROLS = (
    Control(
        "rejected token resampled from p",
        "Lumina-mGPT 2.0",
        Accelerator(drafter=Speculative(2), acceptance=resample_from_p),
        "chain",
    ),
    Control(
        "uniform token after a full draft",
        "SJD-PAC as released",
        Accelerator(drafter=Speculative(1), acceptance=uniform_bonus),
        "chain",
    ),
    Control(
        "recorded q off by 3%",
        "any drafter",
        Accelerator(drafter=OffByThreePercent(2), acceptance=speculative_sampling),
        "chain",
    ),
    Control(
        "temperature after the filters",
        "CoDe as released",
        Accelerator(drafter=Speculative(2), acceptance=speculative_sampling),
        "chain",
        sampling=Sampling(0.7, top_p=0.6),
        change=filter_first,
    ),
    Control(
        "kept drafts recorded with their old q",
        "SCD as released for Lumina and Janus",
        Accelerator(drafter=KeepsOldProbs(4, "maximal"), acceptance=speculative_sampling),
        "window",
        passes=2,
    ),
    Control(
        "coupling with one uniform for all slots",
        "a likely shortcut",
        Accelerator(drafter=Jacobi(4, couple_by_one_uniform), acceptance=speculative_sampling),
        "window",
        passes=2,
    ),
    Control(
        "a window verified by traversal",
        "block verification on SJD",
        _tree(JacobiTree(7, 2, 2, "maximal"), stale_traversal),
        "window",
        passes=2,
    ),
    Control("inverted residual", "a wrong sign", _tree(SpeculativeTree(BINARY_TREE), inverted_residual), "tree"),
    Control("one uniform for all siblings", "a likely shortcut", _tree(SpeculativeTree(BINARY_TREE), shared_uniform), "tree"),
    Control(
        "uniforms reused in every pass",
        "Sequoia as released",
        _tree(SpeculativeTree(BINARY_TREE), reused_uniforms),
        "tree",
        passes=2,
    ),
    Control("q forgets removed siblings", "SJD-PAC as released", _tree(IgnoresEarlierSiblings(BINARY_TREE)), "tree"),
    Control(
        "q removes siblings that were replaced",
        "the opposite mistake",
        _tree(RemovesEarlierSiblings(branching=(2, 2))),
        "tree",
    ),
    Control("siblings sorted after sampling", "a likely shortcut", _tree(SortsSiblings(TWO_SIBLINGS)), "tree"),
    Control("the likelier of two samples kept", "re-ranking after sampling", _tree(KeepsLikeliest(TWO_SIBLINGS)), "tree"),
    Control(
        "most probable tokens recorded as sampled",
        "MCSD as released",
        _tree(RecordsBestAsSampled(TWO_SIBLINGS)),
        "tree",
    ),
    Control(
        "last scale from another model",
        "a relaxed schedule",
        ScaleSchedule(stages=(Stage(until=-1), Stage(model="draft"))),
        "scale",
    ),
)
