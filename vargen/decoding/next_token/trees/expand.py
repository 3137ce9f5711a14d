"""Construction of draft trees, level by level, on the device, without host synchronization; all images get equally many slots.

A drafter provides the distribution after each slot of a level (`ExpandFunction`). This module samples children, selects the
slots to expand next, and builds the `Draft` from the best candidates.

Shape suffixes: B images, F slots of one level, E slots expanded so far, K children of a slot, S draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vargen.decoding.next_token.trees.children import ChildSampling, exclude_earlier_siblings, sample_children
from vargen.decoding.next_token.trees.shapes import DynamicTree, StaticTree, TreeShape, compute_depths
from vargen.decoding.noise import Noise
from vargen.decoding.tree import Draft, Tree
from vargen.device import normal_tensors


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


ExpandFunction = Callable[[Frontier], Tensor]  # returns float32 [B, F, V], the distribution after each slot


class _Level(NamedTuple):
    """Candidates of one level, `[B, F, K]`, and q `[B, F, V]` of their parents.

    Attributes:
        tokens: the candidates.
        exists: whether there is such a candidate.
        keep_score: logarithm of the value of including it in the tree.
        expand_score: logarithm of the value of expanding it.
    """

    tokens: Tensor
    exists: Tensor
    keep_score: Tensor
    expand_score: Tensor
    probs: Tensor


def grow_tree(
    expand: ExpandFunction,
    shape: TreeShape,
    child_sampling: ChildSampling,
    root: Tensor,
    noise: Noise,
    total: int,
) -> Draft:
    """Build a draft tree for each image.

    Args:
        expand: called once per level, from the root down.
        shape: number and arrangement of slots.
        child_sampling: how the children of a slot are selected; see `sample_children`.
        root: int64 `[B]`, the last committed tokens.
        noise: of the pass; its position `[B, 1]` is that of the token after the root.
        total: number of tokens of the grid; slots past it are invalid.
    """
    if isinstance(shape, DynamicTree):
        return _grow_dynamic(expand, shape, child_sampling, root, noise, total)
    return _grow_static(expand, shape, child_sampling, root, noise, total)


# -- static trees -------------------------------------------------------------------------------------------------------


class _LevelPlan(NamedTuple):
    """One level of a static tree.

    The fields are: the slots that have children, `[F]`; the index of each one's parent within the previous level, `[F]`; all
    slots expanded so far, `[E]`, and their tree; the largest number of children; the slots of the children, `[C]`; and the
    index of each child among the K candidates of all F slots, `[C]`.
    """

    slots: Tensor
    parent: Tensor
    known: Tensor
    expanded: Tree
    most: int
    children: Tensor
    source: Tensor


@lru_cache(maxsize=64)
@normal_tensors()
def _plan_levels(parents: tuple[int, ...], device: torch.device) -> tuple[list[_LevelPlan], Tensor]:
    """Return the levels from the root down, and the index of each draft token's parent among the expanded slots, `[S]`."""

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    depth = compute_depths(parents)
    offspring = [[child for child, parent in enumerate(parents) if parent == slot] for slot in range(len(parents))]
    inner = sorted((slot for slot in range(len(parents)) if offspring[slot]), key=lambda slot: (depth[slot], slot))
    place = {slot: number for number, slot in enumerate(inner)}
    steps: list[_LevelPlan] = []
    above: list[int] = []
    for step in range(max(depth)):
        level = [slot for slot in inner if depth[slot] == step]
        known = inner[: place[level[-1]] + 1]
        count = max(len(offspring[slot]) for slot in level)
        children = [child for slot in level for child in offspring[slot]]
        source = [number * count + rank for number, slot in enumerate(level) for rank in range(len(offspring[slot]))]
        steps.append(
            _LevelPlan(
                on_device(level),
                on_device([above.index(parents[slot]) if slot else 0 for slot in level]),
                on_device(known),
                Tree.from_parents(tuple(place[parents[slot]] if slot else -1 for slot in known), device),
                count,
                on_device(children),
                on_device(source),
            )
        )
        above = level
    return steps, on_device([place[parent] for parent in parents[1:]])


def _grow_static(
    expand: ExpandFunction, shape: StaticTree, child_sampling: ChildSampling, root: Tensor, noise: Noise, total: int
) -> Draft:
    tree = Tree.from_parents(shape.parents_tuple, root.device)
    steps, follows = _plan_levels(shape.parents_tuple, root.device)
    tokens = root[:, None].repeat(1, len(shape.parents_tuple))
    valid = torch.ones_like(tokens, dtype=torch.bool)
    rows = []
    for depth, step in enumerate(steps):
        parent = step.parent.expand(len(root), -1)
        q = expand(Frontier(tokens[:, step.slots], parent, step.expanded, tokens[:, step.known], depth))
        drafted, value = sample_children(q, step.most, child_sampling, noise.shift(depth))
        tokens[:, step.children] = drafted.flatten(1)[:, step.source]
        valid[:, step.children] = value.flatten(1)[:, step.source] > 0
        rows.append(q)
    valid = valid[:, 1:] & (noise.position + tree.depth[1:] - 1 < total)
    probs = _child_probs(rows, follows.expand(len(root), -1), tokens[:, 1:], tree, child_sampling)
    return Draft(tokens[:, 1:], tree, probs, valid)


# -- dynamic trees ------------------------------------------------------------------------------------------------------


def _grow_dynamic(
    expand: ExpandFunction, shape: DynamicTree, child_sampling: ChildSampling, root: Tensor, noise: Noise, total: int
) -> Draft:
    B, device = len(root), root.device
    K, image = shape.children, torch.arange(B, device=device)[:, None]
    parents = torch.full((B, 1), -1, dtype=torch.int64, device=device)  # of the expanded slots
    expanded_tokens = tokens = root[:, None]
    above, exists = torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool)
    expand_score = torch.zeros(B, 1, dtype=torch.float32, device=device)
    expanded_at = torch.full((B, 1), -1, dtype=torch.int64, device=device)  # index of each among the candidates
    levels: list[_Level] = []
    follows: list[Tensor] = []  # parent of each candidate among the expanded slots
    for depth, F in enumerate(shape.expanded_per_level()):
        if depth:
            order = expand_score.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :F].sort(dim=1).values
            above, first = order // K, expanded_tokens.shape[1] - levels[-1].tokens.shape[1]
            expanded_at = torch.cat([expanded_at, order + K * first], 1)
            parents = torch.cat([parents, above + first], 1)
            expand_score, tokens = expand_score.flatten(1)[image, order], levels[-1].tokens.flatten(1)[image, order]
            exists = levels[-1].exists.flatten(1)[image, order]
            expanded_tokens = torch.cat([expanded_tokens, tokens], 1)
        q = expand(Frontier(tokens, above, Tree.batched(parents, depth + 1, K), expanded_tokens, depth))
        level = _score_children(q, expand_score, shape, child_sampling, noise.shift(depth))
        level = level._replace(exists=level.exists & exists[..., None])
        levels.append(level)
        newest = torch.arange(expanded_tokens.shape[1] - F, expanded_tokens.shape[1], device=device)
        follows.append(newest.repeat_interleave(K).expand(B, -1))
        expand_score = level.expand_score
    scores = torch.cat([level.keep_score.flatten(1) for level in levels], 1)
    # Parents and earlier siblings come first and have at least equal scores, so a stable sort keeps the tree connected.
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, : shape.nodes].sort(dim=1).values
    inner = torch.cat(follows, 1)[image, kept]  # parent of each among the expanded slots
    parent = torch.searchsorted(kept, expanded_at[image, inner]) + 1
    tree = Tree.batched(_prepend_root(torch.where(inner == 0, 0, parent)), shape.depth + 1, K)
    drafted = torch.cat([level.tokens.flatten(1) for level in levels], 1)[image, kept]
    valid = torch.cat([level.exists.flatten(1) for level in levels], 1)[image, kept]
    valid &= noise.position + tree.depth[:, 1:] - 1 < total
    return Draft(drafted, tree, _child_probs([level.probs for level in levels], inner, drafted, tree, child_sampling), valid)


@lru_cache(maxsize=16)
@normal_tensors()
def _rank_rates(shape: DynamicTree, device: torch.device) -> Tensor:
    return torch.tensor(shape.conditional_rates, dtype=torch.float32, device=device)


def _prepend_root(parents: Tensor) -> Tensor:
    return torch.nn.functional.pad(parents, (1, 0), value=-1)


def _score_children(q: Tensor, expand_score: Tensor, shape: DynamicTree, child_sampling: ChildSampling, noise: Noise) -> _Level:
    """Return the children of a level's slots, given their log-values `[B, F]`.

    A sampled token must not influence whether it is itself in the tree. The value of including a child is therefore the
    probability that its earlier siblings are rejected, which depends on their q; only the value of expanding it depends on its
    own q.
    """
    token, value = sample_children(q, shape.children, child_sampling, noise)
    exists = value > 0
    if child_sampling == "top-k":
        expand_score = expand_score[..., None] + value.log()
        return _Level(token, exists, expand_score, expand_score, q)
    if (
        child_sampling == "shared-noise"
    ):  # the closer a candidate is to the argmax, the more likely the target's noise selects it
        gap = (value / value[..., :1]).nan_to_num(0.0)
        share = gap / gap.sum(-1, keepdim=True).clamp_min(1e-30)
        expand_score = expand_score[..., None] + share.log()
        return _Level(token, exists, expand_score, expand_score, q)
    own = q.gather(2, token)
    own = own / (1 - own.cumsum(-1) + own).clamp_min(1e-30)  # renormalized without the earlier siblings
    accept_rate = _rank_rates(shape, q.device) ** (
        1 - own.clamp(max=1.0)
    )  # a certain token is accepted, others at the average rate
    rejected = (1 - accept_rate).log().cumsum(-1)
    keep_score = expand_score[..., None] + torch.nn.functional.pad(rejected[..., :-1], (1, 0))
    return _Level(token, exists, keep_score, keep_score + accept_rate.log(), q)


def _child_probs(
    rows: list[Tensor], follows: Tensor, tokens: Tensor, tree: Tree, child_sampling: ChildSampling
) -> Tensor | None:
    """Return q `[B, S, V]` of each draft token, that of its parent slot; None if the tokens were not sampled.

    For sampling without replacement, the earlier siblings are removed.

    Args:
        rows: q `[B, F, V]` of each level; concatenated, they are those of the E expanded slots.
        follows: `[B, S]`, index of the parent among these E.
    """
    if child_sampling not in ("without-replacement", "with-replacement"):
        return None
    B, S = tokens.shape
    q = torch.cat(rows, 1)[torch.arange(B, device=tokens.device)[:, None], follows]
    if child_sampling == "with-replacement":
        return q
    return exclude_earlier_siblings(q, tokens, tokens[:, None, :], tree.earlier_siblings[..., 1:, 1:].expand(B, S, S))
