"""Data types of the decoding loop: the tree of a pass, the draft, the model's output, the verdict, and the result.

The tokens of a pass are the nodes of a tree: node 0 is the root, the last committed token; node i is draft token i - 1.

Shape suffixes: B images, R rows of the network (B, times two with CFG), T nodes, A nodes on the longest path, V vocabulary, D
feature width, W int64 words of the packed ancestor mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vargen.decoding.noise import Noise
from vargen.kernels.host import normal_tensors
from vargen.kernels.ops import pack_bits


@dataclass(frozen=True, eq=False)
class Tree:
    """The shape of a pass: which fed token follows which. A chain is the tree with parents -1, 0, 1, 2, ...

    A parent precedes its children. The batch shares one tree, or each image has its own (dynamic trees).

    Attributes:
        parents: int64 `[T]` or `[B, T]`, the parent of each node; -1 for the root.
        depth: int64, shaped like `parents`: distance from the root.
        ancestors: bool `[T, T]` or `[B, T, T]`; `[..., i, j]` is True if node j is node i or one of its ancestors.
        max_path: number of nodes on the longest path of any image, root included.
        max_children: largest number of children of any node.
        is_chain: whether the tree is a chain, for which models have a faster path.
    """

    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    max_path: int
    max_children: int
    is_chain: bool

    @staticmethod
    @lru_cache(maxsize=64)
    @normal_tensors()
    def from_parents(parents: tuple[int, ...], device: torch.device | str = "cpu") -> Tree:
        """Build one tree for the whole batch from the parents of the nodes, root first.

        Raises:
            ValueError: if the first parent is not -1, or any other parent is not an earlier node.
        """
        if parents[:1] != (-1,) or any(not 0 <= parent < node for node, parent in enumerate(parents[1:], 1)):
            raise ValueError(f"parents must start with -1 and then name earlier nodes, got {parents}")
        one = Tree.batched(torch.tensor([parents]), len(parents), 1)
        depth = one.depth[0]
        return Tree(
            parents=torch.tensor(parents, device=device),
            depth=depth.to(device),
            ancestors=one.ancestors[0].to(device),
            max_path=int(depth.max()) + 1,
            max_children=max(parents.count(node) for node in range(len(parents))),
            is_chain=parents == tuple(range(-1, len(parents) - 1)),
        )

    @staticmethod
    def make_chain(length: int, device: torch.device | str = "cpu") -> Tree:
        """Build a chain: the root and `length` draft tokens."""
        return Tree.from_parents(tuple(range(-1, length)), device)

    @staticmethod
    def batched(parents: Tensor, max_path: int, max_children: int) -> Tree:
        """Build a tree for each image, without reading anything from the device.

        Args:
            parents: int64 `[B, T]`, each row as in `from_parents`; values are not checked.
            max_path: upper bound on the number of nodes on the longest path of any row.
            max_children: upper bound on the number of children of any node, which is the number of rounds that tree rules run.
        """
        T = parents.shape[1]
        above = torch.nn.functional.one_hot(parents.clamp(min=0), T).bool()
        above[:, 0] = False  # the root has no parent
        ancestors = above | torch.eye(T, dtype=torch.bool, device=parents.device)
        for _ in range((max_path - 1).bit_length()):  # each product doubles the distance covered
            ancestors = (ancestors.float() @ ancestors.float()) > 0
        return Tree(parents, ancestors.sum(-1) - 1, ancestors, max_path, max_children, is_chain=False)

    @cached_property
    @normal_tensors()
    def ancestor_bits(self) -> Tensor:
        """The ancestor mask packed into int64 words, `[T, W]` or `[B, T, W]`.

        Bit j % 64 of word j // 64 is `ancestors[..., j]`.
        """
        return pack_bits(self.ancestors)

    @cached_property
    @normal_tensors()
    def earlier_siblings(self) -> Tensor:
        """bool `[T, T]` or `[B, T, T]`; `[..., i, j]` is True if node j is an earlier sibling of node i."""
        return (self.parents[..., :, None] == self.parents[..., None, :]).tril(-1)

    @cached_property
    @normal_tensors()
    def sibling_rank(self) -> Tensor:
        """int64, shaped like `parents`: number of earlier siblings of each node."""
        return self.earlier_siblings.sum(-1)

    @cached_property
    @normal_tensors()
    def children(self) -> Tensor:
        """int64 `[T, max_children]` or `[B, T, max_children]`: the children of each node in order, padded with 0."""
        T = self.parents.shape[-1]
        place = (self.parents * self.max_children + self.sibling_rank)[..., 1:]  # the root is not a child
        nodes = torch.arange(1, T, device=place.device).expand_as(place)
        table = torch.zeros(*place.shape[:-1], T * self.max_children, dtype=torch.int64, device=place.device)
        return table.scatter_(-1, place, nodes).unflatten(-1, (T, self.max_children))

    @cached_property
    @normal_tensors()
    def postorder(self) -> Tensor:
        """int64, shaped like `parents`: the postorder index of each node.

        Children come before their parent, and an earlier sibling with its whole subtree comes before later siblings.
        """
        size = self.ancestors.sum(-2)  # size of each subtree, its own node included
        before = (self.earlier_siblings * size[..., None, :]).sum(-1)
        return (self.ancestors * before[..., None, :]).sum(-1) + size - 1

    def follow(self, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the path of nodes that are accepted with all their ancestors, `[B, A]`, and its number of nodes `[B]`.

        Args:
            accepted: bool `[B, T]`, at most one node of each group of siblings. The root is always accepted.
        """
        accepted = accepted | (self.depth == 0)
        return self._sort_path((accepted[:, None, :] | ~self.ancestors).all(-1))

    def trace(self, node: Tensor) -> tuple[Tensor, Tensor]:
        """Return the path `[B, A]` to a node `[B]` of each image, and its number of nodes `[B]`."""
        ancestors = self.ancestors.expand(len(node), -1, -1)
        return self._sort_path(ancestors[torch.arange(len(node), device=node.device), node])

    def _sort_path(self, reached: Tensor) -> tuple[Tensor, Tensor]:
        """List the nodes of a path first. The sort is stable, so parents precede children."""
        order = reached.to(torch.int64).argsort(dim=1, descending=True, stable=True)
        return order[:, : self.max_path], reached.sum(1)


class Output(NamedTuple):
    """Output of a model for one pass."""

    logits: Tensor  # float [B, T, V], after guidance
    features: Tensor | None = None  # [R, T, D] with the conditional rows first, if the model provides them


@dataclass(frozen=True)
class Draft:
    """The draft of one pass.

    Siblings are ordered as they were sampled, and rules verify them in this order. The shape of the tree may depend on sampled
    tokens, provided that no token influences whether it is itself included.

    Attributes:
        tokens: int64 `[B, T - 1]`, one per node after the root.
        tree: shape of the pass, root included.
        probs: float32 `[B, T - 1, V]`, q: the distribution each token was actually sampled from, given the tokens before it.
            For siblings sampled without replacement, q is zero on the earlier siblings and renormalized over the rest; for
            siblings sampled with replacement, all rows are equal. None for a deterministic proposal, which has probability one
            on its token, and where the rule does not use them (`AcceptanceRule.verify_tokens`).
        valid: bool `[B, T - 1]`, False where an image has no draft token (its window is shorter than that of the batch, or the
            grid ends). Rules reject such a node, spend no relaxation on it, and sample its replacement from the target. None:
            all are valid.
        unfiltered_probs: float32 `[B, T, V]`, the target distribution after each node at temperature 1. The loop adds it for
            relaxed rules if an image is sampled greedily, where a one-hot p carries no information about similar tokens.
        is_greedy: bool `[B]`, which images are sampled greedily; None without `unfiltered_probs`.
    """

    tokens: Tensor
    tree: Tree
    probs: Tensor | None = None
    valid: Tensor | None = None
    unfiltered_probs: Tensor | None = None
    is_greedy: Tensor | None = None

    @classmethod
    def make_empty(cls, images: int, vocab: int, device: torch.device) -> Draft:
        """Return an empty draft: a pass that feeds the root alone."""
        tokens = torch.zeros(images, 0, dtype=torch.int64, device=device)
        return cls(tokens, Tree.make_chain(0, device), torch.zeros(images, 0, vocab, dtype=torch.float32, device=device))

    def only_valid(self, selected: Tensor) -> Tensor:
        """Return which of the selected draft tokens are valid, bool `[B, T - 1]` both."""
        return selected if self.valid is None else selected & self.valid

    def put_forced(self, forced: Tensor | None, length: Tensor) -> Draft:
        """Return a chain with the only possible token at each position that has one, of which nothing is sampled: q is 1.

        Trees are returned unchanged, because drafts of heads and draft models have these tokens by their own logits.

        Args:
            forced: int64 `[N]`; see `TokenModel`.
            length: int64 `[B]`, number of committed tokens.
        """
        S = self.tokens.shape[1]
        if forced is None or not self.tree.is_chain or not S:
            return self
        position = length[:, None] + torch.arange(S, device=length.device)
        token = forced[position.clamp(max=len(forced) - 1)]
        known, token = token >= 0, token.clamp(min=0)
        tokens, probs = torch.where(known, token, self.tokens), self.probs
        if probs is not None:
            certain = torch.zeros_like(probs).scatter(-1, token[..., None], 1.0)
            probs = torch.where(known[..., None], certain, probs)
        return replace(self, tokens=tokens, probs=probs)


@dataclass(frozen=True)
class Verdict:
    """The decision of an acceptance rule on one pass.

    Attributes:
        path: int64 `[B, A]`, the accepted nodes in order, root first. Entries from index `count` on are undefined.
        count: int64 `[B]`, number of accepted nodes including the root, at least 1. Equals the number of tokens committed.
        next_token: int64 `[B]`, the token after the last accepted node.
        relaxation: float32 `[B]`, acceptance probability spent beyond the exact rule. None for exact rules, which spend none.
        sampled: int64 `[B, T]`, a sample from the target distribution after each node, if the rule produces them: the tokens
            selected by the shared noise, or the accepted draft tokens with replacements for the rejected ones.
    """

    path: Tensor
    count: Tensor
    next_token: Tensor
    relaxation: Tensor | None = None
    sampled: Tensor | None = None


@dataclass(frozen=True)
class PassResult:
    """Result of one pass, as seen by drafters.

    Attributes:
        draft: the draft that was verified.
        probs: float32 `[B, T, V]`, the target distribution after each node. None where neither the rule nor the drafter
            uses it (`Drafter.uses_probs`).
        features: from the `Output` of the model.
        verdict: decision of the rule.
        noise: noise of the pass; its positions are those of the token after each node.
        count: int64 `[B]`, number of tokens committed: that of the verdict, minus those past the end of the grid; 0 for a
            finished image and for a free slot.
    """

    draft: Draft
    probs: Any
    features: Tensor | None
    verdict: Verdict
    noise: Noise
    count: Tensor
