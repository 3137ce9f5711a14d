"""Jacobi drafting: feed a window of tokens in one pass and draft the next window from its output.

There is no second model and no training. Draft tokens are sampled from the target's own probabilities in the previous pass,
which are one pass stale (Teng et al. 2024, speculative Jacobi decoding). Verification only requires that the probabilities of a
draft token given the earlier positions are known. This leaves two choices: how uncommitted draft tokens are resampled
(`coupling`), and how positions that no pass has processed are initialized (`initial`).

Shape suffixes: B images, T tokens fed in one pass, S = T - 1 draft tokens, N tokens of the grid, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from vargen.decoding.interfaces import Drafter, LowResModel, TokenModel
from vargen.decoding.next_token.acceptance import gather_p_and_q, resample_rejected
from vargen.decoding.next_token.compiled_steps import draft_window
from vargen.decoding.next_token.drafters.initial import (
    INITIAL_DRAFTS,
    Context,
    InitialDraft,
    make_low_res_initial,
    require_low_res_model,
)
from vargen.decoding.next_token.graphs import register_state
from vargen.decoding.next_token.rows import put_rows
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import Sampling
from vargen.decoding.tree import Draft, Output, Step, Tree
from vargen.decoding.window import FixedWindow, WindowPolicy, WindowState, parse_window
from vargen.kernels.dispatch import is_eager_cpu
from vargen.values import resolve_name, short_repr

Initial = Literal["uniform", "low-res"]


@register_state
@dataclass
class LastPass:
    """Result of the last pass.

    Its probabilities `[B, T, V]`, if they were computed, resampled tokens `[B, T]`, and number of committed tokens `[B]`.
    """

    probs: Tensor | None
    resampled: Tensor
    num_committed: Tensor


@register_state
@dataclass
class JacobiState:
    """State of B images.

    Attributes:
        num_tokens: N.
        columns: width of the grid.
        low_res: state of the low-resolution model; None without one.
        last: None if the last pass had no draft.
    """

    vocab: int
    num_tokens: int
    columns: int
    window: WindowState
    low_res: Any = None
    last: LastPass | None = None

    def insert_rows(self, new: JacobiState, rows: Tensor) -> JacobiState:
        """Replace images of the batch. The whole window of a new image consists of initial draft tokens."""
        last = self.last
        if last is not None:
            T, n = last.resampled.shape[1], len(rows)

            def put(held: Tensor, value: int) -> Tensor:
                return put_rows(held, held.new_full((n, *held.shape[1:]), value), rows)

            probs = None if last.probs is None else put(last.probs, 0)
            last = LastPass(probs, put(last.resampled, 0), put(last.num_committed, T))
        return replace(self, last=last)


@dataclass(frozen=True)
class Jacobi(Drafter):
    """Draft a chain from the output of the previous pass.

    Args:
        window: tokens fed per pass, including the last committed one: an integer from 2 to the size of the grid, a
            `WindowPolicy`, or `"auto"` for an `AutoWindow`.
        coupling: how uncommitted draft tokens are resampled: `"independent"` (SJD), `"maximal"` or `"gumbel"` (SCD),
            `"from-verdict"` (by the acceptance rule, as in MuLo), or a function like those in
            `vargen.decoding.next_token.drafters.jacobi`.
        initial: first draft token of a position: `"uniform"`, `"low-res"` (from a low-resolution image), or a function like
            those in `vargen.decoding.next_token.drafters.initial`.

    Raises:
        ValueError: if the window is below 2, or a name is unknown (suggests the nearest). `bind` raises it if the window
            exceeds the grid, or the low-resolution model is missing or has another vocabulary or grid.
    """

    window: int | str | WindowPolicy = 16
    coupling: Literal["independent", "maximal", "gumbel", "from-verdict"] | Coupling = "independent"
    initial: Initial | InitialDraft = "uniform"
    low_res_model: LowResModel | None = field(default=None, init=False, repr=False, compare=False)  # set by `bind`

    def __post_init__(self) -> None:
        policy = parse_window(self.window)
        if isinstance(policy, FixedWindow):
            object.__setattr__(self, "window", policy.max_width)  # convert NumPy integers
        resolve_name("coupling", self.coupling, COUPLINGS)
        resolve_name("initial", self.initial, INITIAL_DRAFTS)

    @property
    def max_width(self) -> int:
        return parse_window(self.window).max_width

    @property
    def uses_probs(self) -> bool:
        return self.coupling != "gumbel" or not isinstance(self.initial, str)

    @property
    def join_blocker(self) -> str | None:
        if isinstance(self.initial, str):
            return None
        return "initial must be a name: a function may use the last pass of the batch, which an image that joins has not seen"

    def bind(self, model: TokenModel) -> Self:
        """Return the drafter with the low-resolution model, if it needs one.

        Raises:
            ValueError: if the window exceeds the grid and cannot be shortened, or there is no such model.
        """
        self.validate_grid(model.grid[0] * model.grid[1])
        if self.initial != "low-res":
            return self
        bound = replace(self)
        object.__setattr__(bound, "low_res_model", require_low_res_model(model))
        return bound

    def validate_grid(self, tokens: int) -> None:
        """Raise ValueError unless the window fits, or can be shortened to, a grid of `tokens` tokens."""
        window = parse_window(self.window)
        if window.max_width > tokens and not window.fits_any_grid:
            raise ValueError(f"window must be from 2 to the grid's {tokens} tokens, got {short_repr(window.max_width)}")

    def fit_to_grid(self, tokens: int) -> Self:
        """Return the drafter with a window of at most `tokens` tokens."""
        return replace(self, window=tokens) if isinstance(self.window, int) and self.window > tokens else self

    def fix_length(self, drafts: int) -> Self:
        return self if isinstance(self.window, int) else replace(self, window=drafts + 1)

    def with_window(self, window: int | str) -> Self:
        """Return the drafter with another window; see `window` above."""
        return replace(self, window=window)

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> JacobiState:
        (rows, columns), window = model.grid, parse_window(self.window).start(model, condition, len(seeds))
        low_res = None if self.low_res_model is None else self.low_res_model.start(condition, seeds, sampling)
        return JacobiState(model.vocab, rows * columns, columns, window, low_res)

    def propose(self, state: JacobiState, tokens: Tensor, length: Tensor, noise: Noise) -> Draft:
        return self.propose_window(state, state.window.choose_width(), tokens, length, noise)

    def propose_window(self, state: JacobiState, width: int, tokens: Tensor, length: Tensor, noise: Noise) -> Draft:
        """Return the draft of a pass that feeds `width` tokens."""
        if width == 1:
            return Draft.make_empty(len(tokens), state.vocab, tokens.device)
        if (draft := self._shift_compiled(state, width, noise)) is not None:
            return draft
        noise = noise.shift(torch.arange(width - 1, device=tokens.device))
        initial: InitialDraft = resolve_name("initial", self.initial, INITIAL_DRAFTS)
        if self.low_res_model is not None:
            initial = make_low_res_initial(self.low_res_model, state.low_res)
        probs: Tensor | None
        if state.last is None:
            drafted, probs = initial(Context(state.vocab, state.columns, tokens, length, None, noise))
            probs = probs.expand(len(tokens), width - 1, -1)
        else:
            drafted, probs = _shift_window(state, state.last, initial, tokens, length, noise)
        return Draft(drafted, Tree.make_chain(width - 1, tokens.device), probs, noise.position < state.num_tokens)

    def _shift_compiled(self, state: JacobiState, width: int, noise: Noise) -> Draft | None:
        """The draft of `_shift_window` without probabilities, from a compiled function; None where it does not apply."""
        last = state.last
        if last is None or last.probs is not None or self.initial != "uniform":
            return None
        found = draft_window(last.resampled, last.num_committed, noise, width - 1, state.num_tokens, state.vocab)
        if found is None:
            return None
        drafted, valid = found
        return Draft(drafted, Tree.make_chain(width - 1), valid=valid)

    def join(self, state: JacobiState, new: JacobiState, rows: Tensor, tokens: Tensor, length: Tensor) -> JacobiState:
        state = state.insert_rows(new, rows)
        if self.low_res_model is None:
            return state
        return replace(state, low_res=self.low_res_model.join(state.low_res, new.low_res, rows))

    def observe(self, state: JacobiState, step: Step) -> JacobiState:
        if not isinstance(state.window, FixedWindow):
            state.window.observe(step.verdict.count, step.noise.position[:, 0] < state.num_tokens)
        if step.noise.position.shape[1] == 1:  # if the window widens again, it starts from initial draft tokens
            return replace(state, last=None)
        coupling: Coupling = resolve_name("coupling", self.coupling, COUPLINGS)
        last = LastPass(step.probs, coupling(step), step.verdict.count)
        return replace(state, last=last)


def _shift_window(
    state: JacobiState, last: LastPass, initial: InitialDraft, tokens: Tensor, length: Tensor, noise: Noise
) -> tuple[Tensor, Tensor | None]:
    """Shift committed tokens out of the window and fill its end with initial draft tokens.

    Returns the draft tokens `[B, S]` and, if those of the last pass are known, their probabilities `[B, S, V]`. Row t of the
    last pass belongs to position (old length + t).
    """
    (B, T_old), device = last.resampled.shape, tokens.device
    image = torch.arange(B, device=device)[:, None]
    source = last.num_committed[:, None] + torch.arange(noise.position.shape[1], device=device)
    unseen = source >= T_old
    shifted = last.resampled.gather(1, source.clamp(max=T_old - 1))
    known = tokens.scatter(1, noise.position.clamp(max=tokens.shape[1] - 1), shifted)  # undefined after the known ones
    num_known = length + (T_old - last.num_committed)
    first = _first_unseen_slot(T_old - last.num_committed, noise.position.shape[1])
    unseen_noise = replace(noise, position=noise.position[:, first:]).where(unseen[:, first:])
    last_probs = None if last.probs is None else last.probs[:, -1]
    drafted, probs = initial(Context(state.vocab, state.columns, known, num_known, last_probs, unseen_noise))
    drafted = torch.where(unseen, torch.cat([shifted[:, :first], drafted], dim=1), shifted)
    if last.probs is None:
        return drafted, None
    if probs.shape[1] == 1:  # one row for all positions: indexing an appended row is cheaper than an element-wise select
        rows = torch.cat([last.probs, probs.expand(B, 1, -1)], dim=1)
        return drafted, rows[image, torch.where(unseen, T_old, source)]
    old = last.probs[image, source.clamp(max=T_old - 1)]
    new = torch.where(unseen[:, first:, None], probs, old[:, first:])
    return drafted, torch.cat([old[:, :first], new], dim=1)


def _first_unseen_slot(num_seen: Tensor, slots: int) -> int:
    """Return the first slot where any image may need an initial draft token, so that none are computed before it.

    At least one slot is computed, to know the shape. Off the eager CPU it returns 0: passes keep static shapes and the host
    does not wait for the device.
    """
    if not is_eager_cpu(num_seen):
        return 0
    return min(int(num_seen.min()), slots - 1)


Coupling = Callable[[Step], Tensor]


def couple_independently(step: Step) -> Tensor:
    """Sample independently of the old draft (Teng et al. 2024, SJD)."""
    return step.noise.sample(step.probs, Purpose.RESAMPLE)


def couple_maximally(step: Step) -> Tensor:
    """Maximal coupling: keep the old draft token d with probability min(1, p(d) / q(d)), otherwise sample from norm((p - q)+).

    The old and the new token agree with probability 1 - TV(p, q), the maximum over all couplings (SCD, section 4; SJD-PAC calls
    this step adaptive continuation). Slots without a valid draft token are sampled from p.
    """
    p, q = gather_p_and_q(step.probs, step.draft)
    return resample_rejected(step.probs, step.draft, step.noise, step.noise.uniform(Purpose.RESAMPLE_ACCEPT)[:, :-1] * q < p)


def couple_by_gumbel(step: Step) -> Tensor:
    """Gumbel coupling: argmax(log p + G) with the shared noise G of the position, which is the same in every pass.

    The old and the new token agree with probability at least (1 - TV) / (1 + TV) (SCD, section 4). If the rule is
    `shared_noise`, it has already sampled these tokens.
    """
    sampled = step.verdict.sampled
    return step.noise.sample(step.probs, Purpose.TOKEN) if sampled is None else sampled


def couple_from_verdict(step: Step) -> Tensor:
    """Use the tokens that the rule kept or resampled (`Verdict.sampled` of `PooledRule`); without them, couple maximally."""
    return couple_maximally(step) if step.verdict.sampled is None else step.verdict.sampled


COUPLINGS: dict[str, Coupling] = {
    "independent": couple_independently,
    "maximal": couple_maximally,
    "gumbel": couple_by_gumbel,
    "from-verdict": couple_from_verdict,
}
