"""A tiny next-scale model whose joint distribution can be enumerated: its logits are a table over all tokens before a scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


@dataclass
class ScaleState:
    """Of B images: their tables, and by scale held what it was fed, as keys and values would be made of it."""

    condition: Tensor
    fed: list[Tensor] = field(default_factory=list)


class ScaleTable:
    """`ScaleModel` of V tokens; the condition is int64 `[B]`, one table each. A canvas is the tokens so far, V where none is.

    It refuses a pass whose earlier scales were not fed what they are fed now: a cache would hold another picture's keys.
    """

    def __init__(
        self,
        vocab: int = 3,
        scale_tokens: tuple[int, ...] = (1, 2, 2),
        conditions: int = 2,
        seed: int = 0,
        spread: float = 1.5,
        codes: tuple[int, ...] | None = None,
    ):
        generator = torch.Generator().manual_seed(seed)
        self.vocab, self.scale_tokens = vocab, scale_tokens
        self.scale_codes = codes or (vocab,) * len(scale_tokens)
        self.ends = list(accumulate(scale_tokens))
        self.tables = [
            torch.randn(conditions, (vocab + 1) ** (end - n), n, vocab, generator=generator) * spread
            for n, end in zip(scale_tokens, self.ends, strict=True)
        ]
        self.device = torch.device("cpu")
        self.draft_model: ScaleTable | None = None
        self.cost_key: str | None = None
        self.passes: list[tuple[int, int]] = []  # first and last scale that each fed

    def logits(self, condition: Tensor, before: Tensor, scale: int) -> Tensor:
        """`[B, n, codes]` behind tokens `[B, ...]` of all earlier scales."""
        weights = (self.vocab + 1) ** torch.arange(before.shape[1])
        return self.tables[scale][condition, (before * weights).sum(1)][..., : self.scale_codes[scale]]

    def start(self, condition: Tensor) -> ScaleState:
        return ScaleState(condition)

    def canvas(self, batch: int) -> Tensor:
        return torch.full((batch, self.ends[-1]), self.vocab)

    def add(self, canvas: Tensor, tokens: Tensor | None, scale: int) -> tuple[Tensor, Tensor | None]:
        canvas = canvas.clone()
        if tokens is not None:
            canvas[:, self.ends[scale] - self.scale_tokens[scale] : self.ends[scale]] = tokens
        return canvas, canvas if scale + 1 < len(self.scale_tokens) else None

    def forward(
        self, state: ScaleState, inputs: Sequence[Tensor | None], count: int, guidance: Sequence[float]
    ) -> list[Tensor]:
        first, found = len(state.fed), []
        fed = [self.canvas(len(state.condition)) if each is None else each for each in inputs]
        if not first < len(fed) or count > len(fed) - first or len(guidance) != count:
            raise AssertionError(f"{first} scales held, {len(fed)} fed, logits of {count}, guidance {guidance}")
        for held, now in zip(state.fed, fed, strict=False):
            if not torch.equal(held, now):
                raise AssertionError("the state holds a scale that was fed something else")
        self.passes.append((first, len(fed) - 1))
        state.fed = fed
        for scale in range(len(fed) - count, len(fed)):
            found.append(self.logits(state.condition, fed[scale][:, : self.ends[scale] - self.scale_tokens[scale]], scale))
        return found

    def rollback(self, state: ScaleState, scale: int) -> None:
        del state.fed[scale:]

    def joint(self, condition: int, to_probs: Callable[[Tensor], Tensor]) -> Tensor:
        """Probabilities of all V^L pictures, float64 `[V^L]`, the first token the most significant."""
        V, L = self.vocab, self.ends[-1]
        pictures = torch.cartesian_prod(*[torch.arange(V)] * L)
        which = torch.full((len(pictures),), condition)
        total = torch.ones(len(pictures), dtype=torch.float64)
        for scale, (n, end) in enumerate(zip(self.scale_tokens, self.ends, strict=True)):
            probs: Any = to_probs(self.logits(which, pictures[:, : end - n], scale)).double()
            probs = torch.nn.functional.pad(probs, (0, V - probs.shape[-1]))
            total *= probs.gather(2, pictures[:, end - n : end, None])[..., 0].prod(1)
        return total
