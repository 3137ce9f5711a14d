"""Construction of draft trees, level by level, on the device, without host synchronization; all images get equally many slots.

A drafter provides the distribution after each slot of a level (`Expand`). This module samples children, selects the slots to
expand next, and builds the `Draft` from the best candidates.

Shape suffixes: B images, F slots of one level, E slots expanded so far, K children of a slot, S draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from vargen.decoding.next_token.draft import Draft, Tree
from vargen.decoding.next_token.trees.shapes import AutoTree, DynamicTree, StaticTree, TreeShape
from vargen.decoding.noise import Noise, Purpose
from vargen.kernels.row_ops import sample_categorical
from vargen.modes import normal_tensors
from vargen.values import short_repr

Drawing = Literal["best", "sampled", "independent", "coupled"]
CHILD_SAMPLING: dict[str, tuple[str, ...]] = {  # and what each offers to rules; see `OfferingDrafter`
    "best": ("fresh",),
    "sampled": ("fresh",),
    "independent": ("fresh", "replacement"),
    "coupled": (),
}


def validate_child_sampling(drawing: object, shape: TreeShape | AutoTree) -> None:
    """Raise ValueError unless `drawing` is a known way to select children and applies to trees of this shape."""
    if drawing not in CHILD_SAMPLING:
        raise ValueError(f"drawing must be one of {', '.join(CHILD_SAMPLING)}, got {short_repr(drawing)}")
    if drawing == "independent" and isinstance(shape, DynamicTree):
        raise ValueError("drawing 'independent' needs a StaticTree: in a dynamic one the number of siblings depends on them")


def check_vocabulary(shape: TreeShape | AutoTree, vocab: int) -> None:
    """Raise ValueError if a slot has more children than there are tokens."""
    if shape.children > vocab:
        raise ValueError(f"children of a tree must be at most the vocabulary of {vocab} tokens, got {shape.children}")


@dataclass(frozen=True)
class Frontier:
    """The slots of the level to expand, and the tree of all slots expanded so far.

    Attributes:
        tokens: int64 `[B, F]`. The first level holds the roots.
        parent: int64 `[B, F]`, index of each slot's parent within the previous level; 0 for the root.
        tree: of all E slots expanded so far, level by level; the last F are those of this level.
        fed: int64 `[B, E]`, their tokens.
        depth: distance from the root.
    """

    tokens: Tensor
    parent: Tensor
    tree: Tree
    fed: Tensor
    depth: int


Expand = Callable[[Frontier], Tensor]  # returns float32 [B, F, V], the distribution after each slot


class _Level(NamedTuple):
    """Candidates of one level, `[B, F, K]`, and q `[B, F, V]` of their parents.

    The fields are the tokens, whether they exist, the log-value of including each in the tree, and the log-value of expanding
    it.
    """

    tokens: Tensor
    there: Tensor
    worth: Tensor
    reach: Tensor
    probs: Tensor


def grow(
    expand: Expand,
    shape: TreeShape,
    drawing: Drawing,
    root: Tensor,
    noise: Noise,
    total: int,
) -> Draft:
    """Build a draft tree for each image.

    Args:
        expand: called once per level, from the root down.
        shape: number and arrangement of slots.
        drawing: how the K children of a slot are selected from its q. `"best"`: the K most probable tokens (EAGLE-2), not
            sampled. `"sampled"`: sampled without replacement, as the K largest values of log q + Gumbel noise (Kool et al.
            2019), in descending order. `"independent"`: sampled with replacement; for static trees only. `"coupled"`: the K
            largest values of log q + G with the shared noise G, for the rule `shared_noise`.
        root: int64 `[B]`, the last committed tokens.
        noise: of the pass; its position `[B, 1]` is that of the token after the root.
        total: number of tokens of the grid; slots past it are invalid.
    """
    if isinstance(shape, DynamicTree):
        return _dynamic(expand, shape, drawing, root, noise, total)
    return _static(expand, shape, drawing, root, noise, total)


def siblings(probs: Tensor, count: int, drawing: Drawing, noise: Noise) -> tuple[Tensor, Tensor]:
    """Select the children of each slot.

    Returns int64 `[B, F, K]`, in order, and the float `[B, F, K]` values that define the order, which are 0 where a slot has no
    further child.

    Args:
        probs: float32 `[B, F, V]`.
        count: K.
        drawing: see `grow`.
        noise: its position `[B, 1]` is that of all these children.
    """
    B, F, V = probs.shape
    if drawing == "best":
        order = probs
    elif drawing == "coupled":
        order = probs / noise.exponential(V, Purpose.TOKEN)
    else:
        slots = noise.branch(torch.arange(F, device=probs.device))
        if drawing == "independent":
            ranks = torch.arange(count, device=probs.device).repeat(F)
            places = torch.arange(F, device=probs.device).repeat_interleave(count)
            coins = noise.branch(places * count + ranks).uniform64(Purpose.DRAFT)
            drawn = sample_categorical(probs.repeat_interleave(count, 1), coins).view(B, F, count)
            return drawn, probs.gather(2, drawn)
        order = probs / slots.exponential(V, Purpose.DRAFT)
    value, token = order.topk(count, dim=-1)
    return token, value


# -- static trees -------------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
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
def _plan(parents: tuple[int, ...], device: torch.device) -> tuple[list[_Step], Tensor]:
    """Return the levels from the root down, and the index of each draft token's parent among the expanded slots, `[S]`."""

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    depth, offspring = [0], [[child for child, parent in enumerate(parents) if parent == slot] for slot in range(len(parents))]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    inner = sorted((slot for slot in range(len(parents)) if offspring[slot]), key=lambda slot: (depth[slot], slot))
    place = {slot: number for number, slot in enumerate(inner)}
    steps: list[_Step] = []
    above: list[int] = []
    for step in range(max(depth)):
        level = [slot for slot in inner if depth[slot] == step]
        known = inner[: place[level[-1]] + 1]
        count = max(len(offspring[slot]) for slot in level)
        children = [child for slot in level for child in offspring[slot]]
        source = [number * count + rank for number, slot in enumerate(level) for rank in range(len(offspring[slot]))]
        steps.append(
            _Step(
                on_device(level),
                on_device([above.index(parents[slot]) if slot else 0 for slot in level]),
                on_device(known),
                Tree.of(tuple(place[parents[slot]] if slot else -1 for slot in known), device),
                count,
                on_device(children),
                on_device(source),
            )
        )
        above = level
    return steps, on_device([place[parent] for parent in parents[1:]])


def _static(expand: Expand, shape: StaticTree, drawing: Drawing, root: Tensor, noise: Noise, total: int) -> Draft:
    tree = Tree.of(shape.slots, root.device)
    steps, follows = _plan(shape.slots, root.device)
    tokens = root[:, None].repeat(1, len(shape.slots))
    valid = torch.ones_like(tokens, dtype=torch.bool)
    rows = []
    for depth, step in enumerate(steps):
        parent = step.parent.expand(len(root), -1)
        q = expand(Frontier(tokens[:, step.slots], parent, step.expanded, tokens[:, step.known], depth))
        drawn, value = siblings(q, step.most, drawing, _below(noise, depth))
        tokens[:, step.children] = drawn.flatten(1)[:, step.source]
        valid[:, step.children] = value.flatten(1)[:, step.source] > 0
        rows.append(q)
    valid = valid[:, 1:] & (noise.position + tree.depth[1:] - 1 < total)
    probs = _draft_probs(rows, follows.expand(len(root), -1), tokens[:, 1:], tree, drawing)
    return Draft(tokens[:, 1:], tree, probs, valid)


def _below(noise: Noise, depth: int) -> Noise:
    """Return the noise of the tokens after slots at a depth."""
    return Noise(noise.seeds, noise.position + depth, noise.step, noise.own)


# -- dynamic trees ------------------------------------------------------------------------------------------------------


def _dynamic(expand: Expand, shape: DynamicTree, drawing: Drawing, root: Tensor, noise: Noise, total: int) -> Draft:
    B, device = len(root), root.device
    K, image = shape.children, torch.arange(B, device=device)[:, None]
    parents = torch.full((B, 1), -1, dtype=torch.int64, device=device)  # of the expanded slots
    fed = tokens = root[:, None]
    above, reach, there = torch.zeros_like(tokens), torch.zeros(B, 1, device=device), torch.ones_like(tokens, dtype=torch.bool)
    expanded_at = torch.full((B, 1), -1, dtype=torch.int64, device=device)  # index of each among the candidates
    levels: list[_Level] = []
    follows: list[Tensor] = []  # parent of each candidate among the expanded slots
    for depth, F in enumerate(shape.widths()):
        if depth:
            order = reach.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, :F].sort(dim=1).values
            above, first = order // K, fed.shape[1] - levels[-1].tokens.shape[1]
            expanded_at = torch.cat([expanded_at, order + K * first], 1)
            parents = torch.cat([parents, above + first], 1)
            reach, tokens = reach.flatten(1)[image, order], levels[-1].tokens.flatten(1)[image, order]
            there = levels[-1].there.flatten(1)[image, order]
            fed = torch.cat([fed, tokens], 1)
        q = expand(Frontier(tokens, above, Tree.per_image(parents, depth + 1, K), fed, depth))
        level = _candidates(q, reach, shape, drawing, _below(noise, depth))
        level = level._replace(there=level.there & there[..., None])
        levels.append(level)
        follows.append(torch.arange(fed.shape[1] - F, fed.shape[1], device=device).repeat_interleave(K).expand(B, -1))
        reach = level.reach
    pool = torch.cat([level.worth.flatten(1) for level in levels], 1)
    # Parents and earlier siblings come first in the pool with at least equal value, so a stable sort keeps the tree connected.
    kept = pool.sort(dim=1, descending=True, stable=True).indices[:, : shape.nodes].sort(dim=1).values
    inner = torch.cat(follows, 1)[image, kept]  # parent of each among the expanded slots
    parent = torch.searchsorted(kept, expanded_at[image, inner]) + 1
    tree = Tree.per_image(_rooted(torch.where(inner == 0, 0, parent)), shape.depth + 1, K)
    drawn = torch.cat([level.tokens.flatten(1) for level in levels], 1)[image, kept]
    valid = torch.cat([level.there.flatten(1) for level in levels], 1)[image, kept]
    valid &= noise.position + tree.depth[:, 1:] - 1 < total
    return Draft(drawn, tree, _draft_probs([level.probs for level in levels], inner, drawn, tree, drawing), valid)


@lru_cache(maxsize=16)
@normal_tensors()
def _chances(shape: DynamicTree, device: torch.device) -> Tensor:
    return torch.tensor(shape.chances, device=device)


def _rooted(parents: Tensor) -> Tensor:
    return torch.nn.functional.pad(parents, (1, 0), value=-1)


def _candidates(q: Tensor, reach: Tensor, shape: DynamicTree, drawing: Drawing, noise: Noise) -> _Level:
    """Return the children of a level's slots, given their log-values `[B, F]`.

    A sampled token must not influence whether it is itself in the tree. The value of including a child is therefore the
    probability that its earlier siblings are rejected, which depends on their q; only the value of expanding it depends on its
    own q.
    """
    token, value = siblings(q, shape.children, drawing, noise)
    there = value > 0
    if drawing == "best":
        reach = reach[..., None] + value.log()
        return _Level(token, there, reach, reach, q)
    if drawing == "coupled":  # the closer a candidate is to the argmax, the more likely the target's noise selects it
        gap = (value / value[..., :1]).nan_to_num(0.0)
        share = gap / gap.sum(-1, keepdim=True).clamp_min(1e-30)
        reach = reach[..., None] + share.log()
        return _Level(token, there, reach, reach, q)
    own = q.gather(2, token)
    own = own / (1 - own.cumsum(-1) + own).clamp_min(1e-30)  # renormalized without the earlier siblings
    accepted = _chances(shape, q.device) ** (1 - own.clamp(max=1.0))  # a certain token is accepted, others at the average rate
    refused = (1 - accepted).log().cumsum(-1)
    worth = reach[..., None] + torch.nn.functional.pad(refused[..., :-1], (1, 0))
    return _Level(token, there, worth, worth + accepted.log(), q)


def _draft_probs(rows: list[Tensor], follows: Tensor, tokens: Tensor, tree: Tree, drawing: Drawing) -> Tensor | None:
    """Return q `[B, S, V]` of each draft token, that of its parent slot; None if the tokens were not sampled.

    For sampling without replacement, the earlier siblings are removed.

    Args:
        rows: q `[B, F, V]` of each level; concatenated, they are those of the E expanded slots.
        follows: `[B, S]`, index of the parent among these E.
    """
    if drawing not in ("sampled", "independent"):
        return None
    B, S = tokens.shape
    q = torch.cat(rows, 1)[torch.arange(B, device=tokens.device)[:, None], follows]
    if drawing == "independent":
        return q
    elder = tree.elders[..., 1:, 1:].expand(B, S, S)
    index = torch.where(elder, tokens[:, None, :], tokens[:, :, None])  # tokens of earlier siblings, otherwise the own one
    own = q.gather(2, tokens[..., None])
    left = q.scatter(2, index, 0.0).scatter(2, tokens[..., None], own)
    return left / left.sum(-1, keepdim=True).clamp_min(1e-30)
