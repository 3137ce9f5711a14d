"""Wavefront: start rows before the row above is complete (He et al. 2024, ZipAR, arXiv:2412.04062, on a Jacobi window).

Tokens far to the right in the row above carry little information about a token, so a row can start as soon as the row above is
a few columns ahead. Here the rows are part of a Jacobi window: draft tokens stand in for tokens that are not committed yet, and
tokens that are kept despite that count as relaxation.

Shape suffixes: B slots, S draft tokens, N tokens of the grid.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from vargen.decoding.interfaces import TokenModel
from vargen.decoding.jacobi import Jacobi
from vargen.decoding.noise import Noise
from vargen.decoding.relaxed_rules import PooledRule
from vargen.decoding.token_pass import TokenState
from vargen.decoding.tree import Draft, Output, PassResult, Verdict
from vargen.decoding.tree_rules import DraftTokens
from vargen.values import number_field, short_repr


@dataclass(frozen=True)
class WavefrontDraft(Draft):
    """A draft some of whose tokens are accepted whatever their current probabilities are: `settled`, bool `[B, S]`."""

    settled: Any = None


@dataclass(frozen=True)
class Wavefront(Jacobi):
    """A Jacobi window over several rows, each of which is settled from left to right.

    A token is settled once it was sampled with a settled left neighbor and with the row above settled for `reach` more columns.

    Args:
        window, initial: see `Jacobi`.
        coupling: `"from-verdict"`, which keeps what `WavefrontRule` keeps.
        reach: number of columns, at least 0, that the row above must be ahead.
    """

    window: Any = 48
    coupling: Any = "from-verdict"
    reach: int = number_field(4, 0, is_integer=True)
    settled: Tensor = field(init=False, repr=False, compare=False)  # bool [B, N + W], by position

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coupling != "from-verdict":
            raise ValueError(f"coupling of a wavefront must be 'from-verdict', got {short_repr(self.coupling)}")

    def bind(self, model: TokenModel, slots: int) -> Self:
        bound = super().bind(model, slots)
        return bound.copy(settled=torch.zeros_like(bound.drafted, dtype=torch.bool))

    def reset(self, state: TokenState, rows: Tensor, condition: Any, first: Output) -> None:
        super().reset(state, rows, condition, first)
        self.settled[rows] = False

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        draft = super().propose(state, noise, width)
        position = state.length[:, None] + torch.arange(draft.tokens.shape[1], device=state.length.device)
        return WavefrontDraft(**vars(draft), settled=self.settled.gather(1, position))

    def observe(self, state: TokenState, result: PassResult) -> None:
        """Mark the tokens that this pass sampled with enough settled context as settled."""
        N, columns, length = state.num_tokens, state.columns, state.length[:, None]
        place = torch.arange(N, device=length.device)
        fed = place < length + result.noise.position.shape[1]
        settled = (self.settled[:, :N] | (place < length)).unflatten(1, (-1, columns))  # as of the time they were fed
        ahead = (place[:columns] + self.reach).clamp(max=columns - 1)
        left = pad(settled[..., :-1], (1, 0), value=True)
        above = pad(settled[:, :-1, ahead], (0, 0, 1, 0), value=True)
        self.settled[:, :N] |= (left & above).flatten(1) & fed
        super().observe(state, result)


@dataclass(frozen=True, kw_only=True)
class WavefrontRule(PooledRule):
    """`PooledRule` that also accepts all settled tokens of a `WavefrontDraft`, which counts as relaxation."""

    size: int = number_field(0, 0, is_integer=True, meaning="the number of neighbors")
    threshold: float = number_field(2.0, 0, open_below=True)
    settled: Tensor = field(init=False, repr=False, compare=False)  # bool [B, S], of the draft that is verified

    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
        settled = getattr(draft, "settled", torch.zeros_like(draft.tokens, dtype=torch.bool))
        return super(WavefrontRule, self.copy(settled=settled)).__call__(probs, draft, noise, relaxation)

    def relaxation(self, drafted: DraftTokens) -> Tensor:
        return torch.where(self.settled, 1 - drafted.exact_accept_prob, super().relaxation(drafted))
