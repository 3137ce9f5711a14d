"""Routes of policies through the trees of all routed videos: their scores and their seconds by the cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch

from vargen.decoding import QuantileThreshold, RandomShare, RelativeThreshold, Stride
from vargen.decoding.video.policies import Policy, PolicyState
from vargen.decoding.video.stats import BlockCosts, BlockRecord
from vargen.models.block_router import BlockRouter
from vargen.training.router import RouterConfig, RouterPairs, fit_router
from vargen.training.routing_tree import later_gains

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
FOLDS, CHANCES = 8, 16
RIDGE = RouterConfig().ridge


@dataclass
class Tree:
    """Scores of the tree of a prompt, by block and history, and statistics of its drafts from block 1 on.

    Attributes:
        first: routing score of block 0. stranger: mean score of the target's video under the next prompt.
    """

    target: list[np.ndarray]
    draft: list[np.ndarray]
    routing: list[np.ndarray]
    statistics: list[np.ndarray]
    first: float
    stranger: float

    @property
    def blocks(self) -> int:
        return len(self.target)

    def pairs(self) -> RouterPairs:
        """What a router is fitted to."""
        gains = np.concatenate(later_gains(self.target, self.draft)).astype(np.float32)
        return RouterPairs(np.concatenate(self.statistics), gains)


@dataclass(frozen=True)
class Route:
    """A path through a tree: the mean score of its blocks, and its seconds."""

    quality: float
    seconds: float


@dataclass(frozen=True)
class Prices:
    """Seconds: of the parts of a block, and of ranking a draft. steps: of both models. exit_step: 0 if a small model drafts."""

    block: BlockCosts
    rank: float
    steps: int
    exit_step: int = 0

    def seconds(self, drafted: Sequence[bool], accepted: Sequence[bool], ranked: bool, scored: bool) -> float:
        """Seconds of a video, by block. Caches are updated lazily, as in `BlockGenerator`."""
        cost, total = self.block, len(drafted) * self.block.decode
        total += scored * len(drafted) * (cost.preview or 0.0)
        waiting_target = waiting_draft = 0
        for tried, taken in zip(drafted, accepted, strict=True):
            if tried and not self.exit_step:
                total += (waiting_draft + self.steps) * cost.draft
                waiting_draft = 0
            if self.exit_step or not taken:
                total += (waiting_target + (self.exit_step if taken else self.steps)) * cost.target
                waiting_target = 0
            total += tried * (ranked * self.rank + scored * cost.score)
            waiting_target, waiting_draft = waiting_target + 1, waiting_draft + 1
        return total


Scores = Callable[[Tree, int, int], float]  # of the draft of a block after a history; higher is better


def walk(tree: Tree, state: PolicyState, score: Scores | None, prices: Prices, ranked: bool) -> Route:
    """Route a video by a policy."""
    row, qualities, drafted, accepted = 0, [], [], []
    for n in range(tree.blocks):
        tried = n > 0 and state.should_draft(n)
        value = score(tree, n, row) if tried and score is not None else None
        taken = tried and state.should_accept(n, value)
        outcome = "forced" if not tried else "accepted" if taken else "rejected"
        state.observe(BlockRecord(n, 0, outcome=outcome, score=tree.first if n == 0 else value))  # type: ignore[arg-type]
        qualities.append((tree.draft if taken else tree.target)[n][row])
        drafted.append(tried)
        accepted.append(taken)
        row = 2 * row + taken if n else 0
    scored = score is not None and not ranked
    return Route(float(np.mean(qualities)), prices.seconds(drafted, accepted, ranked, scored))


def best_routes(trees: Sequence[Tree], prices: Prices) -> list[list[Route]]:
    """For a range of prices of a second, the best of all paths of each tree: what no router can exceed at that time."""
    every = []
    for tree in trees:
        routes = []
        for choices in product((False, True), repeat=tree.blocks - 1):
            taken, row, qualities = [False, *choices], 0, []
            for n, choice in enumerate(taken):
                qualities.append((tree.draft if choice else tree.target)[n][row])
                row = 2 * row + choice if n else 0
            routes.append(Route(float(np.mean(qualities)), prices.seconds(taken, taken, False, False)))
        every.append(routes)
    return [
        [max(routes, key=lambda r: r.quality - p * r.seconds) for routes in every] for p in (0, *np.geomspace(0.05, 200, 40))
    ]


def fitted_scores(rounds: Sequence[Sequence[Tree]], known: bool) -> Scores:
    """Negative gains predicted by routers that never saw the video.

    Args:
        rounds: trees of the same prompts, by seed.
        known: whether a router is fitted to the prompt's videos of other seeds; otherwise to those of other prompts alone.
    """
    pairs = [[tree.pairs() for tree in trees] for trees in rounds]
    found: dict[int, list[np.ndarray]] = {}
    for part in range(len(rounds) if known else FOLDS):
        if known:
            fit, judged = [each for k, row in enumerate(pairs) if k != part for each in row], list(rounds[part])
        else:
            fit = [each for row in pairs for i, each in enumerate(row) if i % FOLDS != part]
            judged = [tree for trees in rounds for tree in trees[part::FOLDS]]
        router = BlockRouter()
        fit_router(router, fit, RIDGE)
        with torch.no_grad():
            for tree in judged:
                found[id(tree)] = [-router.predict_gain(torch.from_numpy(each)).numpy() for each in tree.statistics]
    return lambda tree, n, row: float(found[id(tree)][n - 1][row])


def mean_routes(routes: Sequence[Route], count: int) -> list[Route]:
    """The mean route of each of `count` prompts, whose routes follow each other by seed."""
    several = [routes[i::count] for i in range(count)]
    return [Route(float(np.mean([r.quality for r in s])), float(np.mean([r.seconds for r in s]))) for s in several]


Policies = dict[str, list[list[Route]]]  # by name, for each setting, the route of each prompt


def routes_of(rounds: Sequence[Sequence[Tree]], prices: Prices) -> Policies:
    """The mean routes of all policies on trees of the same prompts, by seed."""
    trees, count = [tree for each in rounds for tree in each], len(rounds[0])

    def table(score: Scores) -> np.ndarray:
        return np.array([score(t, n, row) for t in trees for n in range(1, t.blocks) for row in range(len(t.target[n]))])

    def cuts(score: Scores, ranked: bool) -> list[list[Route]]:
        edges = [np.inf, *np.quantile(table(score), [1 - share for share in SHARES[1:]])]
        return [[walk(t, PolicyState(edge), score, prices, ranked) for t in trees] for edge in edges]

    def policy(kind: Policy, score: Scores | None = None) -> list[Route]:
        return [walk(t, kind.start(i % count), score, prices, False) for i, t in enumerate(trees)]

    def seen(tree: Tree, n: int, row: int) -> float:
        return float(tree.routing[n][row])

    offsets = [np.mean([t.routing[n].mean() - t.first for t in trees]) for n in range(trees[0].blocks)]
    found: Policies = {"learned": cuts(fitted_scores(rounds, known=True), True)} if len(rounds) > 1 else {}
    found |= {
        "learned, new prompts": cuts(fitted_scores(rounds, known=False), True),
        "stride": [policy(Stride(every)) for every in (1, 2, 3, 4, 5, 6)],
        "chance": [],
    }
    for share in SHARES:
        draws = [walk(t, RandomShare(share).start(1000 * k + i), None, prices, False)
                 for k in range(CHANCES) for i, t in enumerate(trees)]  # fmt: skip
        found["chance"].append(draws)
    if not prices.exit_step:
        found["threshold"] = cuts(seen, False)
        found["relative to block 0"] = [policy(RelativeThreshold(delta), seen) for delta in (-2, -1, -0.5, 0, 0.5, 1, 2, 4)]
        found["relative to block 0 and position"] = cuts(
            lambda t, n, row: float(t.routing[n][row] - t.first - offsets[n]), False
        )
        found["quantile"] = [policy(QuantileThreshold(1 - share), seen) for share in SHARES]
    gain: Scores = lambda t, n, row: float(t.draft[n][row] - t.target[n][row])  # noqa: E731
    free = replace(prices, rank=0.0)
    edges = np.quantile(table(gain), [1 - share for share in SHARES])
    found["oracle, next block"] = [[walk(t, PolicyState(edge), gain, free, True) for t in trees] for edge in edges]
    found["oracle, whole video"] = best_routes(trees, free)
    return {name: [mean_routes(routes, count) for routes in settings] for name, settings in found.items()}
