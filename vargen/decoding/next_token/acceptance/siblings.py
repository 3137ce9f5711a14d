"""Sibling by sibling: what rules have in common that judge the drafts behind a token one after the other, on any tree.

A rule says what it makes of one draft behind every fed slot (`SiblingRule`); here the drafts of one rank, first, second, ...,
are tested at all slots at once, whether or not the slots will be reached, so that no step waits for a decision: as many rounds
as any slot has children. Chains are trees whose slots have one child.

Shape suffixes: B images, T fed tokens of one pass, R of them, A slots of the longest path, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vargen.decoding.next_token.draft import Draft, Tree, Verdict
from vargen.decoding.noise import Noise, Purpose


class Siblings(NamedTuple):
    """Drafts of one rank, behind R of the fed slots; where a slot has none, what stands here does not matter.

    Attributes:
        p: float `[B, R, V]`, the target's probabilities behind each slot, less what the refusal of elder siblings left out;
            sums to one.
        q: float `[B, R, V]`, the probabilities that the draft was drawn with; None: it was not drawn, so its own is one.
        token: int64 `[B, R]`, the draft.
        slot: int64 `[B, R]` or `[1, R]`, the slot that it is fed at, 0 where there is none.
        room: float `[B, R]`, most relaxation that this test may grant; None: no limit.
        soft: float `[B, R, V]`, the target's behind each slot at temperature 1, where drawing is greedy; see `Draft`.
        kept: bool `[B, R]`, of drafts of a chain, see `Draft`.
    """

    p: Tensor
    q: Tensor | None
    token: Tensor
    slot: Tensor
    room: Tensor | None = None
    soft: Tensor | None = None
    kept: Tensor | None = None

    @property
    def own(self) -> tuple[Tensor, Tensor]:
        """What p and q give the draft itself, `[B, R]` each."""
        p = self.p.gather(-1, self.token[..., None])[..., 0]
        return p, torch.ones_like(p) if self.q is None else self.q.gather(-1, self.token[..., None])[..., 0]

    @property
    def exact_chance(self) -> Tensor:
        """min(1, p / q) of the draft, `[B, R]`; 0 where q is 0."""
        p, q = self.own
        return torch.where(q > 0, p / q, 0.0).clamp(max=1.0)

    @property
    def left(self) -> Tensor:
        """(p - q)+, not normalised, `[B, R, V]`: what the exact rule leaves of p at a refusal."""
        if self.q is None:
            return self.p.scatter(-1, self.token[..., None], 0.0)
        return (self.p - self.q).clamp_min_(0)


class SiblingDecision(NamedTuple):
    """What a rule makes of `Siblings`.

    Attributes:
        chance: float `[B, R]`, with which the draft is accepted; may exceed 1.
        left: float `[B, R, V]`, what a refusal leaves of p, at least 0; need not sum to one. Where nothing is left, p stays.
            None: what the exact rule leaves, which is then computed only where it is needed.
        granted: float `[B, R]`, acceptance beyond the exact rule; None: none.
    """

    chance: Tensor
    left: Tensor | None = None
    granted: Tensor | None = None


SiblingRule = Callable[[Siblings], SiblingDecision]


@dataclass
class _SlotDecisions:
    """Of every draft, by its slot, `[B, T]` each: whether it stands once its parent does, whether it is tested then, and the
    acceptance granted to it; entry 0 is meaningless."""

    stands: Tensor
    examined: Tensor
    granted: Tensor


def verify_siblings(
    test: SiblingRule,
    probs: Tensor,
    draft: Draft,
    noise: Noise,
    relaxation: Tensor | None = None,
    budget: float | None = None,
) -> Verdict:
    """The verdict of a rule that tests siblings one after the other and, if all are refused, draws from what they leave of p.

    Args:
        test: of one draft behind each of some slots. It is asked again for the last slot that is accepted and, with a `budget`,
            of which it has to grant at most `room`, once more for all.
        probs, draft, noise, relaxation: see `AcceptanceRule`.
        budget: most relaxation of an image; None: no limit.

    Returns:
        The verdict; with `relaxation` where that is given.
    """
    judged, room = _judge(test, probs, draft, noise, None), None
    if budget is not None:
        assert relaxation is not None, "a budget needs what was granted so far"
        room = _rooms(judged.granted, draft.tree, (budget - relaxation).clamp_min(0))
        judged = _judge(test, probs, draft, noise, room)
    path, count, reached = followed(judged.stands, draft.tree)
    last = path.gather(1, count[:, None] - 1)
    left = _left_behind(test, probs, draft, last, room)
    verdict = Verdict(path, count, noise.at(last[:, 0]).draw(left, Purpose.RESIDUAL)[:, 0])
    if relaxation is None:
        return verdict
    parent = draft.tree.parents.clamp(min=0).expand_as(reached)
    spent = judged.granted * (judged.examined & reached.gather(1, parent))
    return replace(verdict, relaxation=spent[:, 1:].sum(1))


def _judge(test: SiblingRule, probs: Tensor, draft: Draft, noise: Noise, room: Tensor | None) -> _SlotDecisions:
    B, T, _ = probs.shape
    tree = draft.tree
    taken = torch.zeros(B, T, dtype=torch.bool, device=probs.device)
    stands, examined, granted = torch.zeros_like(taken), torch.zeros_like(taken), torch.zeros_like(probs[..., 0])
    p = probs
    for rank, slots in enumerate(tree.parents_of_rank):
        if rank == 0 and len(slots) < T:
            p = probs[:, slots]
        child = tree.children[..., slots, rank].expand(B, -1)
        siblings, there = _drafts_at(child, p, draft, room)
        tested = test(siblings)
        open_ = there & ~taken[:, slots]
        hit = (noise.branch(rank).uniform(Purpose.ACCEPT)[:, slots] < tested.chance) & open_
        # Slots without a draft of this rank write to entry 0.
        stands, examined = stands.scatter(1, child, hit), examined.scatter(1, child, open_)
        taken = taken.index_copy(1, slots, taken[:, slots] | hit)
        if tested.granted is not None:
            granted = granted.scatter(1, child, tested.granted * there)
        if rank + 1 < tree.widest:
            further = tree.parents_of_rank[rank + 1]
            kept = torch.searchsorted(slots, further)  # whoever has a child of the next rank has one of this
            p = _refused(siblings, tested, there, kept if len(further) < len(slots) else None)
    return _SlotDecisions(stands, examined, granted)


def _drafts_at(child: Tensor, p: Tensor, draft: Draft, room: Tensor | None) -> tuple[Siblings, Tensor]:
    """The drafts at slots `child` `[B, R]`, and bool `[B, R]`, where there is a valid one; `p` as in `Siblings`."""
    at = (child - 1).clamp(min=0)
    there = child > 0 if draft.valid is None else (child > 0) & draft.valid.gather(1, at)
    image = torch.arange(len(at), device=at.device)[:, None]
    q = None if draft.probs is None else draft.probs[image, at]
    soft = None
    if draft.soft is not None:
        soft = draft.soft[image, draft.tree.parents.clamp(min=0).expand(len(at), -1).gather(1, child)]
    return Siblings(p, q, draft.tokens.gather(1, at), child, None if room is None else room.gather(1, child), soft), there


def _refused(siblings: Siblings, tested: SiblingDecision, there: Tensor, rows: Tensor | None = None) -> Tensor:
    """What is left of p once these drafts are refused, normalised: of all rows, or of some."""
    left = tested.left
    if rows is not None:
        q = None if siblings.q is None else siblings.q[:, rows]
        siblings, there = siblings._replace(p=siblings.p[:, rows], q=q, token=siblings.token[:, rows]), there[:, rows]
        left = None if left is None else left[:, rows]
    if left is None:
        left = siblings.left
    total = left.sum(-1, keepdim=True)
    return torch.where(there[..., None] & (total > 0), left / total, siblings.p)


def _left_behind(test: SiblingRule, probs: Tensor, draft: Draft, slot: Tensor, room: Tensor | None) -> Tensor:
    """What all drafts behind a slot `[B, 1]` of each image leave of p, `[B, 1, V]`."""
    B, T, _ = probs.shape
    image = torch.arange(B, device=probs.device)[:, None]
    children, p = draft.tree.children.expand(B, T, -1)[image, slot], probs[image, slot]
    for rank in range(draft.tree.widest):
        siblings, there = _drafts_at(children[..., rank], p, draft, room)
        p = _refused(siblings, test(siblings), there)
    return p


def _rooms(granted: Tensor, tree: Tree, allowed: Tensor) -> Tensor:
    """What each draft may be granted, `[B, T]`, so that no path spends more than `allowed` `[B]`: tests are paid in the order
    in which they are made, those of elder siblings of the draft and of its ancestors first."""
    T = granted.shape[1]
    tested = tree.elders.float() + torch.eye(T, device=granted.device)
    tested[..., 0, :] = 0  # the root is no draft
    before = tree.ancestors.float() @ tested  # [.., T, T]: the tests that are made before a draft stands, its own included
    upto = (before.to(granted.dtype) @ granted[..., None])[..., 0]
    limit = allowed[:, None].to(granted.dtype)
    return torch.minimum(upto, limit) - torch.minimum(upto - granted, limit)


def followed(stands: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """The path `[B, A]` of accepted slots, their number `[B]`, and bool `[B, T]`, True at each of them.

    Args:
        stands: bool `[B, T]`, by slot; of siblings at most one. That of the root does not matter.
    """
    stands = stands.index_fill(1, torch.zeros(1, dtype=torch.int64, device=stands.device), True)
    if tree.chain:
        accepted = stands.cumprod(1).bool()
        return torch.arange(tree.longest, device=stands.device).expand_as(stands), accepted.sum(1), accepted
    accepted = (stands[:, None, :] | ~tree.ancestors).all(-1)  # itself and every ancestor stand
    return _path(accepted, tree), accepted.sum(1), accepted


def trace_path(slot: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """The path `[B, A]` to a slot `[B]` of each image, and the number of slots on it `[B]`."""
    accepted = tree.ancestors.expand(len(slot), -1, -1)[torch.arange(len(slot), device=slot.device), slot]
    return _path(accepted, tree), accepted.sum(1)


def _path(accepted: Tensor, tree: Tree) -> Tensor:
    """Accepted slots first. Stable: parents before children."""
    return accepted.to(torch.int64).argsort(dim=1, descending=True, stable=True)[:, : tree.longest]


def count_sibling_acceptance(draft: Draft, verdict: Verdict, active: Tensor) -> Tensor:
    """int64 `[longest, widest, 2]`: by the depth of an accepted slot and the rank of a child, how many had such a child, and
    how many times it was accepted too.

    Args:
        active: bool `[B]`, which images count.
    """
    tree = draft.tree
    B, T = len(draft.tokens), draft.tokens.shape[1] + 1
    on_path = torch.arange(verdict.path.shape[1], device=active.device) < verdict.count[:, None]
    reached = torch.zeros(B, T, dtype=torch.int64, device=active.device)
    reached = reached.scatter_add(1, verdict.path, (on_path & active[:, None]).long()) > 0
    children = tree.children.expand(B, T, tree.widest)
    there = (children > 0) & reached[..., None]
    if draft.valid is not None:
        there &= draft.valid.gather(1, (children - 1).clamp(min=0).flatten(1)).view_as(there)
    taken = there & reached.gather(1, children.flatten(1)).view_as(there)
    both = torch.stack([there, taken], -1).long()  # [B, T, widest, 2]
    table = torch.zeros(tree.longest, *both.shape[2:], dtype=torch.int64, device=both.device)
    return table.index_add_(0, tree.depth.expand(B, T).flatten(), both.flatten(0, 1))
