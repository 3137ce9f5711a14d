"""Wavefront drafting: start rows before the row above is complete.

After ZipAR (He et al. 2024, arXiv 2412.04062): tokens far to the right in the row above carry little information about a token,
so a row can start as soon as the row above is a few columns ahead. Here the rows are part of a Jacobi window: draft tokens
stand in for tokens that are not committed yet (as in parallel Jacobi decoding), and tokens kept despite that count as
relaxation.

Shape suffixes: B images, T tokens fed in one pass, S = T - 1 draft tokens, N tokens of the grid.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.interfaces import TokenModel
from vargen.decoding.next_token.drafters.jacobi import Jacobi, JacobiState
from vargen.decoding.next_token.graphs import register_state
from vargen.decoding.next_token.rows import insert_rows
from vargen.decoding.noise import Noise
from vargen.decoding.sampling import Sampling
from vargen.decoding.tree import Draft, Output, Step
from vargen.values import number_field, short_repr, validate_fields


@register_state
@dataclass
class WavefrontState:
    """State of B images: that of the window, and a mask of settled positions.

    `settled` is bool `[B, N + 1]`; its last entry is for positions past the grid.
    """

    jacobi: JacobiState
    settled: Tensor


@dataclass(frozen=True)
class Wavefront(Jacobi):
    """A Jacobi window over several rows, each of which is settled from left to right.

    A token is settled once it was sampled with a settled left neighbor and with the row above settled for `reach` more columns.
    Only rules that respect this (`PooledRule`) keep it.

    Args:
        window, coupling, initial: see `Jacobi`; the coupling must be `"from-verdict"`, which keeps what the rule keeps.
        reach: number of columns, at least 0, that the row above must be ahead.

    Raises:
        ValueError: as `Jacobi`, and if the reach or the coupling is invalid.
    """

    window: Any = 48
    coupling: Any = "from-verdict"
    reach: int = number_field(4, 0, is_integer=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_fields(self)
        if self.coupling != "from-verdict":
            raise ValueError(f"coupling of a wavefront must be 'from-verdict', got {short_repr(self.coupling)}")

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> Any:
        settled = torch.zeros(len(seeds), model.grid[0] * model.grid[1] + 1, dtype=torch.bool, device=seeds.device)
        return WavefrontState(super().start(model, condition, seeds, sampling, first), settled)

    def propose(self, state: Any, tokens: Tensor, length: Tensor, noise: Noise) -> Draft:
        draft = super().propose(state.jacobi, tokens, length, noise)
        position = length[:, None] + torch.arange(draft.tokens.shape[1], device=length.device)
        return replace(draft, force_accept=state.settled.gather(1, position.clamp(max=state.jacobi.num_tokens)))

    def join(self, state: Any, new: Any, rows: Tensor, tokens: Tensor, length: Tensor) -> Any:
        jacobi = super().join(state.jacobi, new.jacobi, rows, tokens, length)
        return WavefrontState(jacobi, insert_rows(state.settled, new.settled, rows))

    def observe(self, state: Any, step: Step) -> Any:
        """Mark the tokens that this pass sampled with enough settled context as settled."""
        N, columns, device = state.jacobi.num_tokens, state.jacobi.columns, step.count.device
        length = step.noise.position[:, :1]  # before the pass
        place = torch.arange(N, device=device)
        column = place % columns
        settled = state.settled[:, :N] | (place < length)  # as of the time they were fed
        left = settled[:, (place - 1).clamp(min=0)] | (column == 0)
        above = place - columns + (columns - 1 - column).clamp(max=self.reach)  # rightmost that must be settled
        over = settled[:, above.clamp(min=0)] | (place < columns)
        fed = place < length + step.noise.position.shape[1]
        state.settled[:, :N] |= left & over & fed
        return replace(state, jacobi=super().observe(state.jacobi, step))
