"""Growth of draft trees: their shape, how the children of a slot are chosen, and which candidates are kept.

A tree grows level by level on the device, without host synchronization, and all images get equally many slots.

Shape suffixes: B images, F slots of one level, E slots expanded so far, K children of a slot, C = E K candidates, S draft
tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.tree import Draft, Tree
from vargen.values import number_field, parse_float, short_repr, validate_fields

MAX_TREE_WIDTH = 256  # maximum number of tokens per pass
DEFAULT_SIBLING_RATES = (0.6, 0.14, 0.07, 0.04)  # acceptance rates of the first, second, ... sibling
_limit = partial(number_field, least=1, most=MAX_TREE_WIDTH - 1, is_integer=True)


@dataclass(frozen=True)
class DynamicTree:
    """A tree built for each image and pass: it grows level by level, and the best `nodes` of all candidates are kept.

    Li et al. 2024, EAGLE-2: each level expands the `frontier` most probable slots into `children` candidates each; then the
    most probable `nodes` of all candidates are kept. Children are never more probable than their parents, and ties go to
    parents and earlier siblings, so the kept slots form a tree.

    Args:
        nodes: number of draft tokens per pass.
        depth: maximum distance from the root.
        children: maximum number of children of a slot.
        frontier: number of slots expanded per level; None: `children`.
        acceptance: for sampled draft tokens, the acceptance rates of the first, second, ... sibling, each above 0 and with a
            sum below 1; the last rate applies to all further ranks. They determine what is expanded and kept.

    Raises:
        ValueError: if a value is out of range, or there are fewer candidates than `nodes`.
    """

    nodes: int = _limit(15)
    depth: int = _limit(4)
    children: int = _limit(4)
    frontier: int | None = _limit(None, optional=True)
    acceptance: tuple[float, ...] = DEFAULT_SIBLING_RATES

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.frontier is None:
            object.__setattr__(self, "frontier", self.children)
        rates = [parse_float(rate) for rate in self.acceptance] if isinstance(self.acceptance, list | tuple) else []
        if not rates or any(rate is None or not rate > 0 for rate in rates) or sum(rates) >= 1:  # type: ignore[arg-type]
            given = short_repr(self.acceptance)
            raise ValueError(f"acceptance must be rates in (0, 1), one for each rank, with a sum below 1, got {given}")
        object.__setattr__(self, "acceptance", tuple(rates))
        if self.nodes > self.num_expanded * self.children:
            raise ValueError(
                f"nodes must be at most the {self.num_expanded * self.children} candidates of {self.depth} levels with "
                f"{self.frontier} slots of {self.children} children, got {self.nodes}"
            )

    @property
    def conditional_rates(self) -> tuple[float, ...]:
        """Acceptance rate of a sibling by rank, given that all earlier siblings are rejected."""
        found, rejected = [], 1.0  # probability that all earlier siblings are rejected
        for rank in range(self.children):
            rate = self.acceptance[min(rank, len(self.acceptance) - 1)]
            found.append(min(rate / rejected, 0.99))
            rejected = max(rejected - rate, 0.01)
        return tuple(found)

    def expanded_per_level(self) -> list[int]:
        """Number of slots expanded at each depth, starting with the root."""
        assert self.frontier is not None
        found = [1]
        while len(found) < self.depth:
            found.append(min(self.frontier, found[-1] * self.children))
        return found

    @property
    def num_expanded(self) -> int:
        """Number of slots expanded per pass."""
        return sum(self.expanded_per_level())

    def limit(self, depth: int | None = None, children: int | None = None) -> DynamicTree:
        """Return the tree with at most `depth` levels and `children` children, and `nodes` limited to their candidates."""
        depth, children = min(self.depth, depth or self.depth), min(self.children, children or self.children)
        small = replace(self, depth=depth, children=children, nodes=1)
        return replace(small, nodes=min(self.nodes, small.num_expanded * children))


def complete_tree(branching: Sequence[int]) -> tuple[int, ...]:
    """Return the parents of a tree, level by level, in which each slot at depth d has `branching[d]` children."""
    parents, level = [-1], [0]
    for count in branching:
        first = len(parents)
        parents += [slot for slot in level for _ in range(count)]
        level = list(range(first, len(parents)))
    return tuple(parents)


class Children:
    """How the children of a slot are chosen: sampled without replacement. Another choice is a subclass.

    The K largest values of log q + Gumbel noise, in descending order (Kool et al. 2019).
    """

    def sample(self, q: Tensor, count: int, noise: Noise) -> tuple[Tensor, Tensor]:
        """Return the K children of each slot, int64 `[B, F, K]`, in order, and values that are 0 where there is no further one.

        Args:
            q: float32 `[B, F, V]`.
            noise: its position `[B, 1]` is that of all these children.
        """
        slots = noise.fold_in(torch.arange(q.shape[1], device=q.device))
        return slots.sample_without_replacement(q, count, Purpose.DRAFT)

    def score(self, q: Tensor, token: Tensor, value: Tensor, score: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the values of including and of expanding each child, `[B, F, K]` each.

        A sampled token must not influence whether it is itself in the tree. The value of including a child is therefore the
        probability that its earlier siblings are rejected, which depends on their q; only the value of expanding it depends on
        its own q.

        Args:
            score: `[B, F]`, that of expanding the slots.
            rates: float32 `[K]`, acceptance rate by rank, given that all earlier siblings are rejected.
        """
        own = q.gather(2, token)
        own = own / (1 - own.cumsum(-1) + own).clamp_min(1e-30)  # renormalized without the earlier siblings
        accepted = rates ** (1 - own.clamp(max=1.0))  # a certain token is accepted, others at the average rate
        rejected = (1 - accepted).log().cumsum(-1)
        keep = score[..., None] + torch.nn.functional.pad(rejected[..., :-1], (1, 0))
        return keep, keep + accepted.log()

    def probs(self, q: Tensor, tokens: Tensor, tree: Tree) -> Tensor | None:
        """Return the probabilities to record for draft tokens `[B, S]`, given q `[B, S, V]` of their parents; None: q is 1."""
        B, S = tokens.shape
        return exclude_earlier_siblings(q, tokens, tokens[:, None, :], tree.earlier_siblings[..., 1:, 1:].expand(B, S, S))


def exclude_earlier_siblings(q: Tensor, tokens: Tensor, siblings: Tensor, earlier: Tensor) -> Tensor:
    """Remove the earlier siblings of draft tokens `[B, S]` from q `[B, S, V]`, and renormalize.

    Args:
        siblings: tokens `[B, S, K]` or `[B, 1, K]`, which hold the siblings of each draft token.
        earlier: bool, `[B, S, K]` or `[S, K]`, which of them are earlier siblings.
    """
    own = tokens[..., None]
    rest = q.scatter(2, torch.where(earlier, siblings, own), 0.0).scatter(2, own, q.gather(2, own))
    return rest / rest.sum(-1, keepdim=True).clamp_min(1e-30)


@dataclass(frozen=True)
class Frontier:
    """The slots of the level to expand, and the tree of all slots expanded so far.

    Attributes:
        tokens: int64 `[B, F]`. The first level holds the roots.
        parent: int64 `[B, F]`, index of each slot's parent within the previous level; 0 for the root.
        tree: of all E slots expanded so far, level by level; the last F are those of this level.
        expanded_tokens: int64 `[B, E]`, their tokens.
        depth: distance from the root.
    """

    tokens: Tensor
    parent: Tensor
    tree: Tree
    expanded_tokens: Tensor
    depth: int


def grow_tree(
    expand: Callable[[Frontier], Tensor],
    shape: DynamicTree,
    children: Children,
    rates: Tensor,
    root: Tensor,
    noise: Noise,
    total: int,
) -> Draft:
    """Build a draft tree for each image.

    The candidates are numbered in the order of their parents: those of the expanded slot e are e K to e K + K - 1.

    Args:
        expand: returns q float32 `[B, F, V]` after each slot of a level; called once per level, from the root down.
        shape: number and arrangement of slots.
        children: how the children of a slot are chosen.
        rates: float32 `[K]`, `shape.conditional_rates`.
        root: int64 `[B]`, the last committed tokens.
        noise: of the pass; its position `[B, 1]` is that of the token after the root.
        total: number of tokens of the grid; slots past it are invalid.
    """
    B, K = len(root), shape.children
    number = torch.full((B, 1), -1, dtype=torch.int64, device=root.device)  # of each expanded slot among the candidates
    expanded = tokens = root[:, None]
    parent, exists = torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool)
    score = torch.zeros(B, 1, dtype=torch.float32, device=root.device)
    levels: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, existence and values of candidates
    rows: list[Tensor] = []  # q of expanded slots
    for depth, F in enumerate(shape.expanded_per_level()):
        if depth:
            chosen = _take_best(score, F)
            parent, number = chosen // K, torch.cat([number, chosen + (expanded.shape[1] - tokens.shape[1]) * K], 1)
            tokens, exists, score = (each.gather(1, chosen) for each in (levels[-1][0], levels[-1][1], score))
            expanded = torch.cat([expanded, tokens], 1)
        q = expand(Frontier(tokens, parent, Tree.batched(number // K, depth + 1, K), expanded, depth))
        token, value = children.sample(q, K, noise.shift(depth))
        keep, grow = children.score(q, token, value, score, rates)
        levels.append((token.flatten(1), ((value > 0) & exists[..., None]).flatten(1), keep.flatten(1)))
        score = grow.flatten(1)
        rows.append(q)
    drafted, valid, keep = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
    kept = _take_best(keep, shape.nodes)
    above = number.gather(1, kept // K)  # the candidate that is the parent of each; -1 for the root
    slots = torch.where(above < 0, 0, torch.searchsorted(kept, above) + 1)
    tree = Tree.batched(torch.nn.functional.pad(slots, (1, 0), value=-1), shape.depth + 1, K)
    drafted, valid = drafted.gather(1, kept), valid.gather(1, kept)
    valid &= noise.position + tree.depth[:, 1:] - 1 < total
    q = torch.cat(rows, 1)[torch.arange(B, device=root.device)[:, None], kept // K]
    return Draft(drafted, tree, children.probs(q, drafted, tree), valid)


def _take_best(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the largest scores of each row, in ascending order.

    Parents and earlier siblings come first and have at least equal scores, so a stable sort keeps a tree connected.
    """
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
