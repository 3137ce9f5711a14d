"""Rules of draft trees: siblings that are tested one after the other, and the exact rule that tests whole paths.

Shape suffixes: B images, T tokens fed in one pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.rules import acceptance_rule, gather_prob, uses_kernels
from vargen.decoding.tree import Draft, Verdict
from vargen.kernels.dispatch import is_eager_cpu


class DraftTokens(NamedTuple):
    """S draft tokens of each image: all of a chain, or one of a tree. Undefined where a tree has no such token.

    Attributes:
        p: float `[B, S, V]`, the target distribution that each is tested against: without rejected earlier siblings.
        q: float `[B, S, V]`, the distribution that each was sampled from; None: deterministic, q of the token is one.
        token: int64 `[B, S]`.
        depth: int64 `[B, S]` or `[S]`, distance from the root, from 1.
        unfiltered_probs: float `[B, S, V]`, the target distribution at temperature 1, for greedy sampling; see `Draft`.
        is_greedy: bool `[B]`, which images are sampled greedily; see `Draft`.
    """

    p: Tensor
    q: Tensor | None
    token: Tensor
    depth: Tensor
    unfiltered_probs: Tensor | None = None
    is_greedy: Tensor | None = None

    @property
    def p_and_q(self) -> tuple[Tensor, Tensor]:
        """Probabilities of the draft tokens under p and q, `[B, S]` each."""
        return gather_prob(self.p, self.token), gather_prob(self.q, self.token)

    @property
    def exact_accept_prob(self) -> Tensor:
        """Exact acceptance probability min(1, p / q) of the draft tokens, `[B, S]`; 0 where q is 0."""
        p, q = self.p_and_q
        return torch.where(q > 0, p / q, 0.0).clamp(max=1.0)

    @property
    def residual(self) -> Tensor:
        """Unnormalized residual (p - q)+ of the exact rule, `[B, S, V]`."""
        if self.q is None:
            return self.p.scatter(-1, self.token[..., None], 0.0)
        return (self.p - self.q).clamp_min_(0)


class SiblingDecision(NamedTuple):
    """Decision of a rule on a child of one slot of each image.

    Attributes:
        accept_prob: float `[B, 1]`; may exceed 1.
        residual: float `[B, 1, V]`, nonnegative, after a rejection; need not sum to one. Where it is zero, p is unchanged.
            None: the residual of the exact rule.
        relaxation: float `[B, 1]`, additional acceptance probability, which the budget limits; None: none.
    """

    accept_prob: Tensor
    residual: Tensor | None = None
    relaxation: Tensor | None = None


SiblingRule = Callable[[DraftTokens], SiblingDecision]


def verify_siblings(
    rule: SiblingRule, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor, budget: float | None = None
) -> Verdict:
    """Verify a draft by walking from the root: the first accepted child of a slot is the next slot of the path.

    A rejected child changes the distribution that its next sibling is tested against. Where all children are rejected, the next
    token is sampled from what is left of p. A chain is a tree with one child per slot.

    Args:
        rule: decides on one child. On a device it is called for every depth and rank, reached or not.
        probs, draft, noise, relaxation: see `AcceptanceRule`.
        budget: maximum relaxation per image; None: no limit.
    """
    B, T, _ = probs.shape
    tree, image = draft.tree, torch.arange(B, device=probs.device)
    children = tree.children.expand(B, T, -1)
    uniforms = [noise.fold_in(rank).uniform(Purpose.ACCEPT) for rank in range(tree.max_children)]
    slot = torch.zeros(B, dtype=torch.int64, device=probs.device)
    moves = torch.ones(B, dtype=torch.bool, device=probs.device)  # into a slot whose children are to be tested
    p, count, spent, path = probs[:, 0], torch.ones_like(slot), torch.zeros_like(relaxation), [slot]
    while len(path) < tree.max_path:
        waiting, after = moves, slot  # images without an accepted child
        for rank, uniform in enumerate(uniforms):
            child = children[image, slot, rank]
            tested = waiting & (child > 0)
            if draft.valid is not None:
                tested = tested & draft.valid[image, (child - 1).clamp(min=0)]
            decision = rule(drafted := _select_child(draft, p, slot, child))
            accept_prob = decision.accept_prob[:, 0]
            if decision.relaxation is not None:
                extra = decision.relaxation[:, 0]
                if budget is not None:
                    extra = torch.minimum(extra, (budget - relaxation - spent).clamp_min(0))
                accept_prob, spent = accept_prob + extra, spent + torch.where(tested, extra, 0.0)
            accepted = tested & (uniform[image, slot] < accept_prob)
            after, waiting = torch.where(accepted, child, after), waiting & ~accepted
            rest = drafted.residual[:, 0] if decision.residual is None else decision.residual[:, 0]
            total = rest.sum(1, keepdim=True)
            p = torch.where((tested & ~accepted)[:, None] & (total > 0), rest / total, p)
        moves = moves & ~waiting
        slot, count = after, count + moves
        p = torch.where(moves[:, None], probs[image, slot], p)
        path.append(slot)
        if is_eager_cpu(probs) and not moves.any():
            path += [slot] * (tree.max_path - len(path))
    next_token = noise.select_slot(slot).sample(p[:, None], Purpose.RESIDUAL)[:, 0]
    return Verdict(torch.stack(path, 1), count, next_token, relaxation=spent)


def _select_child(draft: Draft, p: Tensor, slot: Tensor, child: Tensor) -> DraftTokens:
    """Select the draft token at slot `child` `[B]` of each image, a child of `slot` `[B]`, tested against p `[B, V]`."""
    image, at = torch.arange(len(child), device=child.device)[:, None], (child - 1).clamp(min=0)[:, None]
    return DraftTokens(
        p=p[:, None],
        q=None if draft.probs is None else draft.probs[image, at],
        token=draft.tokens[image, at],
        depth=draft.tree.depth.expand(len(child), -1)[image, child[:, None]],
        unfiltered_probs=None if draft.unfiltered_probs is None else draft.unfiltered_probs[image, slot[:, None]],
        is_greedy=draft.is_greedy,
    )


@acceptance_rule(exact=True, topologies=("chain", "tree"), requires=("independent-per-pass",), leaves_first=True)
def traversal(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Accept the first path that passes, starting from the leaves (Weng et al. 2025, traversal verification).

    Each slot has a reach probability r, 1 for the root. For a child it is min(1, r p(x) / q(x)), with r and p of its parent. A
    slot is accepted, with all its ancestors, if u < r; its children are tested first. When a child is rejected, its parent gets
    p' = norm((r p - q)+) and r' = S / (S + 1 - r), where S is the sum of (r p - q)+. On a chain this is block verification (Sun
    et al. 2024).

    A path is inspected to its leaf before it is rejected, so all draft tokens must be resampled in every pass, each branch with
    its own uniforms. Reach probabilities do not depend on the rule's uniforms, so one ordered sweep over the slots computes
    them, and then the first slot that passes is selected. Arguments: see `AcceptanceRule`.
    """
    B, T, _ = probs.shape
    tree, image = draft.tree, torch.arange(B, device=probs.device)
    if uses_kernels(probs):
        from vargen.kernels.verify_traversal import verify_traversal

        given = (probs, draft.tokens, draft.probs, draft.valid, tree.children, tree.parents, tree.depth, tree.postorder)
        return Verdict(*verify_traversal(*given, tree.max_path, *noise.key))
    parents = tree.parents.expand(B, T)
    residual, reach = probs.clone(), torch.ones_like(probs[..., 0])
    for slot in range(1, T):
        parent, token = parents[:, slot], draft.tokens[:, slot - 1, None]
        p, r = residual[image, parent], reach[image, parent]
        reachable = p * r[:, None]
        own = reachable.gather(1, token)[:, 0]
        if draft.probs is None:
            accept_prob, rest = own, reachable.scatter(1, token, 0.0)
        else:
            q = draft.probs[:, slot - 1]
            accept_prob, rest = own / q.gather(1, token)[:, 0], (reachable - q).clamp_min_(0)
        total = rest.sum(1)
        fixed = torch.where((total > 0) | (r < 1), total / (total + (1 - r)), 1.0)  # p equals q: the child is never rejected
        rest = torch.where(total[:, None] > 0, rest / total[:, None], p)
        accept_prob = accept_prob.clamp(max=1.0).nan_to_num(0.0)  # q is 0 for tokens that were not sampled
        if draft.valid is not None:
            valid = draft.valid[:, slot - 1]
            accept_prob, fixed = torch.where(valid, accept_prob, 0.0), torch.where(valid, fixed, r)
            rest = torch.where(valid[:, None], rest, p)
        reach[:, slot] = accept_prob
        residual[image, parent], reach[image, parent] = rest, fixed
    slots = torch.arange(T, device=probs.device)
    passes = noise.fold_in(slots).uniform(Purpose.ACCEPT) < reach
    passes[:, 0] = True
    last = torch.where(passes, tree.postorder, T).argmin(1)
    path, count = tree.trace(last)
    next_token = noise.select_slot(last).sample(residual[image, last][:, None], Purpose.RESIDUAL)[:, 0]
    return Verdict(path=path, count=count, next_token=next_token)
