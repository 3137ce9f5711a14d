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

from vargen.decoding.next_token.draft import Draft, Tree, Verdict
from vargen.decoding.noise import Noise, Purpose


class Siblings(NamedTuple):
    """The children of one rank after R of the fed slots. Entries of slots without such a child are undefined.

    Attributes:
        p: float `[B, R, V]`, the target distribution after each slot, updated for rejected earlier siblings; sums to one.
        q: float `[B, R, V]`, the distribution that the child was sampled from; None: deterministic, q of the child is one.
        token: int64 `[B, R]`, the draft token.
        slot: int64 `[B, R]` or `[1, R]`, the slot of the child, 0 if there is none.
        room: float `[B, R]`, maximum relaxation that this test may spend; None: no limit.
        soft: float `[B, R, V]`, the target distribution after each slot at temperature 1, for greedy sampling; see `Draft`.
        kept: bool `[B, R]`, for chains only; see `Draft`.
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
        """Probabilities of the draft token under p and q, `[B, R]` each."""
        p = self.p.gather(-1, self.token[..., None])[..., 0]
        return p, torch.ones_like(p) if self.q is None else self.q.gather(-1, self.token[..., None])[..., 0]

    @property
    def exact_chance(self) -> Tensor:
        """Exact acceptance probability min(1, p / q) of the draft token, `[B, R]`; 0 where q is 0."""
        p, q = self.own
        return torch.where(q > 0, p / q, 0.0).clamp(max=1.0)

    @property
    def left(self) -> Tensor:
        """Unnormalized residual (p - q)+ of the exact rule, `[B, R, V]`."""
        if self.q is None:
            return self.p.scatter(-1, self.token[..., None], 0.0)
        return (self.p - self.q).clamp_min_(0)


class SiblingDecision(NamedTuple):
    """Decision of a rule on `Siblings`.

    Attributes:
        chance: float `[B, R]`, acceptance probability; may exceed 1.
        left: float `[B, R, V]`, nonnegative residual after a rejection; need not sum to one. Where it is zero, p is unchanged.
            None: the residual of the exact rule, which is then computed only where needed.
        granted: float `[B, R]`, acceptance probability beyond the exact rule; None: none.
    """

    chance: Tensor
    left: Tensor | None = None
    granted: Tensor | None = None


SiblingRule = Callable[[Siblings], SiblingDecision]


@dataclass
class _SlotDecisions:
    """Decisions on every draft token by slot, `[B, T]` each.

    Given that its parent is accepted: whether the token is accepted, whether it is tested, and the relaxation spent on it.
    Entry 0 is undefined.
    """

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
    """Verify a draft by testing siblings in order. If all children of a slot are rejected, sample from the residual of p.

    Args:
        test: decides on one child of each of several slots. It is called again for the last accepted slot. With a `budget`, it
            is called once more for all slots and must spend at most `room` on each.
        probs, draft, noise, relaxation: see `AcceptanceRule`.
        budget: maximum relaxation per image; None: no limit.

    Returns:
        The verdict, with `relaxation` set if that argument is given.
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
    for rank, slots in enumerate(tree.slots_with_rank):
        if rank == 0 and len(slots) < T:
            p = probs[:, slots]
        child = tree.children[..., slots, rank].expand(B, -1)
        siblings, there = _drafts_at(child, p, draft, room)
        tested = test(siblings)
        open_ = there & ~taken[:, slots]
        hit = (noise.branch(rank).uniform(Purpose.ACCEPT)[:, slots] < tested.chance) & open_
        # Slots without a child of this rank write to entry 0.
        stands, examined = stands.scatter(1, child, hit), examined.scatter(1, child, open_)
        taken = taken.index_copy(1, slots, taken[:, slots] | hit)
        if tested.granted is not None:
            granted = granted.scatter(1, child, tested.granted * there)
        if rank + 1 < tree.max_children:
            further = tree.slots_with_rank[rank + 1]
            kept = torch.searchsorted(slots, further)  # a slot with a child of the next rank also has one of this rank
            p = _refused(siblings, tested, there, kept if len(further) < len(slots) else None)
    return _SlotDecisions(stands, examined, granted)


def _drafts_at(child: Tensor, p: Tensor, draft: Draft, room: Tensor | None) -> tuple[Siblings, Tensor]:
    """Return the children at slots `child` `[B, R]`, and whether each is valid, bool `[B, R]`; `p` as in `Siblings`."""
    at = (child - 1).clamp(min=0)
    there = child > 0 if draft.valid is None else (child > 0) & draft.valid.gather(1, at)
    image = torch.arange(len(at), device=at.device)[:, None]
    q = None if draft.probs is None else draft.probs[image, at]
    soft = None
    if draft.unfiltered_probs is not None:
        soft = draft.unfiltered_probs[image, draft.tree.parents.clamp(min=0).expand(len(at), -1).gather(1, child)]
    return Siblings(p, q, draft.tokens.gather(1, at), child, None if room is None else room.gather(1, child), soft), there


def _refused(siblings: Siblings, tested: SiblingDecision, there: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return p after the rejection of these children, normalized, for all rows or only for `rows`."""
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
    """Return p after the rejection of all children of a slot `[B, 1]` of each image, `[B, 1, V]`."""
    B, T, _ = probs.shape
    image = torch.arange(B, device=probs.device)[:, None]
    children, p = draft.tree.children.expand(B, T, -1)[image, slot], probs[image, slot]
    for rank in range(draft.tree.max_children):
        siblings, there = _drafts_at(children[..., rank], p, draft, room)
        p = _refused(siblings, test(siblings), there)
    return p


def _rooms(granted: Tensor, tree: Tree, allowed: Tensor) -> Tensor:
    """Maximum relaxation of each draft token, `[B, T]`, such that no path spends more than `allowed` `[B]`.

    The budget is spent in the order of the tests: earlier siblings of a token and of its ancestors come first.
    """
    T = granted.shape[1]
    tested = tree.earlier_siblings.float() + torch.eye(T, device=granted.device)
    tested[..., 0, :] = 0  # the root is not a draft token
    before = tree.ancestors.float() @ tested  # [.., T, T]: the tests up to the acceptance of a draft token, its own included
    upto = (before.to(granted.dtype) @ granted[..., None])[..., 0]
    limit = allowed[:, None].to(granted.dtype)
    return torch.minimum(upto, limit) - torch.minimum(upto - granted, limit)


def followed(stands: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """Return the accepted path `[B, A]`, its number of slots `[B]`, and a mask of its slots, bool `[B, T]`.

    Args:
        stands: bool `[B, T]`, which slots pass; at most one per group of siblings. The entry of the root is ignored.
    """
    stands = stands.index_fill(1, torch.zeros(1, dtype=torch.int64, device=stands.device), True)
    if tree.is_chain:
        accepted = stands.cumprod(1).bool()
        return torch.arange(tree.max_path, device=stands.device).expand_as(stands), accepted.sum(1), accepted
    accepted = (stands[:, None, :] | ~tree.ancestors).all(-1)  # the slot and all its ancestors pass
    return _path(accepted, tree), accepted.sum(1), accepted


def trace_path(slot: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """Return the path `[B, A]` to a slot `[B]` of each image, and its number of slots `[B]`."""
    accepted = tree.ancestors.expand(len(slot), -1, -1)[torch.arange(len(slot), device=slot.device), slot]
    return _path(accepted, tree), accepted.sum(1)


def _path(accepted: Tensor, tree: Tree) -> Tensor:
    """List accepted slots first. The sort is stable, so parents precede children."""
    return accepted.to(torch.int64).argsort(dim=1, descending=True, stable=True)[:, : tree.max_path]


def count_sibling_acceptance(draft: Draft, verdict: Verdict, active: Tensor) -> Tensor:
    """Count offered and accepted children by the depth of their accepted parent and their rank: int64 `[longest, widest, 2]`.

    Args:
        active: bool `[B]`, which images to count.
    """
    tree = draft.tree
    B, T = len(draft.tokens), draft.tokens.shape[1] + 1
    on_path = torch.arange(verdict.path.shape[1], device=active.device) < verdict.count[:, None]
    reached = torch.zeros(B, T, dtype=torch.int64, device=active.device)
    reached = reached.scatter_add(1, verdict.path, (on_path & active[:, None]).long()) > 0
    children = tree.children.expand(B, T, tree.max_children)
    there = (children > 0) & reached[..., None]
    if draft.valid is not None:
        there &= draft.valid.gather(1, (children - 1).clamp(min=0).flatten(1)).view_as(there)
    taken = there & reached.gather(1, children.flatten(1)).view_as(there)
    both = torch.stack([there, taken], -1).long()  # [B, T, widest, 2]
    table = torch.zeros(tree.max_path, *both.shape[2:], dtype=torch.int64, device=both.device)
    return table.index_add_(0, tree.depth.expand(B, T).flatten(), both.flatten(0, 1))
