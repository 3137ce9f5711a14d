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

Rates = Sequence[Sequence[float]]  # by depth and rank; the last depth's hold for all below


def best_tree(rates: Rates, nodes: int, depth: int | None = None) -> tuple[int, ...]:
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
    return _by_level(parents)


def _by_level(parents: list[int]) -> tuple[int, ...]:
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


def expected_tokens(parents: Sequence[int], rates: Rates) -> float:
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
        rates: see `best_tree`.
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
            parents = best_tree(rates, fed - 1, steps)
            if len(parents) == fed:
                rate = beside * expected_tokens(parents, rates) / (seconds[fed] + drafting(parents))
                if rate > most:
                    found, most = parents, rate
    return found
