"""Sibling by sibling: what rules have in common that judge the drafts behind a token one after the other, on any tree.

A rule says what it makes of one draft behind every fed slot (`SiblingTest`); here the drafts of one rank, first, second, ...,
are tested at all slots at once, whether or not the slots will be reached, so that no step waits for a decision: as many rounds
as any slot has children. Chains are trees whose slots have one child.

Shape suffixes: B images, T fed tokens of one pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vargen.decoding.draft import Draft, Tree, Verdict
from vargen.decoding.noise import Noise, Purpose


class Siblings(NamedTuple):
    """The drafts of one rank, one behind every fed slot; where a slot has none, what stands here does not matter.

    Attributes:
        p: float `[B, T, V]`, the target's probabilities behind each slot, less what the refusal of elder siblings left out;
            sums to one.
        q: float `[B, T, V]`, the probabilities that the draft was drawn with; None: it was not drawn, so its own is one.
        token: int64 `[B, T]`, the draft.
        slot: int64 `[B, T]` or `[1, T]`, the slot that it is fed at, 0 where there is none.
        room: float `[B, T]`, most relaxation that this test may grant; None: no limit.
    """

    p: Tensor
    q: Tensor | None
    token: Tensor
    slot: Tensor
    room: Tensor | None = None

    @property
    def own(self) -> tuple[Tensor, Tensor]:
        """What p and q give the draft itself, `[B, T]` each."""
        p = self.p.gather(-1, self.token[..., None])[..., 0]
        return p, torch.ones_like(p) if self.q is None else self.q.gather(-1, self.token[..., None])[..., 0]

    @property
    def exact_chance(self) -> Tensor:
        """min(1, p / q) of the draft, `[B, T]`; 0 where q is 0."""
        p, q = self.own
        return torch.where(q > 0, p / q, 0.0).clamp(max=1.0)

    @property
    def left(self) -> Tensor:
        """(p - q)+, not normalised, `[B, T, V]`: what the exact rule leaves of p at a refusal."""
        if self.q is None:
            return self.p.scatter(-1, self.token[..., None], 0.0)
        return (self.p - self.q).clamp_min_(0)


class Tested(NamedTuple):
    """What a rule makes of `Siblings`.

    Attributes:
        chance: float `[B, T]`, with which the draft is accepted; may exceed 1.
        left: float `[B, T, V]`, what a refusal leaves of p, at least 0; need not sum to one. Where nothing is left, p stays.
        granted: float `[B, T]`, acceptance beyond the exact rule; None: none.
    """

    chance: Tensor
    left: Tensor
    granted: Tensor | None = None


SiblingTest = Callable[[Siblings], Tested]


@dataclass
class _Judged:
    """Of every draft, by its slot, `[B, T]` each: whether it stands once its parent does, whether it is tested then, and the
    acceptance granted to it; entry 0 is meaningless. Of every slot, what its drafts leave of p `[B, T, V]`."""

    stands: Tensor
    examined: Tensor
    granted: Tensor
    left: Tensor


def sibling_by_sibling(
    test: SiblingTest,
    probs: Tensor,
    draft: Draft,
    noise: Noise,
    relaxation: Tensor | None = None,
    budget: float | None = None,
) -> Verdict:
    """The verdict of a rule that tests siblings one after the other and, if all are refused, draws from what they leave of p.

    Args:
        test: of one draft behind each slot. With a `budget` it is asked twice, and has to grant at most `room`.
        probs, draft, noise, relaxation: see `AcceptanceRule`.
        budget: most relaxation of an image; None: no limit.

    Returns:
        The verdict; with `relaxation` where the test grants any.
    """
    judged = _judge(test, probs, draft, noise, None)
    if budget is not None:
        assert relaxation is not None, "a budget needs what was granted so far"
        room = _rooms(judged.granted, draft.tree, (budget - relaxation).clamp_min(0))
        judged = _judge(test, probs, draft, noise, room)
    verdict, reached = verdict_of(judged.stands, judged.left, draft, noise)
    if relaxation is None:
        return verdict
    parent = draft.tree.parents.clamp(min=0).expand_as(reached)
    spent = judged.granted * (judged.examined & reached.gather(1, parent))
    return replace(verdict, relaxation=spent[:, 1:].sum(1))


def _judge(test: SiblingTest, probs: Tensor, draft: Draft, noise: Noise, room: Tensor | None) -> _Judged:
    B, T, _ = probs.shape
    tree = draft.tree
    left = probs
    taken = torch.zeros(B, T, dtype=torch.bool, device=probs.device)
    stands, examined, granted = torch.zeros_like(taken), torch.zeros_like(taken), torch.zeros_like(probs[..., 0])
    for rank in range(tree.widest):
        slot = tree.children[..., rank].expand(B, T)
        there = slot > 0
        if draft.valid is not None:
            there = there & draft.valid.gather(1, (slot - 1).clamp(min=0))
        siblings = _rank(left, draft, slot, room)
        coin = noise.branch(rank).uniform(Purpose.ACCEPT)
        tested = test(siblings)
        hit = (coin < tested.chance) & there & ~taken
        # Slots without a draft of this rank write to entry 0.
        stands = stands.scatter(1, slot, hit)
        examined = examined.scatter(1, slot, there & ~taken)
        if tested.granted is not None:
            granted = granted.scatter(1, slot, tested.granted * there)
        taken = taken | hit
        total = tested.left.sum(-1, keepdim=True)
        left = torch.where(there[..., None] & (total > 0), tested.left / total, left)
    return _Judged(stands, examined, granted, left)


def _rank(left: Tensor, draft: Draft, slot: Tensor, room: Tensor | None) -> Siblings:
    """The drafts at slots `[B, T]`."""
    at = (slot - 1).clamp(min=0)
    q = None
    if draft.probs is not None:
        q = draft.probs[torch.arange(len(at), device=at.device)[:, None], at]
    return Siblings(left, q, draft.tokens.gather(1, at), slot, None if room is None else room.gather(1, slot))


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


def verdict_of(stands: Tensor, left: Tensor, draft: Draft, noise: Noise) -> tuple[Verdict, Tensor]:
    """The verdict where it is known of every draft whether it stands once it is reached, and which slots are accepted.

    Args:
        stands: bool `[B, T]`, by slot; of siblings at most one. That of the root does not matter.
        left: float `[B, T, V]`, what the next token is drawn from if a slot is the last that is accepted.

    Returns:
        The verdict, and bool `[B, T]`, True at accepted slots, the root included.
    """
    path, count, accepted = followed(stands, draft.tree)
    last = path.gather(1, count[:, None] - 1)[:, 0]
    row = left[torch.arange(len(left), device=left.device), last]
    next_token = noise.at(last).draw(row[:, None], Purpose.RESIDUAL)[:, 0]
    return Verdict(path=path, count=count, next_token=next_token), accepted


def followed(stands: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """The path `[B, A]` of accepted slots, their number `[B]`, and bool `[B, T]`, True at each of them.

    Args:
        stands: bool `[B, T]`; see `verdict_of`.
    """
    stands = stands.index_fill(1, torch.zeros(1, dtype=torch.int64, device=stands.device), True)
    if tree.chain:
        accepted = stands.cumprod(1).bool()
        return torch.arange(tree.longest, device=stands.device).expand_as(stands), accepted.sum(1), accepted
    accepted = (stands[:, None, :] | ~tree.ancestors).all(-1)  # itself and every ancestor stand
    return _path(accepted, tree), accepted.sum(1), accepted


def path_to(slot: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """The path `[B, A]` to a slot `[B]` of each image, and the number of slots on it `[B]`."""
    accepted = tree.ancestors.expand(len(slot), -1, -1)[torch.arange(len(slot), device=slot.device), slot]
    return _path(accepted, tree), accepted.sum(1)


def _path(accepted: Tensor, tree: Tree) -> Tensor:
    """Accepted slots first. Stable: parents before children."""
    return accepted.to(torch.int64).argsort(dim=1, descending=True, stable=True)[:, : tree.longest]


def offered_and_accepted(draft: Draft, verdict: Verdict, active: Tensor) -> Tensor:
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
