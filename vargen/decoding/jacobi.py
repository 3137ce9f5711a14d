"""Jacobi drafting: a window of tokens is fed at once, and what the pass says of them drafts the next window.

No second model and no training: the drafts of a pass are drawn from the target's own laws of the pass before, one pass stale
(Teng et al. 2024, speculative Jacobi decoding). A draft may be anything whose law given the earlier positions is known, which
leaves open how the tail is redrawn (`vargen.decoding.tails`) and how positions that no pass has seen begin
(`vargen.decoding.first_drafts`).

Shape suffixes: B images, T fed tokens of one pass, S = T - 1 drafts, N tokens of the grid, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from vargen.decoding.first_drafts import FIRST_DRAFTS, Context, FirstDraft
from vargen.decoding.naming import lookup
from vargen.decoding.noise import Noise
from vargen.decoding.tails import TAILS, Tail
from vargen.decoding.types import Draft, Sampling, TokenModel, Tree, Verdict
from vargen.decoding.window import Fixed, Window, window_of
from vargen.values import shown


@dataclass
class _State:
    """Of B images; the last pass's laws, tail, own windows and committed counts, from which the next window is made."""

    vocab: int
    total: int
    columns: int
    seeds: Tensor
    window: Any
    own: Tensor | int = 0
    law: Tensor | None = None
    tail: Tensor | None = None
    count: Tensor | None = None


@dataclass(frozen=True)
class Jacobi:
    """Drafts from the last pass.

    Args:
        window: fed tokens of a pass, the last committed one included: a whole number from 2 to the grid, a `Window`, or its
            name: `"adaptive"` or `"auto"`.
        tail: how drafts that were not committed are redrawn: `"independent"` (SJD), `"maximal"` or `"gumbel"` (SCD), or a
            function like those in `vargen.decoding.tails`.
        first: the first draft of a position: `"uniform"`, `"left"`, `"above"`, `"previous"`, `"mixture"`, or a function like
            those in `vargen.decoding.first_drafts`.

    Raises:
        ValueError: for a window below 2 or an unknown name (names the nearest); by `start` for a window above the grid.
    """

    window: int | str | Window = 16
    tail: Literal["independent", "maximal", "gumbel"] | Tail = "independent"
    first: Literal["uniform", "left", "above", "previous", "mixture"] | FirstDraft = "uniform"
    topology: str = field(default="chain", init=False)

    def __post_init__(self) -> None:
        policy = window_of(self.window)
        if isinstance(policy, Fixed):
            object.__setattr__(self, "window", policy.widest)  # also where NumPy's number was given
        lookup("tail", self.tail, TAILS)
        lookup("first", self.first, FIRST_DRAFTS)

    @property
    def widest(self) -> int:
        return window_of(self.window).widest

    def check_grid(self, tokens: int) -> None:
        """Raise ValueError unless the window fits a grid of so many tokens, or shrinks to it."""
        window = window_of(self.window)
        if window.widest > tokens and not window.shrinks:
            raise ValueError(f"window must be from 2 to the grid's {tokens} tokens, got {shown(window.widest)}")

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling) -> _State:
        rows, columns = model.grid
        self.check_grid(rows * columns)
        window = window_of(self.window)
        return _State(model.vocab, rows * columns, columns, seeds, window.start(model, condition, len(seeds)))

    def propose(self, state: _State, tokens: Tensor, length: Tensor, step: int) -> Draft:
        own, T = state.window.widths(length)
        S = T - 1
        device = tokens.device
        if S == 0:  # no drafts; should the window widen again, it begins with first drafts
            state.law = state.tail = state.count = None
            return Draft.empty(len(tokens), state.vocab, device)
        slots = torch.arange(S, device=device)
        position = length[:, None] + slots
        valid = position < state.total
        if own is not None:
            valid &= slots < own[:, None] - 1
        noise = Noise(state.seeds, position, step)
        seen, state.own = state.own, T if own is None else own  # fed tokens of the last pass that were the image's own
        first: Callable[[Context], tuple[Tensor, Tensor]] = lookup("first", self.first, FIRST_DRAFTS)
        if state.law is None or state.tail is None or state.count is None:
            drafted, law = first(Context(state.vocab, state.columns, tokens, length, None, noise))
            return Draft(drafted, Tree.of_chain(S, device), law.expand(len(tokens), S, -1), valid)
        # Row t of the last pass is the law at (old length + t): what was committed shifts out, first drafts fill the end.
        B, T_old, _ = state.law.shape
        at = torch.arange(B, device=device)
        seen = torch.full_like(length, seen) if isinstance(seen, int) else seen
        source = state.count[:, None] + slots
        fresh = source >= seen[:, None]
        kept = state.tail.gather(1, source.clamp(max=T_old - 1))
        known = tokens.scatter(1, position.clamp(max=tokens.shape[1] - 1), kept)  # past the known ones: meaningless
        last_law = state.law[at, seen - 1]
        context = Context(state.vocab, state.columns, known, length + (seen - state.count).clamp(min=0), last_law, noise)
        drafted, law = first(context)
        if law.shape[1] == 1:  # one law for all: an extra row to pick, which is cheaper than selecting element by element
            law = torch.cat([state.law, law.expand(B, 1, -1)], dim=1)[at[:, None], torch.where(fresh, T_old, source)]
        else:
            law = torch.where(fresh[..., None], law, state.law[at[:, None], source.clamp(max=T_old - 1)])
        return Draft(torch.where(fresh, drafted, kept), Tree.of_chain(S, device), law, valid)

    def learn(self, state: _State, draft: Draft, law: Tensor, verdict: Verdict, noise: Noise) -> None:
        if law.shape[1] > 1:
            tail: Tail = lookup("tail", self.tail, TAILS)
            state.law, state.tail, state.count = law, tail(law, draft, noise), verdict.count
        state.window.learn(verdict.count, noise.position[:, 0] < state.total)
