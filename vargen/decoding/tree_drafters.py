"""Draft trees: their shape, their growth, and the trained heads that propose them (EAGLE, Medusa).

A tree grows level by level on the device, without host synchronization, and all images get equally many nodes. A head is
trained on the target's features, and gets those of the tokens that the last pass committed.

Shape suffixes: B slots of the engine, R rows of the target (B, times two with CFG), F nodes of one level, E nodes expanded so
far, K children of a node, C = E K candidates, S draft tokens, A nodes of an accepted path, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from vargen.decoding.interfaces import AutoregressiveHead, Drafter, DraftHead, ParallelHeads, TokenModel, require_same_tokens
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.token_pass import TokenState
from vargen.decoding.tree import Draft, Output, PassResult, Tree
from vargen.kernels import ops
from vargen.values import number_field, short_repr, validate_fields

MAX_TREE_WIDTH = 256  # maximum number of tokens per pass
# Of sampled draft tokens: how often the first, second, ... sibling is accepted, and all further ones. They decide what a tree
# expands and keeps.
ACCEPTANCE_RATES = (0.6, 0.14, 0.07, 0.04)
_limit = partial(number_field, least=1, most=MAX_TREE_WIDTH - 1, is_integer=True)


@dataclass(frozen=True)
class DynamicTree:
    """A tree built for each image and pass: it grows level by level, and the best `nodes` of all candidates are kept.

    Li et al. 2024, EAGLE-2: each level expands the `frontier` most probable nodes into `children` candidates each; then the
    most probable `nodes` of all candidates are kept. Children are never more probable than their parents, and ties go to
    parents and earlier siblings, so what is kept is a tree.

    Args:
        nodes: number of draft tokens per pass.
        depth: maximum distance from the root.
        children: maximum number of children of a node.
        frontier: number of nodes expanded per level; None: `children`.

    Raises:
        ValueError: if a value is out of range, or there are fewer candidates than `nodes`.
    """

    nodes: int = _limit(15)
    depth: int = _limit(4)
    children: int = _limit(4)
    frontier: int | None = _limit(None, optional=True)

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.frontier is None:
            object.__setattr__(self, "frontier", self.children)
        if self.nodes > self.num_expanded * self.children:
            raise ValueError(
                f"nodes must be at most the {self.num_expanded * self.children} candidates of {self.depth} levels with "
                f"{self.frontier} nodes of {self.children} children, got {self.nodes}"
            )

    @property
    def conditional_rates(self) -> tuple[float, ...]:
        """Acceptance rate of a sibling by rank, given that all earlier siblings are rejected."""
        found, rejected = [], 1.0  # probability that all earlier siblings are rejected
        for rank in range(self.children):
            rate = ACCEPTANCE_RATES[min(rank, len(ACCEPTANCE_RATES) - 1)]
            found.append(min(rate / rejected, 0.99))
            rejected = max(rejected - rate, 0.01)
        return tuple(found)

    def expanded_per_level(self) -> list[int]:
        """Number of nodes expanded at each depth, starting with the root."""
        found = [1]
        while len(found) < self.depth:
            found.append(min(self.frontier or self.children, found[-1] * self.children))
        return found

    @property
    def num_expanded(self) -> int:
        """Number of nodes expanded per pass."""
        return sum(self.expanded_per_level())

    def limit(self, depth: int, children: int) -> DynamicTree:
        """Return the tree with at most `depth` levels and `children` children, and `nodes` limited to their candidates."""
        depth, children = min(self.depth, depth), min(self.children, children)
        small = replace(self, depth=depth, children=children, nodes=1)
        return replace(small, nodes=min(self.nodes, small.num_expanded * children))


class Children:
    """How the children of a node are chosen: sampled without replacement. Another choice is a subclass."""

    def sample(self, q: Tensor, count: int, noise: Noise) -> tuple[Tensor, Tensor]:
        """Return the K children of each node, int64 `[B, F, K]`, in order, and values that are 0 where there is no further one.

        The probabilities q are float32 `[B, F, V]`; the position `[B, 1]` of the noise is that of all these children.
        """
        branches = noise.fold_in(torch.arange(q.shape[1], device=q.device))
        return branches.sample_without_replacement(q, count, Purpose.DRAFT)

    def score(self, q: Tensor, token: Tensor, value: Tensor, score: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the values of including and of expanding each child, `[B, F, K]` each.

        A sampled token must not influence whether it is itself in the tree. The value of including a child is therefore the
        probability that its earlier siblings are rejected, which depends on their q; only the value of expanding it depends on
        its own q.

        Args:
            score: `[B, F]`, that of expanding the nodes.
            rates: float32 `[K]`, acceptance rate by rank, given that all earlier siblings are rejected.
        """
        own = q.gather(2, token)
        own = own / (1 - own.cumsum(-1) + own).clamp_min(1e-30)  # renormalized without the earlier siblings
        accepted = rates ** (1 - own.clamp(max=1.0))  # a certain token is accepted, others at the average rate
        rejected = (1 - accepted).log().cumsum(-1)
        include = score[..., None] + pad(rejected[..., :-1], (1, 0))
        return include, include + accepted.log()

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
    """The nodes of the level to expand, and the tree of all nodes expanded so far."""

    tokens: Tensor  # int64 [B, F]; the first level holds the roots
    parent: Tensor  # int64 [B, F], index of each node's parent within the previous level; 0 for the root
    tree: Tree  # of all E nodes expanded so far, level by level; the last F are those of this level
    expanded_tokens: Tensor  # int64 [B, E], their tokens
    depth: int  # distance from the root


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

    Each expanded node has K candidates. They have numbers in the order of their parents: those of expanded node e are e K to
    e K + K - 1, and the root is -1. So a candidate with number c is a child of expanded node c // K.

    Args:
        expand: returns q float32 `[B, F, V]` after each node of a level; called once per level, from the root down.
        shape: number and arrangement of nodes.
        children: how the children of a node are chosen.
        rates: float32 `[K]`, `shape.conditional_rates`.
        root: int64 `[B]`, the last committed tokens.
        noise: of the pass; its position `[B, 1]` is that of the token after the root.
        total: number of tokens of the grid; nodes past it are invalid.
    """
    B, K = len(root), shape.children
    tokens, parent = root[:, None], torch.zeros_like(root)[:, None]  # of the nodes of a level
    exists, score = torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.float32)
    expanded = tokens  # of all expanded nodes
    number = torch.full_like(tokens, -1)  # theirs as candidates
    rows: list[Tensor] = []  # q of the expanded nodes
    levels: list[tuple[Tensor, Tensor, Tensor]] = []  # of candidates: tokens, existence, and the value of including them
    for depth, F in enumerate(shape.expanded_per_level()):
        if depth:  # expand the best candidates of the previous level
            best = _take_best(score, F)
            first = (expanded.shape[1] - tokens.shape[1]) * K  # number of the first candidate of that level
            parent, number = best // K, torch.cat([number, first + best], 1)
            tokens, exists, score = (each.gather(1, best) for each in (*levels[-1][:2], score))
            expanded = torch.cat([expanded, tokens], 1)
        q = expand(Frontier(tokens, parent, Tree.batched(number // K, depth + 1, K), expanded, depth))
        token, value = children.sample(q, K, noise.shift(depth))
        include, grow = children.score(q, token, value, score, rates)
        rows.append(q)
        levels.append((token.flatten(1), ((value > 0) & exists[..., None]).flatten(1), include.flatten(1)))
        score = grow.flatten(1)
    drafted, valid, include = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
    kept = _take_best(include, shape.nodes)
    above = number.gather(1, kept // K)  # number of the parent of each
    parents = torch.searchsorted(pad(kept, (1, 0), value=-1), above)  # its node in the tree of the root and what is kept
    tree = Tree.batched(pad(parents, (1, 0), value=-1), shape.depth + 1, K)
    drafted, valid = drafted.gather(1, kept), valid.gather(1, kept)
    valid &= noise.position + tree.depth[:, 1:] - 1 < total
    q = torch.cat(rows, 1)[torch.arange(B, device=root.device)[:, None], kept // K]
    return Draft(drafted, tree, children.probs(q, drafted, tree), valid)


def _take_best(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the largest scores of each row, in ascending order.

    Parents and earlier siblings come first and have at least equal scores, so a stable sort keeps a tree connected.
    """
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values


# -- drafters -----------------------------------------------------------------------------------------------------------


class TreeDrafter(Drafter):
    """Base class of drafters that propose a tree: frozen dataclasses with a field `shape`, and with `model` if one drafts.

    Attributes:
        model_class: that of `model`.
        children: how the children of a node are chosen.
        rates: float32 `[K]`, see `grow_tree`; made by `bind`.
    """

    topology = "tree"
    provides: tuple[str, ...] = ("independent-per-pass",)
    shape: DynamicTree
    model: Any = None
    model_class: ClassVar[type] = TokenModel
    children: ClassVar[Children] = Children()
    rates: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.shape, DynamicTree):
            raise TypeError(f"shape must be a DynamicTree, got {short_repr(self.shape)}")
        if self.model is not None and not isinstance(self.model, self.model_class):
            raise TypeError(f"model must be of class {self.model_class.__name__} or None, got {short_repr(self.model)}")

    @property
    def width(self) -> int:
        return self.shape.nodes + 1

    def bind(self, model: TokenModel, slots: int) -> Self:
        shape = self.shape.limit(max(1, model.grid[0] * model.grid[1] - 1), model.vocab)
        rates = torch.tensor(shape.conditional_rates, dtype=torch.float32, device=model.device)
        return self.copy(shape=shape, rates=rates)

    def grow(self, expand: Callable[[Frontier], Tensor], state: TokenState, noise: Noise) -> Draft:
        """Grow a tree from the last committed token of each image; see `grow_tree`."""
        root = state.tokens.gather(1, state.length[:, None] - 1)[:, 0]
        return grow_tree(expand, self.shape, self.children, self.rates, root, noise, state.num_tokens)


@dataclass(frozen=True)
class HeadDrafter(TreeDrafter):
    """Draft trees with a draft head trained on the target's features.

    Args:
        shape: of the trees.
        model: the draft head. None: that of the target, which a pipeline has after `load_drafter`.
    """

    shape: DynamicTree = field(default_factory=DynamicTree)
    model: Any = None

    # Buffers, made by the first `reset`: the features that predicted the newest tokens [R, A, D], and their number [B].
    features: Tensor = field(init=False, repr=False, compare=False)
    count: Tensor = field(init=False, repr=False, compare=False)

    kind: ClassVar[str]  # name of the draft head in `TokenModel.draft_heads`
    model_class: ClassVar[type] = DraftHead

    def bind(self, model: TokenModel, slots: int) -> Self:
        head = self.model or model.draft_heads.get(self.kind)
        if head is None:
            raise ValueError(
                f"this method needs a drafter trained for the model ({self.kind}), and this pipeline has none: train one with "
                f"`vargen train drafter {self.kind}`, then pipe.load_drafter(folder)"
            )
        require_same_tokens(f"the {self.kind} drafter", head, model)
        count = torch.zeros(slots, dtype=torch.int64, device=model.device)
        return super().bind(model, slots).copy(model=head, count=count, features=None)

    def reset(self, state: TokenState, rows: Tensor, condition: Any, first: Output) -> None:
        new, slots = require_features(first.features), len(state.seeds)
        if self.features is None:
            shape = (slots * (len(new) // len(rows)), self.shape.depth + 1, new.shape[2])
            self.keep(features=new.new_zeros(shape))
        cfg_rows = repeat_for_cfg(rows, slots, len(self.features))
        self.features[cfg_rows] = 0  # a product of 0 and what a failed image left, such as NaN, is NaN
        self.features[cfg_rows, :1] = new
        self.count[rows] = 1

    def observe(self, state: TokenState, result: PassResult) -> None:
        new = gather_nodes(require_features(result.features), result.verdict.path)
        self.features[:, : new.shape[1]] = new
        self.count.copy_(result.count)


def repeat_for_cfg(rows: Tensor, slots: int, num_rows: int) -> Tensor:
    """Return the rows of the target, int64 `[k n]`, of slots `[n]`: those of all slots come first, then again of all slots."""
    return torch.cat([rows + first for first in range(0, num_rows, slots)])


def gather_nodes(rows: Tensor, nodes: Tensor) -> Tensor:
    """Gather features or logits `[R, A, D]` at nodes `[B, n]` for all CFG rows: `[R, n, D]`."""
    index = nodes.repeat(len(rows) // len(nodes), 1)[..., None]
    return rows.gather(1, index.expand(-1, -1, rows.shape[2]))


def require_features(features: Tensor | None) -> Tensor:
    """Return the features of a pass."""
    if features is None:
        raise ValueError("draft heads need the model's features, and its passes return none")
    return features


@dataclass(frozen=True)
class Eagle(HeadDrafter):
    """EAGLE: a trained layer extrapolates the target's features token by token (Li et al. 2024, arXiv:2401.15077).

    The layer runs once over the tokens committed by the last pass, with the target's own features, and then once per further
    level of the draft, with its own features.
    """

    kind: ClassVar[str] = "eagle"
    model_class: ClassVar[type] = AutoregressiveHead

    cache: Any = field(init=False, repr=False, compare=False)  # made by `bind`, as the trees of `_catch_up`
    chains: Sequence[Tree] = field(init=False, repr=False, compare=False)

    def bind(self, model: TokenModel, slots: int) -> Self:
        bound = super().bind(model, slots)
        shape = bound.shape
        chains = [Tree.make_chain(length, model.device) for length in range(shape.depth + 1)]
        return bound.copy(cache=bound.model.allocate(slots, max(shape.depth + 1, shape.num_expanded)), chains=chains)

    def reset(self, state: TokenState, rows: Tensor, condition: Any, first: Output) -> None:
        super().reset(state, rows, condition, first)
        self.model.reset(self.cache, rows)

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        level = self._catch_up(state)

        def expand(frontier: Frontier) -> Tensor:
            nonlocal level
            if frontier.depth:
                features = gather_nodes(require_features(level.features), frontier.parent)
                level = self.model.forward(frontier.tokens, features, self.cache, frontier.tree)
            return state.sampling.probs(level.logits)

        draft = self.grow(expand, state, noise)
        self.model.commit(self.cache, self.count.clamp(max=1))  # the root, after which the levels were fed
        return draft

    def _catch_up(self, state: TokenState) -> Output:
        """Feed the newest tokens with the target's features, and commit all of them except the root, where a draft starts.

        On a CPU it feeds as many tokens as any image has new ones; elsewhere always those of the longest path. Returns logits
        `[B, 1, V]` and features `[R, 1, D]` after the root.
        """
        counts = ops.host_values(self.count)
        A = self.features.shape[1] if counts is None else max(*counts, 1)
        place = (state.length - self.count)[:, None] + torch.arange(A, device=self.count.device)
        newest = state.tokens.gather(1, place.clamp(max=state.tokens.shape[1] - 1))
        out = self.model.forward(newest, self.features[:, :A], self.cache, self.chains[A - 1])
        last = (self.count - 1).clamp(min=0)  # a finished image has no new tokens
        self.model.commit(self.cache, last)
        return Output(gather_nodes(out.logits, last[:, None]), gather_nodes(require_features(out.features), last[:, None]))


@dataclass(frozen=True)
class Medusa(HeadDrafter):
    """Medusa: trained heads predict several tokens ahead from one feature of the target (Cai et al. 2024, arXiv:2401.10774).

    The feature is the one that predicted the root, so every pass already provides what the next draft needs. All nodes of a
    level have the same q, because heads do not see each other's tokens. Trees are at most as deep as there are heads.
    """

    shape: DynamicTree = field(default_factory=lambda: DynamicTree(nodes=15, depth=3))
    kind: ClassVar[str] = "medusa"
    model_class: ClassVar[type] = ParallelHeads

    def bind(self, model: TokenModel, slots: int) -> Self:
        bound = super().bind(model, slots)
        if (depth := bound.shape.depth) > (heads := bound.model.num_heads):
            raise ValueError(f"depth of a tree must be from 1 to the number of heads, {heads}, got {depth}")
        return bound

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        root = state.tokens.gather(1, state.length[:, None] - 1)[:, 0]
        last = gather_nodes(self.features, (self.count - 1).clamp(min=0)[:, None])
        logits = self.model.forward(root, last, state.length - 1)[:, : self.shape.depth]
        probs = state.sampling.probs(logits)

        def expand(frontier: Frontier) -> Tensor:
            return probs[:, frontier.depth, None].expand(-1, frontier.tokens.shape[1], -1)

        return self.grow(expand, state, noise)
