"""Noise that enumerates: every outcome of the random numbers of a run, each with its probability, instead of one sample.

The rows of a batch are the outcomes. A run starts with one row. Where it asks for a random number whose outcome is not decided
yet, the run stops, every row is split into one row per possible outcome, and the run starts again with these outcomes decided,
until it reaches its end. Nothing is sampled, and no code of the run is replaced: it takes its random numbers from
`EnumeratedNoise` instead of `Noise`.

A random number is identified as in `Noise`, by position, purpose and pass. A uniform that is used twice is one variable: an
outcome restricts it to an interval, and the probability of the next outcome is conditional on that.

Shape suffixes: B rows, T positions, V vocabulary, C elements of one request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor

from vargen.decoding.noise import FOLD, Noise, Purpose

R = TypeVar("R")
SAME = 1e-5  # laws that differ by less are the same up to rounding


class NotEnumerableError(ValueError):
    """A drafter or a rule uses random numbers in a way that cannot be enumerated; the message says what it must do instead."""


class TooManyOutcomesError(Exception):
    """There are more outcomes than the limit allows."""


class ReusedNoiseError(NotEnumerableError):
    """The same random number is used twice, in a way that cannot be enumerated jointly."""


class _Undecided(Exception):
    """A run needs outcomes that are not decided yet: one of V per element, with probabilities `[B, C, V]`."""

    def __init__(self, probs: Tensor, needed: Tensor, limit: int):
        self.probs, self.needed, self.limit = probs, needed, limit


@dataclass
class _Variables:
    """Random numbers of one purpose and pass that were used so far.

    Attributes:
        key: int64 `[B, C]`, positions, with `fold_in`.
        low, high: float64 `[B, C]`, the interval that each uniform is known to lie in.
    """

    key: Tensor
    low: Tensor
    high: Tensor


class Enumeration:
    """The outcomes of a run.

    Attributes:
        weights: float64 `[B]`, the probability of each row; they sum to 1.
        num_tokens: number of positions; random numbers of later ones have no effect.
        max_drafts, limit: maximum number of rows while draft tokens are sampled, and at any time.
        settled: int64 `[B]`, positions before this are committed: resampling them has no effect.
        tests: collects or answers the tests of an acceptance rule while it runs; see `vargen.verify.enumerated_rule`.
        forced: int64 `[B]` while tokens are forced instead of enumerated; None otherwise.
        last_law: in the last pass, the distribution `[B, V]` of the token after the draft, which is not split.
    """

    def __init__(self, num_tokens: int, max_drafts: int, limit: int):
        self.num_tokens, self.max_drafts, self.limit = num_tokens, max_drafts, limit
        self.weights = torch.ones(1, dtype=torch.float64)
        self._decided: list[Tensor] = []
        self._rows_before: list[int] = []  # number of rows when each of them was decided
        self._reset()

    def _reset(self) -> None:
        self._next = 0
        self._uniforms: dict[tuple[Purpose, int], list[_Variables]] = {}
        self._choices: dict[tuple[Purpose, int], list[tuple[Tensor, Tensor, Tensor]]] = {}
        self.settled = torch.zeros(len(self), dtype=torch.int64)
        self.tests: Any = None
        self.forced: Tensor | None = None
        self.is_last_pass = False
        self.last_law: Tensor | None = None

    def __len__(self) -> int:
        return len(self.weights)

    def count_rows(self) -> int:
        """Return the number of outcomes of what was asked for so far in this run."""
        return self._rows_before[self._next] if self._next < len(self._rows_before) else len(self)

    def run(self, program: Callable[[], R]) -> R:
        """Run a program, with as many rows as this has at the time, until all outcomes are decided. Returns its last result.

        Raises:
            TooManyOutcomesError: if there are more than `limit`.
        """
        while True:
            self._reset()
            try:
                return program()
            except _Undecided as choice:
                self._split(choice.probs, choice.needed, choice.limit)

    def make_noise(self, seeds: Tensor, position: Tensor, step: int | Tensor = 0) -> EnumeratedNoise:
        """Return the noise of a pass, as `Noise` would."""
        return EnumeratedNoise(seeds, position, step, enumeration=self)

    def choose(self, probs: Tensor, needed: Tensor, limit: int | None = None) -> Tensor:
        """Return one of V outcomes for each element, int64 `[B, C]`, given their probabilities `[B, C, V]`.

        An element that is not needed, bool `[B, C]`, gets its most probable outcome.
        """
        probs = probs.double()
        needed = needed & (probs.sum(-1) > 0)
        split = needed & ((probs > 0).sum(-1) > 1)
        if self.forced is not None or not split.any():
            return probs.argmax(-1)
        if self._next == len(self._decided):
            raise _Undecided(probs, needed, limit or self.limit)
        self._next += 1
        return self._decided[self._next - 1]

    def _split(self, probs: Tensor, needed: Tensor, limit: int) -> None:
        rows, weights = torch.arange(len(self)), self.weights
        outcomes: list[Tensor] = []
        probs = probs / probs.sum(-1, keepdim=True)
        for c in range(probs.shape[1]):
            law, split = probs[rows, c], needed[rows, c]
            likeliest = torch.zeros_like(law, dtype=torch.bool).scatter_(1, law.argmax(1, keepdim=True), True)
            parent, outcome = torch.where(split[:, None], law > 0, likeliest).nonzero().unbind(1)
            if len(parent) > limit:
                raise TooManyOutcomesError(f"more than {limit} outcomes")
            weights = weights[parent] * torch.where(split[parent], law[parent, outcome], 1.0)
            rows, outcomes = rows[parent], [*(each[parent] for each in outcomes), outcome]
        self._rows_before.append(len(self))
        self.weights = weights
        self._decided = [each[rows] for each in self._decided] + [torch.stack(outcomes, 1)]

    def _limit(self, purpose: Purpose) -> int:
        return self.max_drafts if purpose in (Purpose.DRAFT, Purpose.CHOICE) else self.limit

    def is_needed(self, noise: EnumeratedNoise, purpose: Purpose) -> Tensor:
        """bool `[B, T]`: whether a sample at each position has an effect."""
        needed = noise.position % FOLD < self.num_tokens
        if purpose in (Purpose.RESAMPLE, Purpose.RESAMPLE_ACCEPT):
            needed = needed & (noise.position >= self.settled[:, None]) & (not self.is_last_pass)
        return needed if noise.needed is None else needed & noise.needed

    # -- uniforms -------------------------------------------------------------------------------------------------------

    def find_interval(self, purpose: Purpose, step: int, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the intervals, float64 `[B, C]` each, that the uniforms at `key` `[B, C]` are known to lie in."""
        low, high = torch.zeros(key.shape, dtype=torch.float64), torch.ones(key.shape, dtype=torch.float64)
        for known in self._uniforms.get((purpose, step), []):
            same = key[:, :, None] == known.key[:, None, :]
            low = torch.maximum(low, torch.where(same, known.low[:, None], 0.0).amax(2))
            high = torch.minimum(high, torch.where(same, known.high[:, None], 1.0).amin(2))
        return low, high

    def restrict(self, purpose: Purpose, step: int, key: Tensor, low: Tensor, high: Tensor) -> None:
        """Record that the uniforms at `key` `[B, C]` lie in these intervals."""
        self._uniforms.setdefault((purpose, step), []).append(_Variables(key, low, high))

    def sample_intervals(self, purpose: Purpose, step: int, key: Tensor, bounds: Tensor, needed: Tensor) -> Tensor:
        """Return which of V consecutive intervals each uniform falls into, int64 `[B, C]`.

        Args:
            bounds: float64 `[B, C, V + 1]`, ascending from 0 to 1.
        """
        columns: list[Tensor] = []
        groups = [slice(None)] if _all_differ(key) else [slice(c, c + 1) for c in range(key.shape[1])]
        for group in groups:
            low, high = self.find_interval(purpose, step, key[:, group])
            starts = torch.maximum(bounds[:, group, :-1], low[..., None])
            ends = torch.minimum(bounds[:, group, 1:], high[..., None])
            outcome = self.choose((ends - starts).clamp(min=0), needed[:, group], self._limit(purpose))[..., None]
            used = needed[:, group]
            new_low, new_high = starts.gather(2, outcome)[..., 0], ends.gather(2, outcome)[..., 0]
            self.restrict(purpose, step, key[:, group], torch.where(used, new_low, low), torch.where(used, new_high, high))
            columns.append(outcome[..., 0])
        return torch.cat(columns, 1)

    # -- random numbers that are no uniforms ------------------------------------------------------------------------------

    def choose_once(self, purpose: Purpose, step: int, key: Tensor, law: Tensor, needed: Tensor) -> Tensor:
        """Return the outcome int64 `[B, C]` of random numbers with laws `[B, C, V]`, the same whenever it is asked for again.

        Raises:
            ReusedNoiseError: if one is used again with another law.
        """
        law = law.double() / law.double().sum(-1, keepdim=True).clamp_min(1e-300)
        known, outcome, name = torch.zeros_like(needed), torch.zeros_like(key), (purpose, step)
        for old_key, old_law, old_outcome in self._choices.get(name, []):
            same = (key[:, :, None] == old_key[:, None, :]) & needed[:, :, None]
            found, place = same.any(2), same.long().argmax(2)
            old = old_law.gather(1, place[..., None].expand_as(law)) if old_law.shape[2] == law.shape[2] else law + 1
            if bool((found & ((old - law).abs().amax(2) > SAME)).any()):
                raise ReusedNoiseError(
                    f"noise for {purpose.name} is used twice, with different probabilities, which cannot be enumerated; a rule "
                    "with sequential_tokens=True is compared with sequential decoding instead"
                )
            known, outcome = known | found, torch.where(found, old_outcome.gather(1, place), outcome)
        chosen = torch.where(known, outcome, self.choose(law, needed & ~known, self._limit(purpose)))
        self._choices.setdefault(name, []).append((torch.where(needed, key, -1), law, chosen))
        return chosen


def _all_differ(key: Tensor) -> bool:
    ordered = key.sort(1).values
    return not bool((ordered[:, 1:] == ordered[:, :-1]).any())


@dataclass(frozen=True)
class EnumeratedNoise(Noise):
    """The random numbers of one pass, enumerated; see `Noise`.

    Attributes:
        fold: the number given to `fold_in`.
    """

    fold: int | Tensor = 0
    enumeration: Enumeration = field(kw_only=True)
    is_keyed: ClassVar[bool] = False

    @property
    def _step(self) -> int:
        return int(self.step)

    def exponential(self, vocab: int, purpose: Purpose) -> NoReturn:
        raise ReusedNoiseError(
            f"exponential noise for {purpose.name} cannot be enumerated: sample through Noise.sample or "
            "Noise.sample_without_replacement"
        )

    def uniform64(self, purpose: Purpose) -> NoReturn:
        raise NotEnumerableError(f"uniform64 for {purpose.name} cannot be enumerated: sample through Noise.sample")

    def uniform(self, purpose: Purpose) -> Any:
        """Return uniforms that can only be compared with a probability."""
        slots = torch.arange(self.position.shape[1]).expand_as(self.position)
        fold = self.fold if isinstance(self.fold, Tensor) else torch.tensor(self.fold)
        return Uniforms(self, purpose, self.position, slots, fold.expand_as(self.position))

    def sample(self, probs: Tensor, purpose: Purpose) -> Tensor:
        each, needed = self.enumeration, self.enumeration.is_needed(self, purpose)
        probs = probs.double().expand(*self.position.shape, -1)
        if each.tests is not None and each.tests.is_recording:
            return probs.argmax(-1)
        if purpose == Purpose.RESIDUAL and probs.shape[1] == 1 and each.tests is not None:
            if each.forced is not None:
                return each.forced[:, None]
            if each.is_last_pass:
                each.last_law = probs[:, 0] / probs[:, 0].sum(1, keepdim=True)
                return probs.argmax(-1)
        if purpose == Purpose.TOKEN:
            return each.choose_once(purpose, 0, self.position, probs, needed)
        cumulative = (probs / probs.sum(-1, keepdim=True).clamp_min(1e-300)).cumsum(-1)
        bounds = torch.nn.functional.pad(cumulative / cumulative[..., -1:].clamp_min(1e-300), (1, 0))
        return each.sample_intervals(purpose, self._step, self.position, bounds, needed)

    def sample_evenly(self, vocab: int, purpose: Purpose) -> Tensor:
        return self.sample(torch.ones(*self.position.shape, vocab), purpose)

    def sample_without_replacement(self, probs: Tensor, count: int, purpose: Purpose) -> tuple[Tensor, Tensor]:
        """Enumerate all orders, with the probabilities of Plackett (1975) and Luce (1959). Values only tell what exists."""
        orders = torch.tensor(list(itertools.permutations(range(probs.shape[-1]), count)))  # [P, count]
        p = probs.double() / probs.double().sum(-1, keepdim=True).clamp_min(1e-300)
        each = p[..., orders]  # [B, T, P, count]
        left = 1 - each.cumsum(-1) + each
        law = torch.where(each > 0, each / left.clamp_min(1e-300), 1.0).prod(-1)
        # Tokens of probability 0 come last, in ascending order, so that each outcome has one order.
        possible, place = (p > 0).sum(-1)[..., None, None], torch.arange(count)
        rank = ((p <= 0).cumsum(-1) - 1)[..., orders]
        law = law * torch.where(place < possible, each > 0, (each <= 0) & (rank == place - possible)).all(-1)
        needed = self.enumeration.is_needed(self, purpose)
        step = 0 if purpose == Purpose.TOKEN else self._step
        chosen = self.enumeration.choose_once(purpose, step, self.position, law, needed)
        tokens = orders[chosen]
        value = torch.arange(count, 0, -1) * (p.gather(-1, tokens) > 0).float()
        return tokens, value

    def fold_in(self, number: int | Tensor) -> EnumeratedNoise:
        return replace(self, position=self.position + number * FOLD, fold=number)


# -- uniforms whose comparisons with probabilities are enumerated ----------------------------------------------------------


_MESSAGE = (
    "uniforms were used through {!r}: to be enumerated, a uniform of Noise.uniform may only be compared with a probability, as "
    "in `uniforms < p` or `uniforms * q < p`"
)


class Uniforms:
    """Uniforms that are compared with probabilities, elementwise. Anything else raises NotEnumerableError.

    Attributes:
        key, slot, fold: int64 `[B, ...]`: the identity of each uniform, the fed slot it belongs to, and the number of
            `fold_in`.
        factor: what the uniforms are multiplied by.
    """

    def __init__(self, noise: EnumeratedNoise, purpose: Purpose, key: Tensor, slot: Tensor, fold: Tensor, factor: Any = 1.0):
        self.noise, self.purpose, self.key, self.slot, self.fold, self.factor = noise, purpose, key, slot, fold, factor

    def _map(self, change: Callable[[Tensor], Tensor]) -> Uniforms:
        factor = change(self.factor) if isinstance(self.factor, Tensor) else self.factor
        return Uniforms(self.noise, self.purpose, change(self.key), change(self.slot), change(self.fold), factor)

    def __getitem__(self, index: Any) -> Uniforms:
        return self._map(lambda each: each[index])

    def __mul__(self, other: Any) -> Uniforms:
        if isinstance(other, Tensor):
            other = other.double().expand_as(self.key)
        return Uniforms(self.noise, self.purpose, self.key, self.slot, self.fold, self.factor * other)

    __rmul__ = __mul__

    def __lt__(self, other: Any) -> Tensor:
        threshold = torch.as_tensor(other, dtype=torch.float64) / self.factor
        shape, needed = self.key.shape, self.noise.enumeration.is_needed(self.noise, self.purpose)
        threshold = threshold.nan_to_num(0.0).clamp(0, 1).expand(shape).reshape(shape[0], -1)
        each = self.noise.enumeration
        slot = self.slot.reshape(shape[0], -1)
        if self.purpose == Purpose.ACCEPT and each.tests is not None:
            key, fold = self.key.reshape(shape[0], -1), self.fold.reshape(shape[0], -1)
            each.tests.step = self.noise._step
            return each.tests.answer(key, slot, fold, threshold).view(shape)
        bounds = torch.stack([torch.zeros_like(threshold), threshold, torch.ones_like(threshold)], -1)
        key = self.key.reshape(shape[0], -1)
        used = needed.gather(1, slot)
        return (each.sample_intervals(self.purpose, self.noise._step, key, bounds, used) == 0).view(shape)

    __le__ = __lt__

    def __gt__(self, other: Any) -> Tensor:
        return ~(self < other)

    __ge__ = __gt__

    def __getattr__(self, name: str) -> NoReturn:
        raise NotEnumerableError(_MESSAGE.format(name))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("gt", "__gt__", "ge", "__ge__"):  # p > u
            return args[1] < args[0] if isinstance(args[1], Uniforms) else args[0] > args[1]
        if name in ("lt", "__lt__", "le", "__le__"):
            return args[1] > args[0] if isinstance(args[1], Uniforms) else args[0] < args[1]
        if name in ("mul", "__mul__", "__rmul__"):
            return args[0] * args[1] if isinstance(args[0], Uniforms) else args[1] * args[0]
        if name == "stack":
            parts, dim = args[0], args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
            first = parts[0]
            keys, slots, folds = (torch.stack([getattr(u, name) for u in parts], dim) for name in ("key", "slot", "fold"))
            return Uniforms(first.noise, first.purpose, keys, slots, folds)
        return cls.__getattr__(None, name)  # type: ignore[arg-type]


def _refuse(name: str) -> Any:
    def operator(self: Uniforms, *others: Any) -> NoReturn:
        raise NotEnumerableError(_MESSAGE.format(name))

    return operator


for _name in ("add", "radd", "sub", "rsub", "truediv", "rtruediv", "neg", "pow", "eq", "ne"):
    setattr(Uniforms, f"__{_name}__", _refuse(_name))
