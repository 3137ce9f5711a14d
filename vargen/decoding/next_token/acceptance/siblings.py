"""Verification of draft trees, one sibling at a time.

Several rules verify the children of a slot in order: the first accepted child extends the path; a rejected one changes the
distribution that the next sibling is tested against. A rule supplies only the test of one child (`SiblingRule`); this module
applies it to the tree.

To avoid host synchronization, round k tests the k-th child of *every* slot, including slots that turn out not to be reached.
The number of rounds is the largest number of children of any slot. A chain is a tree with one child per slot.

Shape suffixes: B images, T tokens fed in one pass, R of these slots, A slots on the longest path, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.tree import Draft, Tree, Verdict


class Siblings(NamedTuple):
    """The children of one rank after R of the fed slots. Entries of slots without such a child are undefined.

    Attributes:
        p: float `[B, R, V]`, the target distribution after each slot, updated for rejected earlier siblings; sums to one.
        q: float `[B, R, V]`, the distribution that the child was sampled from; None: deterministic, q of the child is one.
        token: int64 `[B, R]`, the draft token.
        slot: int64 `[B, R]` or `[1, R]`, the slot of the child, 0 if there is none.
        max_relaxation: float `[B, R]`, maximum relaxation that this test may spend; None: no limit.
        unfiltered_probs: float `[B, R, V]`, the target distribution at temperature 1, for greedy sampling; see `Draft`.
        is_greedy: bool `[B]`, which images are sampled greedily; see `Draft`.
    """

    p: Tensor
    q: Tensor | None
    token: Tensor
    slot: Tensor
    max_relaxation: Tensor | None = None
    unfiltered_probs: Tensor | None = None
    is_greedy: Tensor | None = None

    @property
    def p_and_q(self) -> tuple[Tensor, Tensor]:
        """Probabilities of the draft token under p and q, `[B, R]` each."""
        p = self.p.gather(-1, self.token[..., None])[..., 0]
        return p, torch.ones_like(p) if self.q is None else self.q.gather(-1, self.token[..., None])[..., 0]

    @property
    def exact_accept_prob(self) -> Tensor:
        """Exact acceptance probability min(1, p / q) of the draft token, `[B, R]`; 0 where q is 0."""
        p, q = self.p_and_q
        return torch.where(q > 0, p / q, 0.0).clamp(max=1.0)

    @property
    def residual(self) -> Tensor:
        """Unnormalized residual (p - q)+ of the exact rule, `[B, R, V]`."""
        if self.q is None:
            return self.p.scatter(-1, self.token[..., None], 0.0)
        return (self.p - self.q).clamp_min_(0)


class SiblingDecision(NamedTuple):
    """Decision of a rule on `Siblings`.

    Attributes:
        accept_prob: float `[B, R]`; may exceed 1.
        residual: float `[B, R, V]`, nonnegative, after a rejection; need not sum to one. Where it is zero, p is unchanged.
            None: the residual of the exact rule, which is then computed only where needed.
        relaxation: float `[B, R]`, acceptance probability beyond the exact rule; None: none.
    """

    accept_prob: Tensor
    residual: Tensor | None = None
    relaxation: Tensor | None = None


SiblingRule = Callable[[Siblings], SiblingDecision]


@dataclass
class _SlotDecisions:
    """Decisions on every draft token by slot, `[B, T]` each.

    Given that its parent is accepted: whether the token is accepted, whether it is tested, and the relaxation spent on it.
    Entry 0 is undefined.
    """

    accepted: Tensor
    tested: Tensor
    relaxation: Tensor


def verify_siblings(
    rule: SiblingRule,
    probs: Tensor,
    draft: Draft,
    noise: Noise,
    relaxation: Tensor | None = None,
    budget: float | None = None,
) -> Verdict:
    """Verify a draft by testing siblings in order. If all children of a slot are rejected, sample from the residual of p.

    Args:
        rule: decides on one child of each of several slots. It is called again for the last accepted slot. With a `budget`, it
            is called once more for all slots and must spend at most `max_relaxation` on each.
        probs, draft, noise, relaxation: see `AcceptanceRule`.
        budget: maximum relaxation per image; None: no limit.

    Returns:
        The verdict, with `relaxation` set if that argument is given.
    """
    decisions, limits = _test_all_slots(rule, probs, draft, noise, None), None
    if budget is not None:
        assert relaxation is not None, "a budget needs the relaxation spent so far"
        limits = _cap_by_path(decisions.relaxation, draft.tree, (budget - relaxation).clamp_min(0))
        decisions = _test_all_slots(rule, probs, draft, noise, limits)
    path, count, reached = follow_accepted(decisions.accepted, draft.tree)
    last = path.gather(1, count[:, None] - 1)
    residual = _final_residual(rule, probs, draft, last, limits)
    verdict = Verdict(path, count, noise.select_slot(last[:, 0]).sample(residual, Purpose.RESIDUAL)[:, 0])
    if relaxation is None:
        return verdict
    parent = draft.tree.parents.clamp(min=0).expand_as(reached)
    spent = decisions.relaxation * (decisions.tested & reached.gather(1, parent))
    return replace(verdict, relaxation=spent[:, 1:].sum(1))


def _test_all_slots(rule: SiblingRule, probs: Tensor, draft: Draft, noise: Noise, limits: Tensor | None) -> _SlotDecisions:
    B, T, _ = probs.shape
    tree = draft.tree
    closed = torch.zeros(B, T, dtype=torch.bool, device=probs.device)  # slots with an accepted child
    accepted, tested, relaxation = torch.zeros_like(closed), torch.zeros_like(closed), torch.zeros_like(probs[..., 0])
    p = probs
    for rank, slots in enumerate(tree.slots_with_rank):
        if rank == 0 and len(slots) < T:
            p = probs[:, slots]
        child = tree.children[..., slots, rank].expand(B, -1)
        siblings, exists = _gather_siblings(child, p, draft, limits)
        decision = rule(siblings)
        is_tested = exists & ~closed[:, slots]
        is_accepted = (noise.fold_in(rank).uniform(Purpose.ACCEPT)[:, slots] < decision.accept_prob) & is_tested
        # Slots without a child of this rank write to entry 0.
        accepted, tested = accepted.scatter(1, child, is_accepted), tested.scatter(1, child, is_tested)
        closed = closed.index_copy(1, slots, closed[:, slots] | is_accepted)
        if decision.relaxation is not None:
            relaxation = relaxation.scatter(1, child, decision.relaxation * exists)
        if rank + 1 < tree.max_children:
            further = tree.slots_with_rank[rank + 1]
            rows = torch.searchsorted(slots, further)  # a slot with a child of the next rank also has one of this rank
            p = _residual_after_rejection(siblings, decision, exists, rows if len(further) < len(slots) else None)
    return _SlotDecisions(accepted, tested, relaxation)


def _gather_siblings(child: Tensor, p: Tensor, draft: Draft, limits: Tensor | None) -> tuple[Siblings, Tensor]:
    """Return the children at slots `child` `[B, R]`, and whether each is valid, bool `[B, R]`; `p` as in `Siblings`."""
    at = (child - 1).clamp(min=0)
    exists = child > 0 if draft.valid is None else (child > 0) & draft.valid.gather(1, at)
    image = torch.arange(len(at), device=at.device)[:, None]
    q = None if draft.probs is None else draft.probs[image, at]
    unfiltered = None
    if draft.unfiltered_probs is not None:
        parent = draft.tree.parents.clamp(min=0).expand(len(at), -1).gather(1, child)
        unfiltered = draft.unfiltered_probs[image, parent]
    max_relaxation = None if limits is None else limits.gather(1, child)
    return Siblings(p, q, draft.tokens.gather(1, at), child, max_relaxation, unfiltered, draft.is_greedy), exists


def _residual_after_rejection(
    siblings: Siblings, decision: SiblingDecision, exists: Tensor, rows: Tensor | None = None
) -> Tensor:
    """Return p after the rejection of these children, normalized, for all rows or only for `rows`."""
    residual = decision.residual
    if rows is not None:
        q = None if siblings.q is None else siblings.q[:, rows]
        siblings, exists = siblings._replace(p=siblings.p[:, rows], q=q, token=siblings.token[:, rows]), exists[:, rows]
        residual = None if residual is None else residual[:, rows]
    if residual is None:
        residual = siblings.residual
    total = residual.sum(-1, keepdim=True)
    return torch.where(exists[..., None] & (total > 0), residual / total, siblings.p)


def _final_residual(rule: SiblingRule, probs: Tensor, draft: Draft, slot: Tensor, limits: Tensor | None) -> Tensor:
    """Return p after the rejection of all children of a slot `[B, 1]` of each image, `[B, 1, V]`."""
    B, T, _ = probs.shape
    image = torch.arange(B, device=probs.device)[:, None]
    children, p = draft.tree.children.expand(B, T, -1)[image, slot], probs[image, slot]
    for rank in range(draft.tree.max_children):
        siblings, exists = _gather_siblings(children[..., rank], p, draft, limits)
        p = _residual_after_rejection(siblings, rule(siblings), exists)
    return p


def _cap_by_path(relaxation: Tensor, tree: Tree, allowed: Tensor) -> Tensor:
    """Maximum relaxation of each draft token, `[B, T]`, such that no path spends more than `allowed` `[B]`.

    The budget is spent in the order of the tests: earlier siblings of a token and of its ancestors come first.
    """
    T = relaxation.shape[1]
    tested = tree.earlier_siblings.float() + torch.eye(T, dtype=torch.float32, device=relaxation.device)
    tested[..., 0, :] = 0  # the root is not a draft token
    before = tree.ancestors.float() @ tested  # [.., T, T]: the tests up to the acceptance of a draft token, its own included
    upto = (before.to(relaxation.dtype) @ relaxation[..., None])[..., 0]
    limit = allowed[:, None].to(relaxation.dtype)
    return torch.minimum(upto, limit) - torch.minimum(upto - relaxation, limit)


def follow_accepted(accepted: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """Return the accepted path `[B, A]`, its number of slots `[B]`, and a mask of its slots, bool `[B, T]`.

    Args:
        accepted: bool `[B, T]`, which slots pass their own test; at most one per group of siblings. The entry of the root is
            ignored.
    """
    accepted = accepted.index_fill(1, torch.zeros(1, dtype=torch.int64, device=accepted.device), True)
    if tree.is_chain:
        reached = accepted.cumprod(1).bool()
        return torch.arange(tree.max_path, device=accepted.device).expand_as(accepted), reached.sum(1), reached
    reached = (accepted[:, None, :] | ~tree.ancestors).all(-1)  # the slot and all its ancestors pass
    return _sort_path(reached, tree), reached.sum(1), reached


def trace_path(slot: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """Return the path `[B, A]` to a slot `[B]` of each image, and its number of slots `[B]`."""
    accepted = tree.ancestors.expand(len(slot), -1, -1)[torch.arange(len(slot), device=slot.device), slot]
    return _sort_path(accepted, tree), accepted.sum(1)


def _sort_path(accepted: Tensor, tree: Tree) -> Tensor:
    """List accepted slots first. The sort is stable, so parents precede children."""
    return accepted.to(torch.int64).argsort(dim=1, descending=True, stable=True)[:, : tree.max_path]
