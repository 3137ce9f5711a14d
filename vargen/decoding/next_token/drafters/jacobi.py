"""Jacobi drafting: feed a window of tokens in one pass and draft the next window from its output.

There is no second model and no training. Draft tokens are sampled from the target's own probabilities in the previous pass,
which are one pass stale (Teng et al. 2024, speculative Jacobi decoding). Verification only requires that the probabilities of a
draft token given the earlier positions are known. This leaves two choices: how uncommitted draft tokens are resampled
(`coupling`), and how positions that no pass has processed are initialized (`initial`).

Shape suffixes: B images, T tokens fed in one pass, S = T - 1 draft tokens, N tokens of the grid, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from vargen.decoding.next_token.acceptance import gather_p_and_q, resample_rejected
from vargen.decoding.next_token.draft import Draft, Output, Step, Tree
from vargen.decoding.next_token.draft_length import Fixed, Window, WindowState, parse_window
from vargen.decoding.next_token.drafters.initial import (
    INITIAL_DRAFTS,
    LOW_RES,
    Context,
    InitialDraft,
    from_low_res,
    low_res_model,
)
from vargen.decoding.next_token.protocols import Drafter, TokenModel
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import Sampling
from vargen.kernels.dispatch import is_eager_cpu
from vargen.values import resolve_name, short_repr

Initial = Literal["uniform", "low-res", "low-res-refreshed"]


@dataclass
class _Pass:
    """Result of the last pass.

    Its probabilities `[B, T, V]`, resampled tokens `[B, T]`, number of committed tokens `[B]`, and how many of the T fed tokens
    belong to the image's own window, `[B]`.
    """

    probs: Tensor
    resample_rejected: Tensor
    count: Tensor
    own: Tensor


@dataclass
class _State:
    """State of B images.

    `own`: how many tokens fed in the current pass belong to the image's own window, `[B]`; None: all.
    """

    vocab: int
    total: int
    columns: int
    seeds: Tensor
    window: WindowState
    initial: InitialDraft
    own: Tensor | None = None
    last: _Pass | None = None


@dataclass(frozen=True)
class Jacobi(Drafter):
    """Draft a chain from the output of the previous pass.

    Args:
        window: tokens fed per pass, including the last committed one: an integer from 2 to the size of the grid, a `Window`, or
            its name: `"adaptive"` or `"auto"`.
        coupling: how uncommitted draft tokens are resampled: `"independent"` (SJD), `"maximal"` or `"gumbel"` (SCD), `"judged"`
            (by the acceptance rule, as in MuLo), or a function like those in `vargen.decoding.next_token.drafters.jacobi`.
        initial: first draft token of a position: `"uniform"`, `"low-res"` (from a low-resolution image), `"low-res-refreshed"`
            (from one that is updated with the committed tokens), or a function like those in
            `vargen.decoding.next_token.drafters.initial`.

    Raises:
        ValueError: if the window is below 2, or a name is unknown (suggests the nearest). `bind` raises it if the window
            exceeds the grid, or the low-resolution model is missing or has another vocabulary or grid.
    """

    window: int | str | Window = 16
    coupling: Literal["independent", "maximal", "gumbel", "judged"] | Coupling = "independent"
    initial: Initial | InitialDraft = "uniform"

    def __post_init__(self) -> None:
        policy = parse_window(self.window)
        if isinstance(policy, Fixed):
            object.__setattr__(self, "window", policy.max_fed)  # convert NumPy integers
        resolve_name("coupling", self.coupling, COUPLINGS)
        resolve_name("initial", self.initial, INITIAL_DRAFTS)

    @property
    def max_width(self) -> int:
        return parse_window(self.window).max_fed

    def bind(self, model: TokenModel) -> Self:
        """Return this drafter.

        Raises:
            ValueError: if the window exceeds the grid and cannot be shortened.
        """
        self.validate_grid(model.grid[0] * model.grid[1])
        if self.initial in LOW_RES:
            low_res_model(model)
        return self

    def validate_grid(self, tokens: int) -> None:
        """Raise ValueError unless the window fits, or can be shortened to, a grid of `tokens` tokens."""
        window = parse_window(self.window)
        if window.max_fed > tokens and not window.shrinks:
            raise ValueError(f"window must be from 2 to the grid's {tokens} tokens, got {short_repr(window.max_fed)}")

    def fit_to_grid(self, tokens: int) -> Self:
        """Return the drafter with a window of at most `tokens` tokens."""
        return replace(self, window=tokens) if isinstance(self.window, int) and self.window > tokens else self

    def with_window(self, window: int | str) -> Self:
        """Return the drafter with another window; see `window` above."""
        return replace(self, window=window)

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> _State:
        rows, columns = model.grid
        window = parse_window(self.window).start(model, condition, len(seeds))
        initial: InitialDraft = resolve_name("initial", self.initial, INITIAL_DRAFTS)
        if self.initial in LOW_RES:
            refreshed = self.initial == "low-res-refreshed"
            initial = from_low_res(low_res_model(model), condition, seeds, sampling, refreshed)
        return _State(model.vocab, rows * columns, columns, seeds, window, initial)

    def propose(self, state: _State, tokens: Tensor, length: Tensor, step: int | Tensor) -> Draft:
        state.own, T = state.window.widths(length)
        S, device = T - 1, tokens.device
        if S == 0:  # no draft; if the window widens again, start from initial draft tokens
            state.last = None
            return Draft.make_empty(len(tokens), state.vocab, device)
        slots = torch.arange(S, device=device)
        position = length[:, None] + slots
        valid = position < state.total
        if state.own is not None:
            valid &= slots < state.own[:, None] - 1
        noise = Noise(state.seeds, position, step)
        if state.last is None:
            drafted, probs = state.initial(Context(state.vocab, state.columns, tokens, length, None, noise))
            probs = probs.expand(len(tokens), S, -1)
        else:
            drafted, probs = _shifted(state, state.last, tokens, length, noise)
        return Draft(drafted, Tree.make_chain(S, device), probs, valid)

    def observe(self, state: _State, step: Step) -> _State:
        T = step.probs.shape[1]
        if T > 1:
            coupling: Coupling = resolve_name("coupling", self.coupling, COUPLINGS)
            own = torch.full_like(step.count, T) if state.own is None else state.own
            state.last = _Pass(step.probs, coupling(step), step.verdict.count, own)
        state.window.observe(step.verdict.count, step.noise.position[:, 0] < state.total)
        return state


def _shifted(state: _State, last: _Pass, tokens: Tensor, length: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Shift committed tokens out of the window and fill its end with initial draft tokens.

    Returns the draft tokens `[B, S]` and their probabilities `[B, S, V]`. Row t of the last pass belongs to position (old
    length + t).
    """
    (B, T_old, _), device = last.probs.shape, tokens.device
    at = torch.arange(B, device=device)
    source = last.count[:, None] + torch.arange(noise.position.shape[1], device=device)
    fresh = source >= last.own[:, None]
    kept = last.resample_rejected.gather(1, source.clamp(max=T_old - 1))
    known = tokens.scatter(1, noise.position.clamp(max=tokens.shape[1] - 1), kept)  # undefined after the known ones
    reach = length + (last.own - last.count).clamp(min=0)
    first = _first_fresh(last, noise.position.shape[1])
    coins = replace(noise, position=noise.position[:, first:])
    context = Context(state.vocab, state.columns, known, reach, last.probs[at, last.own - 1], coins, length)
    drafted, probs = state.initial(context)
    drafted = torch.where(fresh, torch.cat([kept[:, :first], drafted], dim=1), kept)
    if probs.shape[1] == 1:  # one row for all positions: indexing an appended row is cheaper than an element-wise select
        rows = torch.cat([last.probs, probs.expand(B, 1, -1)], dim=1)
        return drafted, rows[at[:, None], torch.where(fresh, T_old, source)]
    old = last.probs[at[:, None], source.clamp(max=T_old - 1)]
    new = torch.where(fresh[:, first:, None], probs, old[:, first:])
    return drafted, torch.cat([old[:, :first], new], dim=1)


def _first_fresh(last: _Pass, slots: int) -> int:
    """Return the first slot where any image may need an initial draft token, so that none are computed before it.

    At least one slot is computed, to know the shape. Off the eager CPU it returns 0: passes keep static shapes and the host
    does not wait for the device.
    """
    if not is_eager_cpu(last.count):
        return 0
    return min(max(int((last.own - last.count).min()), 0), slots - 1)


Coupling = Callable[[Step], Tensor]


def independent(step: Step) -> Tensor:
    """Sample independently of the old draft (Teng et al. 2024, SJD)."""
    return step.noise.draw(step.probs, Purpose.REDRAW)


def maximal(step: Step) -> Tensor:
    """Maximal coupling: keep the old draft token d with probability min(1, p(d) / q(d)), otherwise sample from norm((p - q)+).

    The old and the new token agree with probability 1 - TV(p, q), the maximum over all couplings (SCD, section 4; SJD-PAC calls
    this step adaptive continuation). Slots without a valid draft token are sampled from p.
    """
    p, q = gather_p_and_q(step.probs, step.draft)
    return resample_rejected(step.probs, step.draft, step.noise, step.noise.uniform(Purpose.REDRAW_ACCEPT)[:, :-1] * q < p)


def gumbel(step: Step) -> Tensor:
    """Gumbel coupling: argmax(log p + G) with the shared noise G of the position, which is the same in every pass.

    The old and the new token agree with probability at least (1 - TV) / (1 + TV) (SCD, section 4). If the rule is
    `shared_noise`, it has already sampled these tokens.
    """
    drawn = step.verdict.sampled
    return step.noise.draw(step.probs, Purpose.TOKEN) if drawn is None else drawn


def judged(step: Step) -> Tensor:
    """Use the tokens that the rule kept or resampled (`Verdict.sampled` of `PooledRule`); without them, use `maximal`."""
    return maximal(step) if step.verdict.sampled is None else step.verdict.sampled


COUPLINGS: dict[str, Coupling] = {"independent": independent, "maximal": maximal, "gumbel": gumbel, "judged": judged}
