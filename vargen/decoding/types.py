"""The types that every method is written in: what a decoder sees of a model, a draft, and a verdict on it.

Shape suffixes: B images, T fed tokens of one pass (the root, then the draft), A slots of the longest path, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from vargen.decoding.noise import Noise
from vargen.values import real, shown, whole


@dataclass(frozen=True)
class Tree:
    """The shape of a pass: which fed token follows which. A chain is the tree whose parents are -1, 0, 1, 2, ...

    Slot 0 is the root, the last committed token; a parent always comes before its children.

    Attributes:
        parents: int64 `[T]`, the slot that each slot follows; -1 for the root.
        depth: int64 `[T]`, steps from the root.
        ancestors: bool `[T, T]`, `[i, j]` True where slot j is slot i or one of its ancestors.
        longest: slots on the longest path, root included.
        chain: whether it is a chain, for which models have a shorter way.
    """

    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    longest: int
    chain: bool

    @staticmethod
    def of(parents: tuple[int, ...], device: torch.device | str = "cpu") -> Tree:
        """The tree of the fed slots' parents, root first.

        Raises:
            ValueError: if the first parent is not -1, or another is not an earlier slot.
        """
        return _tree(tuple(parents), torch.device(device))

    @staticmethod
    def of_chain(draft: int, device: torch.device | str = "cpu") -> Tree:
        """The root and `draft` tokens in a row."""
        return _tree(tuple(range(-1, draft)), torch.device(device))


@lru_cache(maxsize=64)
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
        chain=parents == tuple(range(-1, len(parents) - 1)),
    )


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for one pass.

    Attributes:
        tokens: int64 `[B, T - 1]`, one per slot behind the root; siblings differ.
        tree: shape of the pass, root included.
        law: float32 `[B, T - 1, V]`, the law each token was really drawn from, given what lies before it; None for a
            deterministic proposal, whose law is one on its token.
        valid: bool `[B, T - 1]`, False where an image has no draft in a slot (its window is shorter than the batch's, or the
            grid ends): rules refuse it, spend nothing on it, and draw what follows from the target's law. None: all are.
    """

    tokens: Tensor
    tree: Tree
    law: Tensor | None = None
    valid: Tensor | None = None

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
        spent: float32 `[B]`, relaxation: acceptance granted minus exact acceptance. None for exact rules, which spend none.
    """

    path: Tensor
    count: Tensor
    next_token: Tensor
    spent: Tensor | None = None


@runtime_checkable
class TokenModel(Protocol):
    """What decoding sees of a model. Guidance rows, caches and conditions are its own business."""

    @property
    def vocab(self) -> int:
        """Legal image tokens, 0 to V - 1."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens, decoded in raster order."""

    @property
    def device(self) -> torch.device: ...

    def prefill(self, condition: Any, widest: int) -> tuple[Any, Tensor]:
        """Start B images: (state, guided logits `[B, V]` of token 0). No later pass feeds more than `widest` tokens."""

    def forward(self, tokens: Tensor, state: Any, tree: Tree) -> Tensor:
        """Feed tokens `[B, T]` behind what each row holds: guided logits `[B, T, V]` of what follows each."""

    def commit(self, state: Any, path: Tensor, count: Tensor, tree: Tree) -> None:
        """Keep the first `count` slots of `path` from the last pass (see `Verdict`), forget the others."""

    def rollback(self, state: Any, length: Tensor) -> None:
        """Forget all but the first `length` `[B]` tokens that each row was fed."""


class Drafter(Protocol):
    """Proposes tokens. Holds no state of its own between images: what it needs lives in the object `start` returns.

    Attributes:
        widest: most tokens T that a pass feeds, the root included.
        topology: `"chain"` or `"tree"`, what it proposes.
    """

    @property
    def widest(self) -> int: ...

    @property
    def topology(self) -> str: ...

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling) -> Any:
        """The state of B new images.

        Raises:
            ValueError: if it cannot draft for this model, saying why.
        """

    def propose(self, state: Any, tokens: Tensor, length: Tensor, step: int) -> Draft:
        """The draft of pass `step`. `tokens` `[B, N + widest]` are meaningful up to `length` `[B]`; the last is the root."""

    def learn(self, state: Any, draft: Draft, law: Tensor, verdict: Verdict, noise: Noise) -> None:
        """See the target's laws `[B, T, V]` and the verdict of the pass."""


class AcceptanceRule(Protocol):
    """A pure function of the target's laws after each fed slot, the draft, the noise, and the relaxation spent before.

    A rule says what it is by two attributes, which `acceptance_rule` sets: `exact`, and the `topologies` it can judge. One that
    works on what a model knows of its tokens has `for_model(model)`, which returns the rule to use.

    Args:
        law: float32 `[B, T, V]`; row t is the target's law after fed slot t.
        draft: T - 1 tokens per image.
        noise: its positions `[B, T]` are those of the token that follows each slot.
        spent: float32 `[B]`, what the image's earlier passes spent. Exact rules ignore it.
    """

    def __call__(self, law: Tensor, draft: Draft, noise: Noise, spent: Tensor) -> Verdict: ...


@dataclass(frozen=True)
class Sampling:
    """How laws are made from guided logits; see `vargen.decoding.sampling.law`.

    Args:
        temperature: 0 or more; 0 is greedy.
        top_k: 1 to V, or None to keep all.
        top_p: in (0, 1].

    Raises:
        ValueError: for values outside these ranges.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        temperature, top_k, top_p = real(self.temperature), whole(self.top_k, 1), real(self.top_p)
        if temperature is None or temperature < 0:
            raise ValueError(f"temperature must be a finite number of at least 0 (0 is greedy), got {shown(self.temperature)}")
        if top_k is None and self.top_k is not None:
            given = shown(self.top_k)
            raise ValueError(f"top_k must be a whole number of at least 1, or None to keep every token, got {given}")
        if top_p is None or not 0 < top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], where 1 keeps every token, got {shown(self.top_p)}")
        for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p)):
            object.__setattr__(self, name, value)  # NumPy's numbers as Python's, which JSON knows

    def check_vocabulary(self, vocab: int) -> None:
        """Raise ValueError if `top_k` is larger than the vocabulary."""
        if self.top_k is not None and self.top_k > vocab:
            raise ValueError(f"top_k must be at most the vocabulary of {vocab} tokens, got {shown(self.top_k)}; None keeps all")


@dataclass
class Progress:
    """What a callback sees after each pass.

    Attributes:
        step: target passes so far, the prefill counted as the first.
        tokens: int64 `[B, N]`; entries at or past `length` are not drawn yet.
        length: int64 `[B]`, tokens drawn per image.
        total: N.
        accepted: int64 `[B]`, tokens that this pass committed.
    """

    step: int
    tokens: Tensor
    length: Tensor
    total: int
    accepted: Tensor


@dataclass
class Decoded:
    """Result of `decode`: tokens int64 `[B, N]`, length int64 `[B]` (N unless a callback stopped it), and statistics."""

    tokens: Tensor
    length: Tensor
    stats: Any
    finished: bool = field(default=True)
