"""Which tree to draft: the shape that commits most tokens, and the size that commits most of them a second.

Sequoia (Chen et al. 2024, section 3.1) takes it that the sibling of rank b is the accepted one with a probability a_b, wherever
its parent is in the tree, and finds the best tree of a size by dynamic programming. A slot is reached with the product of the
probabilities on the way to it, so a tree commits the sum of these in the mean, and no slot is reached more often than its
parent or its elder siblings. The best tree is therefore that of the slots that are reached most often, found one by one; the
same holds if the probabilities depend on the depth.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vargen.decoding.next_token.acceptance.siblings import count_sibling_acceptance
from vargen.decoding.next_token.draft import Step
from vargen.decoding.next_token.draft_length import WidthController
from vargen.decoding.next_token.trees.shapes import AutoTree

Rates = Sequence[Sequence[float]]  # by depth and rank; the last depth's hold for all below


def search_best_tree(rates: Rates, nodes: int, depth: int | None = None) -> tuple[int, ...]:
    """Parents of the tree of so many drafts that commits most tokens.

    Args:
        rates: how often the sibling of each rank is the accepted one where its parent was accepted, at each depth.
        nodes: drafts, 0 or more; fewer where `depth` and the ranks do not hold so many.
        depth: most steps from the root; None: no limit.
    """

    def offer(parent: int, reach: float, step: int, rank: int) -> None:
        row = rates[min(step, len(rates) - 1)]
        if rank < len(row) and (depth is None or step < depth):
            heapq.heappush(heap, (-reach * row[rank], step, parent, rank, reach))

    parents = [-1]
    # How often it is reached, negative; depth of its parent, which one that is, its rank, how often the parent is reached.
    heap: list[tuple[float, int, int, int, float]] = []
    offer(0, 1.0, 0, 0)
    while heap and len(parents) <= nodes:
        negative, step, parent, rank, above = heapq.heappop(heap)
        parents.append(parent)
        offer(parent, above, step, rank + 1)
        offer(len(parents) - 1, -negative, step + 1, 0)
    return _sort_by_level(parents)


def _sort_by_level(parents: list[int]) -> tuple[int, ...]:
    """The same tree with its slots level by level, those of one parent in their order."""
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    order, place = [0], {0: 0}
    for step in range(1, max(depth) + 1):
        level = [slot for slot in range(len(parents)) if depth[slot] == step]
        for slot in sorted(level, key=lambda slot: (place[parents[slot]], slot)):
            place[slot] = len(order)
            order.append(slot)
    return (-1, *(place[parents[slot]] for slot in order[1:]))


def compute_expected_tokens(parents: Sequence[int], rates: Rates) -> float:
    """Tokens that a pass over the tree commits in the mean, the one behind the accepted path included."""
    reach, depth, children = [1.0], [0], [0] * len(parents)
    for parent in parents[1:]:
        row = rates[min(depth[parent], len(rates) - 1)]
        rank, children[parent] = children[parent], children[parent] + 1
        reach.append(reach[parent] * (row[rank] if rank < len(row) else 0.0))
        depth.append(depth[parent] + 1)
    return sum(reach)


def tree_by_cost(
    rates: Rates,
    seconds: Mapping[int, float],
    drafting: Callable[[tuple[int, ...]], float] = lambda parents: 0.0,
    depth: int | None = None,
    beside: float = 1.0,
) -> tuple[int, ...]:
    """Parents of the tree that commits most tokens a second: a chain, or the root alone, where more does not pay.

    Args:
        rates: see `search_best_tree`.
        seconds: of a pass of the target, by the tokens it feeds; 1 is among them.
        drafting: seconds that drafting a tree takes.
        depth: most steps from the root.
        beside: of a step that drafts, what its passes take.
    """
    deepest = max(seconds) - 1 if depth is None else depth
    found: tuple[int, ...] = (-1,)
    most = 1 / seconds[1]
    for fed in sorted(seconds):
        for steps in range(1, min(deepest, fed - 1) + 1):
            parents = search_best_tree(rates, fed - 1, steps)
            if len(parents) == fed:
                rate = beside * compute_expected_tokens(parents, rates) / (seconds[fed] + drafting(parents))
                if rate > most:
                    found, most = parents, rate
    return found


FED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # tokens of a pass that are tried
_DEPTHS = 4  # whose rates are told apart; deeper slots have those of the last
_MEMORY = 0.9
_WEIGHT = 8.0  # slots that the acceptance which is taken for granted at first counts as
_HOPED = (0.85, 0.08, 0.03)  # acceptance that is worth a try


@dataclass
class Ranks:
    """The tokens that the best tree of a size commits (`AcceptanceEstimate`), with recent acceptance by depth and rank."""

    policy: AutoTree
    depth: dict[int, int] = field(default_factory=dict)  # by the tokens that are fed, the most that their trees may have
    offered: Tensor = field(init=False)  # [depths, ranks]
    accepted: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rates = [self.policy.acceptance[min(rank, len(self.policy.acceptance) - 1)] for rank in range(self.policy.children)]
        self.offered = torch.full((_DEPTHS, len(rates)), _WEIGHT, device="cpu")
        self.accepted = self.offered * torch.tensor(rates, device="cpu")

    @property
    def rates(self) -> list[list[float]]:
        """How often a sibling is the accepted one, by depth and rank; a younger one never more often than its elder, so that
        first children reach the depth of the best tree."""
        found = (self.accepted / self.offered).tolist()
        for row in found:
            for rank in range(1, len(row)):
                row[rank] = min(row[rank], 0.999 * row[rank - 1])
        return found

    def tree(self, fed: int) -> tuple[int, ...]:
        """Parents of the best tree of so many slots."""
        return search_best_tree(self.rates, fed - 1, self.depth.get(fed, self.policy.depth))

    def tokens(self, fed: int) -> float:
        return compute_expected_tokens(self.tree(fed), self.rates)

    def promising(self, fed: int) -> float:
        rates = [_HOPED[: self.policy.children]]
        return compute_expected_tokens(search_best_tree(rates, fed - 1, self.depth.get(fed, self.policy.depth)), rates)

    def observe(self, count: Tensor, active: Tensor, fed: int) -> None:
        """Counts do not tell siblings apart; see `see`."""

    def see(self, table: Tensor, images: int) -> None:
        """What `count_sibling_acceptance` counted in a pass of so many unfinished images."""
        for mine, seen in ((self.offered, table[..., 0]), (self.accepted, table[..., 1])):
            rows = torch.arange(len(seen)).clamp(max=_DEPTHS - 1)
            mine *= _MEMORY
            mine[:, : seen.shape[1]] += torch.zeros(_DEPTHS, seen.shape[1]).index_add_(0, rows, seen / max(images, 1))
        self.offered.clamp_(min=1e-3)


class TreeController:
    """The tree of the next pass.

    Args:
        policy: limits.
        seconds: of a pass of the target, by the tokens it feeds; 1 is among them.
        drafting: seconds that drafting a tree takes.
        settled: whether to choose once, as on a GPU.
    """

    def __init__(
        self,
        policy: AutoTree,
        seconds: Mapping[int, float],
        drafting: Callable[[tuple[int, ...]], float] = lambda parents: 0.0,
        settled: bool = False,
    ):
        ranks, steps = Ranks(policy), dict(seconds)
        for fed in seconds:
            if fed > 1:  # how deep a tree of this size may be, so that what its levels cost is worth it
                depths = range(1, min(policy.depth, fed - 1) + 1)
                rates = {depth: self._rate(ranks, fed, depth, seconds, drafting) for depth in depths}
                ranks.depth[fed] = max(rates, key=lambda depth: rates[depth])
                steps[fed] = seconds[fed] + drafting(ranks.tree(fed))
        self.ranks, self.settled = ranks, settled
        self.choice = WidthController(steps, ranks, probes=0 if settled else 4, margin=1.1)
        self.parents = self._chosen()

    @staticmethod
    def _rate(
        ranks: Ranks, fed: int, depth: int, seconds: Mapping[int, float], drafting: Callable[[tuple[int, ...]], float]
    ) -> float:
        ranks.depth[fed] = depth
        return ranks.tokens(fed) / (seconds[fed] + drafting(ranks.tree(fed)))

    def _chosen(self) -> tuple[int, ...]:
        fed = self.choice.next()
        return (-1,) if fed == 1 else self.ranks.tree(fed)

    def next(self) -> tuple[int, ...]:
        """Parents of the next pass; the root alone where drafting does not pay."""
        return self.parents

    def observe(self, step: Step, total: int) -> None:
        """See what a pass made of the tree; `total`: tokens of the grid."""
        if self.settled or len(self.parents) == 1:
            return
        active = step.noise.position[:, 0] < total
        self.ranks.see(count_sibling_acceptance(step.draft, step.verdict, active), int(active.sum()))
        self.parents = self._chosen()


class AlwaysTree:
    """The same tree in every pass."""

    def __init__(self, parents: tuple[int, ...]):
        self.parents = parents

    def next(self) -> tuple[int, ...]:
        return self.parents

    def observe(self, step: Step, total: int) -> None: ...


def sizes(policy: AutoTree) -> list[int]:
    """Tokens of a pass that are tried."""
    return [fed for fed in FED if fed <= policy.nodes] + [policy.nodes + 1]
