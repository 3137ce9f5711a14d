"""Acceptance rules: pure, batched functions from the target's laws and a draft to a `Verdict`.

Shape suffixes: B images, T fed tokens of one pass, A slots of the longest path, V vocabulary, G members of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.types import Draft, TokenModel, Verdict
from vargen.values import real, shown, whole

_Rule = TypeVar("_Rule", bound=Callable[..., Any])


def acceptance_rule(*, exact: bool, topologies: tuple[str, ...] = ("chain",)) -> Callable[[_Rule], _Rule]:
    """Say of a rule (a function or a class of them) whether it keeps the target's law, and what it can judge."""

    def mark(rule: _Rule) -> _Rule:
        rule.exact, rule.topologies = exact, topologies  # type: ignore[attr-defined]
        return rule

    return mark


@acceptance_rule(exact=True, topologies=("chain", "tree"))
def same_noise(law: Tensor, draft: Draft, noise: Noise, spent: Tensor) -> Verdict:
    """Exact, and the sequential picture itself: a draft stands where it equals what its position's noise draws.

    With the Gumbel noise G fixed per image and position, the token at a position *is* argmax(log p + G) (Maddison et al. 2014);
    a draft is accepted exactly when it is that token. With an empty draft this is sequential sampling. The draft's law does not
    matter. Arguments: see `AcceptanceRule`.
    """
    drawn = noise.tokens(law)  # [B, T]: what follows each slot
    tree = draft.tree
    agrees = drawn.new_ones(drawn.shape).bool()
    agrees[:, 1:] = draft.tokens == drawn[:, tree.parents[1:]]
    if tree.chain:
        count = agrees.cumprod(1).sum(1)
        path = torch.arange(tree.longest, device=law.device).expand_as(drawn)
    else:
        accepted = (agrees[:, None, :] | ~tree.ancestors).all(-1)  # itself and every ancestor agree
        count = accepted.sum(1)
        # Stable: accepted slots first, parents before children.
        path = accepted.to(drawn.dtype).argsort(dim=1, descending=True, stable=True)[:, : tree.longest]
    last = path.gather(1, count[:, None] - 1)
    return Verdict(path=path, count=count, next_token=drawn.gather(1, last)[:, 0])


@acceptance_rule(exact=True)
def exact(law: Tensor, draft: Draft, noise: Noise, spent: Tensor) -> Verdict:
    """Speculative sampling: accept a draft d while u < p(d) / q(d), draw norm((p - q)+) at the first refusal.

    Leviathan et al. 2023, algorithm 1; Chen et al. 2023, theorem 1. What follows a fully accepted draft is drawn from p. The
    output follows the target's law if q is the law the draft was drawn from. Arguments: see `AcceptanceRule`.
    """
    p, q = chances(law, draft)
    coins = noise.uniform(Purpose.ACCEPT)[:, :-1]
    return judged(coins * q < p, law, draft, noise)


def chances(law: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    """What p and q gave each drafted token, `[B, T - 1]` each; q of a deterministic draft is 1."""
    index = draft.tokens[..., None]
    p = law[:, :-1].gather(2, index)[..., 0]
    return p, torch.ones_like(p) if draft.law is None else draft.law.gather(2, index)[..., 0]


def drafted_law(law: Tensor, draft: Draft) -> Tensor:
    """q as `[B, T - 1, V]`, one-hot for a deterministic draft."""
    return draft.law if draft.law is not None else torch.zeros_like(law[:, 1:]).scatter_(2, draft.tokens[..., None], 1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+, not normalised, `[..., V]`; p itself where nothing is left, that is where p equals q up to rounding."""
    left = (p - q).clamp_min_(0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def judged(accepted: Tensor, law: Tensor, draft: Draft, noise: Noise, spent: Tensor | None = None) -> Verdict:
    """The verdict of a chain whose drafts passed or failed their own tests, `accepted` bool `[B, T - 1]`.

    Commits up to the first failure, where the residual is drawn; behind the last draft, and where an image has none, the
    target's law is.
    """
    B, T, _ = law.shape
    if draft.valid is not None:
        accepted = accepted & draft.valid
    count = 1 + accepted.cumprod(1).sum(1)
    row, at = count - 1, torch.arange(B, device=law.device)
    target = law[at, row]
    if T > 1:
        slot = row.clamp(max=T - 2)
        refused = row < T - 1
        if draft.valid is not None:
            refused = refused & draft.valid[at, slot]
        target = torch.where(refused[:, None], residual(target, drafted_law(law, draft)[at, slot]), target)
    next_token = noise.at(row).draw(target[:, None], Purpose.RESIDUAL)[:, 0]
    path = torch.arange(T, device=law.device).expand(B, T)
    return Verdict(path=path, count=count, next_token=next_token, spent=spent)


@acceptance_rule(exact=False)
@dataclass(frozen=True)
class Grouped:
    """Relaxed: a draft is judged by the mass of a group of tokens around it instead of by its own.

    Grouped speculative decoding (So et al. 2025, GSD, section 3): the `size` tokens whose probabilities under the present p are
    nearest in rank to the draft's, half of them above and half below, less those that differ by `delta` or more in
    probability or by `distance` or more in code. Accepts while u < min(1, sum p / sum q) over draft and group, keeps the draft
    itself, and draws norm((p - q)+) at a refusal. The output does not follow the target's law: each acceptance granted beyond
    min(1, p / q) is relaxation, reported per image. The sums can also fall *below* p / q; then p / q counts, because refusing
    more would bias the output for nothing. Tokens that the filters leave without probability join no group.

    Args:
        size: most tokens in a group besides the draft, 1 or more.
        delta: in (0, 1]; 1 switches this filter off.
        distance: squared Euclidean distance of codebook vectors (unit vectors: 0 to 4); None switches this filter off.
        budget: most relaxation per image, 0 or more; past it the rule is exact. None: no limit.
        codes: float `[V, C]` codebook; `for_model` fills it in.

    Raises:
        ValueError: for values outside these ranges.
    """

    size: int = 14
    delta: float = 0.15
    distance: float | None = None
    budget: float | None = None
    codes: Tensor | None = None

    def __post_init__(self) -> None:
        size, delta, distance, budget = whole(self.size, 1), real(self.delta), real(self.distance), real(self.budget)
        if size is None:
            raise ValueError(f"size, the tokens of a group, must be a whole number of at least 1, got {shown(self.size)}")
        if delta is None or not 0 < delta <= 1:
            raise ValueError(f"delta must be in (0, 1], where 1 groups whatever the probabilities, got {shown(self.delta)}")
        if self.distance is not None and (distance is None or not distance > 0):
            raise ValueError(f"distance must be above 0, or None to group whatever the codes, got {shown(self.distance)}")
        if self.budget is not None and (budget is None or not budget >= 0):
            raise ValueError(f"budget must be at least 0 (exact), or None for no limit, got {shown(self.budget)}")
        for name, value in (("size", size), ("delta", delta), ("distance", distance), ("budget", budget)):
            object.__setattr__(self, name, value)

    def for_model(self, model: TokenModel) -> Grouped:
        """This rule with the model's codebook.

        Raises:
            ValueError: if `distance` is set and the model has none.
        """
        codes = getattr(model, "codes", None)
        if self.distance is not None and codes is None:
            raise ValueError("distance needs a model with a codebook; pass distance=None to group whatever the codes")
        return replace(self, codes=codes)

    def members(self, p: Tensor, tokens: Tensor) -> Tensor:
        """int64 `[B, T - 1, G]` groups of `tokens` `[B, T - 1]` under laws `p`; the draft itself stands for who is left out."""
        own = p.gather(2, tokens[..., None])
        others = p.scatter(2, tokens[..., None], -1.0)
        below = min((self.size + 1) // 2, p.shape[-1] - 1)
        above = min(self.size // 2, p.shape[-1] - 1)
        low, index = torch.where(others <= own, others, -1.0).topk(below, dim=2)
        high, higher = torch.where(others > own, -others, -2.0).topk(above, dim=2)  # the smallest of the larger
        value, member = torch.cat([low, -high], 2), torch.cat([index, higher], 2)
        joins = (value > 0) & (value <= 1) & ((value - own).abs() < self.delta)
        if self.distance is not None and self.codes is not None:
            gap = self.codes[member] - self.codes[tokens][..., None, :]
            joins &= gap.square().sum(-1) < self.distance
        return torch.where(joins, member, tokens[..., None])

    def __call__(self, law: Tensor, draft: Draft, noise: Noise, spent: Tensor) -> Verdict:
        """See `AcceptanceRule`; `spent` counts against the budget."""
        p, q = chances(law, draft)
        member = self.members(law[:, :-1], draft.tokens)
        joined = member != draft.tokens[..., None]
        group_p = p + (law[:, :-1].gather(2, member) * joined).sum(2)
        group_q = q if draft.law is None else q + (draft.law.gather(2, member) * joined).sum(2)
        chance = torch.where(q > 0, p / q, 0.0).clamp(max=1.0)
        granted = (torch.where(group_q > 0, group_p / group_q, 0.0).clamp(max=1.0) - chance).clamp_min(0)
        if draft.valid is not None:
            granted = granted * draft.valid
        total = granted.cumsum(1)
        if self.budget is not None:
            total = torch.minimum(total, (self.budget - spent).clamp_min(0)[:, None])
            granted = total.diff(dim=1, prepend=torch.zeros_like(total[:, :1]))
        accepted = noise.uniform(Purpose.ACCEPT)[:, :-1] < chance + granted
        verdict = judged(accepted, law, draft, noise)
        examined = verdict.count.clamp(max=accepted.shape[1])[:, None] - 1  # the refused draft was examined too
        return replace(verdict, spent=total.gather(1, examined.clamp_min(0))[:, 0] if total.shape[1] else spent * 0)
