"""The data that flows through a decoding loop: the tree of a pass, a draft, a verdict on it, what the model returned, a step.

Shape suffixes: B images, R rows of the network (B times the guidance halves), T fed tokens of one pass (the root, then the
draft), A slots of the longest path, V vocabulary, D width of the features, W words of ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vargen.decoding.noise import Noise
from vargen.kernels.ancestors import packed
from vargen.modes import normal_tensors


@dataclass(frozen=True, eq=False)
class Tree:
    """The shape of a pass: which fed token follows which. A chain is the tree whose parents are -1, 0, 1, 2, ...

    Slot 0 is the root, the last committed token; a parent always comes before its children. One tree serves the whole batch, or
    each image has its own (dynamic trees).

    Attributes:
        parents: int64 `[T]` or `[B, T]`, the slot that each slot follows; -1 for the root.
        depth: int64, as `parents`: steps from the root.
        ancestors: bool `[T, T]` or `[B, T, T]`, `[..., i, j]` True where slot j is slot i or one of its ancestors.
        longest: slots on the longest path that any image may have, root included.
        widest: most children of any slot.
        chain: whether it is a chain, for which models have a shorter way.
    """

    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    longest: int
    widest: int
    chain: bool

    @staticmethod
    def of(parents: tuple[int, ...], device: torch.device | str = "cpu") -> Tree:
        """One tree for the batch, by the fed slots' parents, root first.

        Raises:
            ValueError: if the first parent is not -1, or another is not an earlier slot.
        """
        return _tree(tuple(parents), torch.device(device))

    @staticmethod
    def of_chain(draft: int, device: torch.device | str = "cpu") -> Tree:
        """The root and `draft` tokens in a row."""
        return _tree(tuple(range(-1, draft)), torch.device(device))

    @staticmethod
    def per_image(parents: Tensor, longest: int, widest: int | None = None) -> Tree:
        """A tree for each image; nothing is read from the device.

        Args:
            parents: int64 `[B, T]`, each row as in `of`; what rows hold is not checked.
            longest: at least the slots on any row's longest path.
            widest: at least the children of any slot, which is how many rounds rules of trees take; None: T - 1.
        """
        T = parents.shape[1]
        above = torch.nn.functional.one_hot(parents.clamp(min=0), T).bool()
        above[:, 0] = False  # the root follows nothing
        ancestors = above | torch.eye(T, dtype=torch.bool, device=parents.device)
        for _ in range((longest - 1).bit_length()):  # each product doubles the steps that are known
            ancestors = (ancestors.float() @ ancestors.float()) > 0
        return Tree(parents, ancestors.sum(-1) - 1, ancestors, longest, T - 1 if widest is None else widest, chain=False)

    @cached_property
    @normal_tensors()
    def words(self) -> Tensor:
        """The ancestors as bits of int64 words, `[T, W]` or `[B, T, W]`: bit j % 64 of word j // 64 is `ancestors[..., j]`."""
        return packed(self.ancestors)

    @cached_property
    @normal_tensors()
    def elders(self) -> Tensor:
        """bool `[T, T]` or `[B, T, T]`, `[..., i, j]` True where slot j is a sibling that lies before slot i."""
        return (self.parents[..., :, None] == self.parents[..., None, :]).tril(-1)

    @cached_property
    @normal_tensors()
    def rank(self) -> Tensor:
        """int64, as `parents`: how many siblings lie before each slot."""
        return self.elders.sum(-1)

    @cached_property
    @normal_tensors()
    def children(self) -> Tensor:
        """int64 `[T, widest]` or `[B, T, widest]`: the slots that follow each slot, in order; 0 where there are no more."""
        T = self.parents.shape[-1]
        place = (self.parents * self.widest + self.rank)[..., 1:]  # the root is nobody's child
        slots = torch.arange(1, T, device=place.device).expand_as(place)
        table = torch.zeros(*place.shape[:-1], T * self.widest, dtype=torch.int64, device=place.device)
        return table.scatter_(-1, place, slots).unflatten(-1, (T, self.widest))

    @cached_property
    @normal_tensors()
    def parents_of_rank(self) -> tuple[Tensor, ...]:
        """For each rank, int64 slots that have a child of it: of one tree for the batch only these, read from the device once;
        else all."""
        if self.children.dim() == 2:
            return tuple(column.nonzero()[:, 0] for column in self.children.unbind(1))
        return (torch.arange(self.children.shape[1], device=self.children.device),) * self.widest

    @cached_property
    @normal_tensors()
    def postorder(self) -> Tensor:
        """int64, as `parents`: the place of each slot where children come before their parents, and elder siblings with all
        that follows them before younger ones."""
        size = self.ancestors.sum(-2)  # slots that follow it, itself included
        before = (self.elders * size[..., None, :]).sum(-1)
        return (self.ancestors * before[..., None, :]).sum(-1) + size - 1


@lru_cache(maxsize=64)
@normal_tensors()
def _tree(parents: tuple[int, ...], device: torch.device) -> Tree:
    if not parents or parents[0] != -1 or any(not 0 <= p < i for i, p in enumerate(parents[1:], 1)):
        raise ValueError(f"parents must start with -1 and then name earlier slots, got {parents}")
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for slot, parent in enumerate(parents[1:], 1):
        ancestors[slot] |= ancestors[parent]
    depth = ancestors.sum(1) - 1
    return Tree(
        parents=torch.tensor(parents, device=device),
        depth=depth.to(device),
        ancestors=ancestors.to(device),
        longest=int(depth.max()) + 1,
        widest=max((parents.count(slot) for slot in range(len(parents))), default=0),
        chain=parents == tuple(range(-1, len(parents) - 1)),
    )


class Output(NamedTuple):
    """What a model returns of a pass: float logits `[B, T, V]` after guidance, and features `[R, T, D]`, conditional rows
    first, of models that have them."""

    logits: Tensor
    features: Tensor | None = None


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for one pass.

    Siblings lie in the order in which they were drawn: that order is what rules judge them in. A tree may be chosen as it is
    drawn, as long as no token has a say in whether it is itself part of it.

    Attributes:
        tokens: int64 `[B, T - 1]`, one per slot behind the root.
        tree: shape of the pass, root included.
        probs: float32 `[B, T - 1, V]`, q: the probabilities each token was really drawn with, given what lies before it. Of
            siblings that were drawn without replacement, the elder ones have none, and the others sum to one; of siblings that
            were drawn with replacement, all rows are alike. None for a deterministic proposal, whose probability is one on
            its token.
        valid: bool `[B, T - 1]`, False where an image has no draft in a slot (its window is shorter than the batch's, or the
            grid ends): rules refuse it, spend nothing on it, and draw what follows from the target. None: all are.
        soft: float32 `[B, T, V]`, the target's probabilities behind each fed slot at temperature 1. The loop adds them for
            relaxed rules where drawing is greedy, because one likeliest token says nothing about those next to it.
        kept: bool `[B, T - 1]`, drafts that `PooledRule` is to keep whatever has become of their probabilities. No token may
            have a say in whether it is itself kept.
    """

    tokens: Tensor
    tree: Tree
    probs: Tensor | None = None
    valid: Tensor | None = None
    soft: Tensor | None = None
    kept: Tensor | None = None

    @classmethod
    def empty(cls, images: int, vocab: int, device: torch.device) -> Draft:
        """Nothing drafted: a pass of the root alone."""
        tokens = torch.zeros(images, 0, dtype=torch.int64, device=device)
        return cls(tokens, Tree.of_chain(0, device), torch.zeros(images, 0, vocab, device=device))


@dataclass(frozen=True)
class Verdict:
    """What a rule decided about one pass.

    Attributes:
        path: int64 `[B, A]`, the accepted slots in order, root first; entries at or past `count` are meaningless.
        count: int64 `[B]`, accepted slots, the root included: at least 1. Also the number of tokens committed.
        next_token: int64 `[B]`, the token that follows the last accepted slot.
        relaxation: float32 `[B]`, acceptance granted beyond the exact rule. None for exact rules, which grant none.
        drawn: int64 `[B, T]`, a token behind each fed slot, drawn from the target's probabilities there, of rules that draw
            them: what the image's own noise draws, or drafts that stand and what replaces others. Drafters may go on with them.
    """

    path: Tensor
    count: Tensor
    next_token: Tensor
    relaxation: Tensor | None = None
    drawn: Tensor | None = None

    def committed(self, fed: Tensor) -> Tensor:
        """int64 `[B, A]`: the tokens that follow the accepted slots of `fed` `[B, T]`; the first `count` are committed."""
        following = fed.gather(1, self.path.roll(-1, dims=1))  # an accepted draft follows the slot before it
        last = torch.arange(following.shape[1], device=fed.device) == self.count[:, None] - 1
        return torch.where(last, self.next_token[:, None], following)


@dataclass(frozen=True)
class Step:
    """What a pass produced, as drafters see it.

    Attributes:
        draft: what was judged.
        probs: float32 `[B, T, V]`, the target's probabilities behind each fed slot.
        features: of the model's `Output`.
        verdict: of the rule.
        noise: of the pass; its positions are those of the tokens that follow each slot.
        count: int64 `[B]`, tokens committed: the verdict's, less what lay past the grid; 0 for a finished image.
    """

    draft: Draft
    probs: Tensor
    features: Tensor | None
    verdict: Verdict
    noise: Noise
    count: Tensor
