"""Rules of draft trees: siblings that are tested in order, and the exact rule that tests whole paths.

Shape suffixes: B images, T tokens fed in one pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.rules import acceptance_rule, gather_prob
from vargen.decoding.tree import Draft, Verdict
from vargen.kernels import ops


class DraftTokens(NamedTuple):
    """S draft tokens of each image: all of a chain, or one of a tree. Undefined where a tree has no such token."""

    p: Tensor  # float [B, S, V], the target distribution that each is tested against: without rejected earlier siblings
    q: Tensor | None  # float [B, S, V], the distribution that each was sampled from; None: deterministic, q of the token is one
    token: Tensor  # int64 [B, S]
    depth: Tensor  # int64 [B, S] or [S], distance from the root, from 1
    unfiltered_probs: Tensor | None = None  # float [B, S, V], the target distribution at temperature 1; see `Draft`
    is_greedy: Tensor | None = None  # bool [B], which images are sampled greedily; see `Draft`

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
    """Decision of a rule on a child of one node of each image.

    After a rejection, the next sibling is tested against the normalized residual, or p itself where the residual is zero.
    """

    accept_prob: Tensor  # float [B, 1]; may exceed 1
    residual: Tensor | None = None  # float [B, 1, V], nonnegative; None: that of the exact rule
    relaxation: Tensor | None = None  # float [B, 1], additional acceptance probability, which the budget limits


SiblingRule = Callable[[DraftTokens], SiblingDecision]


def verify_siblings(
    rule: SiblingRule, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor, budget: float | None = None
) -> Verdict:
    """Verify a draft by walking from the root: the first accepted child of a node is the next node of the path.

    A rejected child changes the distribution p that its next sibling is tested against. Where no child is accepted, the walk
    ends, and the next token is sampled from what is left of p. A chain is a tree with one child per node.

    Args:
        rule: decides on one child. On a device it is called for every depth and rank, reached or not.
        probs, draft, noise, relaxation: see `AcceptanceRule`.
        budget: maximum relaxation per image; None: no limit.
    """
    B, T, _ = probs.shape
    tree, image = draft.tree, torch.arange(B, device=probs.device)
    children = tree.children.expand(B, T, -1)
    uniforms = [noise.fold_in(rank).uniform(Purpose.ACCEPT) for rank in range(tree.max_children)]
    node = torch.zeros(B, dtype=torch.int64, device=probs.device)
    is_walking = torch.ones(B, dtype=torch.bool, device=probs.device)
    p, count, spent, path = probs[:, 0], torch.ones_like(node), torch.zeros_like(relaxation), [node]
    while len(path) < tree.max_path:
        waiting, following = is_walking, node  # images without an accepted child so far, and the accepted child of the others
        for rank, uniform in enumerate(uniforms):
            child = children[image, node, rank]
            tested = waiting & (child > 0)
            if draft.valid is not None:
                tested = tested & draft.valid[image, (child - 1).clamp(min=0)]
            decision = rule(drafted := _select_child(draft, p, node, child))
            accept_prob = decision.accept_prob[:, 0]
            if decision.relaxation is not None:
                extra = decision.relaxation[:, 0]
                if budget is not None:
                    extra = torch.minimum(extra, (budget - relaxation - spent).clamp_min(0))
                accept_prob, spent = accept_prob + extra, spent + torch.where(tested, extra, 0.0)
            accepted = tested & (uniform[image, node] < accept_prob)
            following, waiting = torch.where(accepted, child, following), waiting & ~accepted
            rest = (drafted.residual if decision.residual is None else decision.residual)[:, 0]
            total = rest.sum(1, keepdim=True)
            p = torch.where((tested & ~accepted)[:, None] & (total > 0), rest / total, p)
        is_walking = is_walking & ~waiting
        node, count = following, count + is_walking
        p = torch.where(is_walking[:, None], probs[image, node], p)
        path.append(node)
        if (walking := ops.host_values(is_walking)) is not None and not any(walking):
            break
    path += [node] * (tree.max_path - len(path))
    next_token = noise.select_slot(node).sample(p[:, None], Purpose.RESIDUAL)[:, 0]
    return Verdict(torch.stack(path, 1), count, next_token, relaxation=spent)


def _select_child(draft: Draft, p: Tensor, node: Tensor, child: Tensor) -> DraftTokens:
    """Select the draft token at node `child` `[B]` of each image, a child of `node` `[B]`, tested against p `[B, V]`."""
    image, at = torch.arange(len(child), device=child.device)[:, None], (child - 1).clamp(min=0)[:, None]
    return DraftTokens(
        p=p[:, None],
        q=None if draft.probs is None else draft.probs[image, at],
        token=draft.tokens[image, at],
        depth=draft.tree.depth.expand(len(child), -1)[image, child[:, None]],
        unfiltered_probs=None if draft.unfiltered_probs is None else draft.unfiltered_probs[image, node[:, None]],
        is_greedy=draft.is_greedy,
    )


@acceptance_rule(exact=True, topologies=("chain", "tree"), requires=("independent-per-pass",), leaves_first=True)
def traversal(probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
    """Accept the first path that passes, starting from the leaves (Weng et al. 2025, traversal verification).

    Each node has a reach probability r, 1 for the root. For a child it is min(1, r p(x) / q(x)), with r and p of its parent. A
    node is accepted, with all its ancestors, if u < r; its children are tested first. When a child is rejected, its parent gets
    p' = norm((r p - q)+) and r' = S / (S + 1 - r), where S is the sum of (r p - q)+. On a chain this is block verification (Sun
    et al. 2024).

    A path is inspected to its leaf before it is rejected, so all draft tokens must be resampled in every pass, each branch with
    its own uniforms. Reach probabilities do not depend on the rule's uniforms, so one ordered sweep over the nodes computes
    them, and then the first node that passes is selected. Arguments: see `AcceptanceRule`.
    """
    B, T, _ = probs.shape
    tree, image = draft.tree, torch.arange(B, device=probs.device)
    if (found := ops.verify_traversal(probs, draft, noise)) is not None:
        return Verdict(*found)
    parents = tree.parents.expand(B, T)
    residual, reach = probs.clone(), torch.ones_like(probs[..., 0])  # p and r of each node
    for node in range(1, T):
        parent, token = parents[:, node], draft.tokens[:, node - 1, None]
        p, r = residual[image, parent], reach[image, parent]
        reachable = p * r[:, None]
        own = reachable.gather(1, token)[:, 0]
        if draft.probs is None:
            accept_prob, rest = own, reachable.scatter(1, token, 0.0)
        else:
            q = draft.probs[:, node - 1]
            accept_prob, rest = own / q.gather(1, token)[:, 0], (reachable - q).clamp_min_(0)
        total = rest.sum(1)
        left = torch.where((total > 0) | (r < 1), total / (total + (1 - r)), 1.0)  # p equals q: the child is never rejected
        rest = torch.where(total[:, None] > 0, rest / total[:, None], p)
        accept_prob = accept_prob.clamp(max=1.0).nan_to_num(0.0)  # q is 0 for tokens that were not sampled
        if draft.valid is not None:
            valid = draft.valid[:, node - 1]
            accept_prob, left = torch.where(valid, accept_prob, 0.0), torch.where(valid, left, r)
            rest = torch.where(valid[:, None], rest, p)
        reach[:, node] = accept_prob
        residual[image, parent], reach[image, parent] = rest, left
    passes = noise.fold_in(torch.arange(T, device=probs.device)).uniform(Purpose.ACCEPT) < reach
    passes[:, 0] = True
    last = torch.where(passes, tree.postorder, T).argmin(1)
    next_token = noise.select_slot(last).sample(residual[image, last][:, None], Purpose.RESIDUAL)[:, 0]
    return Verdict(*tree.trace(last), next_token)
