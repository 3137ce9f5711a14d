"""Jacobi drafting: feed a window of tokens in one pass and draft the next window from its output.

There is no second model and no training. Draft tokens are sampled from the target's own probabilities in the previous pass,
which are one pass stale (Teng et al. 2024, speculative Jacobi decoding). Verification only requires that the probabilities of a
draft token given the earlier positions are known. This leaves two choices: how uncommitted draft tokens are resampled
(`coupling`), and how positions that no pass has processed are initialized (`initial`).

Shape suffixes: B slots, T tokens fed in one pass, S = T - 1 draft tokens, N tokens of the grid, W window, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from vargen.decoding.costs import candidate_widths, measure_pass_costs
from vargen.decoding.interfaces import Drafter, LowResModel, TokenModel, require_same_tokens
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.rules import gather_p_and_q, resample_rejected
from vargen.decoding.token_pass import TokenState
from vargen.decoding.tree import Draft, Output, PassResult, Tree
from vargen.decoding.window import MAX_AUTO_WIDTH, WidthController
from vargen.kernels import ops
from vargen.kernels.token_steps import draft_window
from vargen.values import require_int, resolve_name, short_repr


@dataclass(frozen=True)
class Jacobi(Drafter):
    """Draft a chain from the output of the previous pass.

    What the last pass predicted is kept by position: draft tokens and, if they are used, their probabilities. Nothing is
    shifted when tokens are committed, and the next window may be narrower or wider.

    Args:
        window: tokens fed per pass, including the last committed one: at least 2, or `"auto"` for the number that measured
            costs and recent acceptance favor; see `WidthController`.
        coupling: how uncommitted draft tokens are resampled: `"independent"` (SJD), `"maximal"` or `"gumbel"` (SCD),
            `"from-verdict"` (by the acceptance rule, as in MuLo), or a function like those in `COUPLINGS`.
        initial: first draft token of a position: `"uniform"`, or `"low-res"` (from a low-resolution image).

    Raises:
        ValueError: if the window is below 2, or a name is unknown (suggests the nearest). `bind` raises it if a low-resolution
            model is needed, and is missing or has another vocabulary or grid.
    """

    window: int | Literal["auto"] = 16
    coupling: Literal["independent", "maximal", "gumbel", "from-verdict"] | Coupling = "independent"
    initial: Literal["uniform", "low-res"] = "uniform"

    # Made by `bind`: N; draft tokens int64 [B, N + W] by position; the end (exclusive) of the positions that the last pass
    # predicted, int64 [B]; their probabilities float32 [B, W, V], at position % W. By `reset`: low-resolution images.
    num_tokens: int = field(default=sys.maxsize, init=False, repr=False, compare=False)
    drafted: Tensor = field(init=False, repr=False, compare=False)
    drafted_end: Tensor = field(init=False, repr=False, compare=False)
    probs: Tensor | None = field(init=False, repr=False, compare=False)
    low_res: LowResModel | None = field(init=False, repr=False, compare=False)
    images: Tensor | None = field(init=False, repr=False, compare=False)
    chains: dict[int, Tree] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window != "auto":
            object.__setattr__(self, "window", require_int("window, unless it is 'auto',", self.window, 2))
        object.__setattr__(self, "uses_probs", self.coupling != "gumbel")
        resolve_name("coupling", self.coupling, COUPLINGS)
        if self.initial not in ("uniform", "low-res"):
            raise ValueError(f"initial must be 'uniform' or 'low-res', got {short_repr(self.initial)}")

    @property
    def width(self) -> int:
        return min(MAX_AUTO_WIDTH if self.window == "auto" else self.window, self.num_tokens)

    def choose_widths(self, model: TokenModel, condition: Any, slots: int) -> WidthController | None:
        if self.window != "auto" or model.device.type != "cpu":
            return None
        return WidthController(measure_pass_costs(model, condition, slots, candidate_widths(self.width)))

    def bind(self, model: TokenModel, slots: int) -> Self:
        N, V, device = model.grid[0] * model.grid[1], model.vocab, torch.device(model.device)
        W, low_res = min(self.width, N), None
        if self.initial == "low-res":
            if (low_res := model.low_res) is None:
                raise ValueError("drafts from a low resolution need a model for it beside this one, and there is none")
            require_same_tokens("the low-resolution model", low_res, model)
        return self.copy(
            num_tokens=N,
            drafted=torch.zeros(slots, N + W, dtype=torch.int64, device=device),
            drafted_end=torch.zeros(slots, dtype=torch.int64, device=device),
            probs=torch.zeros(slots, W, V, dtype=torch.float32, device=device) if self.uses_probs else None,
            low_res=low_res,
            images=None,
            chains={},
        )

    def reset(self, state: TokenState, rows: Tensor, condition: Any, first: Output) -> None:
        self.drafted_end[rows] = 1
        if self.low_res is None:
            return
        options = state.sampling.options[int(rows[0])]  # images that start together have equal options
        assert options is not None
        new = self.low_res.start(condition, state.seeds[rows], options)
        if self.images is None:
            self.keep(images=new.new_zeros(len(state.seeds), *new.shape[1:]))
        assert self.images is not None
        self.images[rows] = new

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        if width == 1:
            return Draft.make_empty(len(state.seeds), state.vocab, state.seeds.device)
        chain = self.chain(width - 1, state.seeds.device)
        if self.probs is None and self.initial == "uniform" and type(self).draft_new is Jacobi.draft_new:
            known, grid = (self.drafted, self.drafted_end), (state.num_tokens, state.vocab)
            found = draft_window(*known, noise.keys(Purpose.DRAFT), width - 1, *grid)
            if found is not None:
                return Draft(found[0], chain, valid=found[1])
        noise = noise.shift(torch.arange(width - 1, device=state.seeds.device))
        position = noise.position
        is_new = position >= self.drafted_end[:, None]
        first = 0  # the first slot where an image may need a new draft token; there is always one, so that its shape is known
        if (rows := ops.host_values(is_new)) is not None:
            first = min(*(row.count(False) for row in rows), width - 2)
        tokens, probs = self.draft_new(state, replace(noise, position=position[:, first:]).where(is_new[:, first:]))
        drafted = self.drafted.gather(1, position)
        drafted[:, first:] = torch.where(is_new[:, first:], tokens, drafted[:, first:])
        valid = position < state.num_tokens
        if self.probs is None:
            return Draft(drafted, chain, valid=valid)
        q = self.probs[torch.arange(len(position), device=position.device)[:, None], position % self.width]
        q[:, first:] = torch.where(is_new[:, first:, None], probs, q[:, first:])
        return Draft(drafted, chain, q, valid)

    def draft_new(self, state: TokenState, noise: Noise) -> tuple[Tensor, Tensor]:
        """Draft tokens `[B, S]` at positions that no pass has predicted; a subclass may override it.

        Uniform draft tokens have q = 1 / V; recording a one-hot q would be exact too, but is accepted far less often.

        Returns:
            The tokens, which are ignored at other positions, and the probabilities that they are sampled from, float32 `[B, S,
            V]`, or `[1, 1, V]` if all are equal.
        """
        if self.low_res is None:
            even = torch.full((1, 1, state.vocab), 1.0 / state.vocab, dtype=torch.float32, device=noise.position.device)
            return noise.sample_evenly(state.vocab, Purpose.DRAFT), even
        assert self.images is not None
        position = noise.position.clamp(max=state.num_tokens - 1)
        probs = self.low_res.probs(self.images, self.known_tokens(state), self.drafted_end, position, state.sampling)
        return noise.sample(probs, Purpose.DRAFT), probs

    def known_tokens(self, state: TokenState) -> Tensor:
        """The committed and drafted tokens by position, int64 `[B, N]`, defined up to `drafted_end`."""
        N = state.num_tokens
        is_committed = torch.arange(N, device=state.length.device) < state.length[:, None]
        return torch.where(is_committed, state.tokens[:, :N], self.drafted[:, :N])

    def observe(self, state: TokenState, result: PassResult) -> None:
        position = result.noise.position
        T = position.shape[1]
        if T > 1:  # the root's prediction alone is committed
            coupling: Coupling = COUPLINGS[self.coupling] if isinstance(self.coupling, str) else self.coupling
            self.drafted.scatter_(1, position, coupling(result))
            if self.probs is not None:
                image = torch.arange(len(position), device=position.device)[:, None]
                self.probs[image, position % self.width] = result.probs
        self.drafted_end.copy_(state.length + T)

    def chain(self, length: int, device: torch.device) -> Tree:
        """A chain that this drafter owns, as a captured pass reads its tensors as long as the drafter lives."""
        if length not in self.chains:
            self.chains[length] = Tree.make_chain(length, device)
        return self.chains[length]


Coupling = Callable[[PassResult], Tensor]  # returns int64 [B, T], the token after each fed slot


def couple_independently(result: PassResult) -> Tensor:
    """Sample independently of the old draft (Teng et al. 2024, SJD)."""
    return result.noise.sample(result.probs, Purpose.RESAMPLE)


def couple_maximally(result: PassResult) -> Tensor:
    """Maximal coupling: keep the old draft token d with probability min(1, p(d) / q(d)), otherwise sample from norm((p - q)+).

    The old and the new token agree with probability 1 - TV(p, q), the maximum over all couplings (SCD, section 4; SJD-PAC calls
    this step adaptive continuation). Slots without a valid draft token are sampled from p.
    """
    p, q = gather_p_and_q(result.probs, result.draft)
    kept = result.noise.uniform(Purpose.RESAMPLE_ACCEPT)[:, :-1] * q < p
    return resample_rejected(result.probs, result.draft, result.noise, kept)


def couple_by_gumbel(result: PassResult) -> Tensor:
    """Gumbel coupling: argmax(log p + G) with the shared noise G of the position, which is the same in every pass.

    The old and the new token agree with probability at least (1 - TV) / (1 + TV) (SCD, section 4). If the rule is
    `shared_noise`, it has already sampled these tokens.
    """
    sampled = result.verdict.sampled
    return result.noise.sample(result.probs, Purpose.TOKEN) if sampled is None else sampled


def couple_from_verdict(result: PassResult) -> Tensor:
    """Use the tokens that the rule kept or resampled (`Verdict.sampled` of `PooledRule`); without them, couple maximally."""
    return couple_maximally(result) if result.verdict.sampled is None else result.verdict.sampled


COUPLINGS: dict[str, Coupling] = {
    "independent": couple_independently,
    "maximal": couple_maximally,
    "gumbel": couple_by_gumbel,
    "from-verdict": couple_from_verdict,
}
