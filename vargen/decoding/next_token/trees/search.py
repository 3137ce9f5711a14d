"""Search for the tree to draft: the shape that commits the most tokens, and the size that commits the most per second.

Sequoia (Chen et al. 2024, section 3.1) assumes that the sibling of rank b is accepted with probability a_b, wherever its parent
is in the tree, and finds the best tree of a given size by dynamic programming. The probability of reaching a slot is the
product of these along its path. The expected number of committed tokens is the sum of the reach probabilities, and no slot is
more likely to be reached than its parent or its earlier siblings. The best tree therefore consists of the slots with the
highest reach probabilities and can be built greedily. The same holds if the probabilities depend on depth.
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
from vargen.decoding.next_token.trees.shapes import AutoTree, compute_depths, rates_by_rank

SiblingRates = Sequence[Sequence[float]]  # by depth and rank; those of the last depth apply to all deeper levels


def search_best_tree(rates: SiblingRates, nodes: int, depth: int | None = None) -> tuple[int, ...]:
    """Return the parents of the tree of `nodes` draft tokens that commits the most tokens in expectation.

    Args:
        rates: acceptance rate of the sibling of each rank given that its parent is accepted, by depth.
        nodes: number of draft tokens, at least 0; limited by `depth` and the number of ranks.
        depth: maximum distance from the root; None: no limit.
    """

    def offer(parent: int, reach: float, step: int, rank: int) -> None:
        row = rates[min(step, len(rates) - 1)]
        if rank < len(row) and (depth is None or step < depth):
            heapq.heappush(heap, (-reach * row[rank], step, parent, rank, reach))

    parents = [-1]
    # Negative reach probability; depth of the parent, its slot, rank of the child, reach probability of the parent.
    heap: list[tuple[float, int, int, int, float]] = []
    offer(0, 1.0, 0, 0)
    while heap and len(parents) <= nodes:
        negative, step, parent, rank, above = heapq.heappop(heap)
        parents.append(parent)
        offer(parent, above, step, rank + 1)
        offer(len(parents) - 1, -negative, step + 1, 0)
    return _sort_by_level(parents)


def _sort_by_level(parents: list[int]) -> tuple[int, ...]:
    """Reorder the slots of a tree level by level, keeping the order of siblings."""
    depth = compute_depths(parents)
    order, place = [0], {0: 0}
    for step in range(1, max(depth) + 1):
        level = [slot for slot in range(len(parents)) if depth[slot] == step]
        for slot in sorted(level, key=lambda slot: (place[parents[slot]], slot)):
            place[slot] = len(order)
            order.append(slot)
    return (-1, *(place[parents[slot]] for slot in order[1:]))


def compute_expected_tokens(parents: Sequence[int], rates: SiblingRates) -> float:
    """Expected number of tokens that a pass over the tree commits, including the one after the accepted path."""
    reach, depth, children = [1.0], compute_depths(parents), [0] * len(parents)
    for parent in parents[1:]:
        row = rates[min(depth[parent], len(rates) - 1)]
        rank, children[parent] = children[parent], children[parent] + 1
        reach.append(reach[parent] * (row[rank] if rank < len(row) else 0.0))
    return sum(reach)


_TRACKED_DEPTHS = 4  # depths with separate rates; deeper slots use those of the last
_EMA_DECAY = 0.9
_PRIOR_WEIGHT = 8.0  # weight of the prior acceptance rates, in slots
_OPTIMISTIC_RATES = (0.85, 0.08, 0.03)  # acceptance rates at which drafting is worth a trial


@dataclass
class SiblingRateEstimate:
    """Expected tokens of the best tree of each size (`AcceptanceEstimate`), from recent acceptance by depth and rank."""

    policy: AutoTree
    depth: dict[int, int] = field(default_factory=dict)  # maximum depth of trees, by the number of tokens fed
    offered: Tensor = field(init=False)  # [depths, ranks]
    accepted: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rates = rates_by_rank(self.policy.acceptance, self.policy.children)
        self.offered = torch.full((_TRACKED_DEPTHS, len(rates)), _PRIOR_WEIGHT, device="cpu", dtype=torch.float32)
        self.accepted = self.offered * torch.tensor(rates, device="cpu", dtype=torch.float32)

    @property
    def rates(self) -> list[list[float]]:
        """Acceptance rates of siblings by depth and rank.

        Rates decrease with rank, so that the path of first children reaches the full depth of the best tree.
        """
        found = (self.accepted / self.offered).tolist()
        for row in found:
            for rank in range(1, len(row)):
                row[rank] = min(row[rank], 0.999 * row[rank - 1])
        return found

    def tree(self, width: int) -> tuple[int, ...]:
        """Return the parents of the best tree with `width` slots."""
        return search_best_tree(self.rates, width - 1, self.depth.get(width, self.policy.depth))

    def expected_tokens(self, width: int) -> float:
        return compute_expected_tokens(self.tree(width), self.rates)

    def optimistic_tokens(self, width: int) -> float:
        rates = [_OPTIMISTIC_RATES[: self.policy.children]]
        return compute_expected_tokens(search_best_tree(rates, width - 1, self.depth.get(width, self.policy.depth)), rates)

    def observe(self, num_committed: Tensor, active: Tensor, width: int) -> None:
        """Do nothing: the counts do not distinguish siblings. See `record`."""

    def record(self, table: Tensor, images: int) -> None:
        """Update the rates with the table of `count_sibling_acceptance` for a pass with `images` unfinished images."""
        for mine, seen in ((self.offered, table[..., 0]), (self.accepted, table[..., 1])):
            rows = torch.arange(len(seen)).clamp(max=_TRACKED_DEPTHS - 1)
            mine *= _EMA_DECAY
            mine[:, : seen.shape[1]] += torch.zeros(_TRACKED_DEPTHS, seen.shape[1], dtype=torch.float32).index_add_(
                0, rows, seen / max(images, 1)
            )
        self.offered.clamp_(min=1e-3)


class TreeController:
    """Selects the tree of each pass.

    Attributes:
        parents: of the slots of the next pass; the root alone if drafting does not pay off.

    Args:
        policy: limits.
        seconds: of a target pass, by the number of tokens it feeds, including 1.
        drafting: seconds to draft a tree.
        choose_once: whether to select once, as on a GPU.
    """

    is_shared = True  # see `rows.insert_rows`

    def __init__(
        self,
        policy: AutoTree,
        seconds: Mapping[int, float],
        drafting: Callable[[tuple[int, ...]], float] = lambda parents: 0.0,
        choose_once: bool = False,
    ):
        estimate, steps = SiblingRateEstimate(policy), dict(seconds)

        def tokens_per_second(width: int, depth: int) -> float:
            estimate.depth[width] = depth
            return estimate.expected_tokens(width) / (seconds[width] + drafting(estimate.tree(width)))

        for width in seconds:
            if width > 1:
                depths = range(1, min(policy.depth, width - 1) + 1)
                rates = {depth: tokens_per_second(width, depth) for depth in depths}
                estimate.depth[width] = max(rates, key=lambda depth: rates[depth])
                steps[width] = seconds[width] + drafting(estimate.tree(width))
        self.estimate, self.choose_once = estimate, choose_once
        self.in_place = choose_once  # it never changes then; see `graphs.find_replaced`
        self._width_controller = WidthController(steps, estimate, warmup_passes=0 if choose_once else 4, switch_margin=1.1)
        self.parents = self._choose()

    def _choose(self) -> tuple[int, ...]:
        width = self._width_controller.choose()
        return (-1,) if width == 1 else self.estimate.tree(width)

    def observe(self, step: Step, total: int) -> None:
        """Update the estimate with the result of a pass; `total`: number of tokens of the grid."""
        if self.choose_once or len(self.parents) == 1:
            return
        active = step.noise.position[:, 0] < total
        self.estimate.record(count_sibling_acceptance(step.draft, step.verdict, active), int(active.sum()))
        self.parents = self._choose()
