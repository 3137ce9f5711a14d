"""Decoders of next-token and next-scale models for comparisons: fixed sampling, any method, and measured pass costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import (
    Accelerator,
    DecodeOutput,
    DecodeStats,
    Progress,
    Sampling,
    ScaleModel,
    ScaleSchedule,
    TokenModel,
    decode,
    decode_scales,
)
from vargen.decoding.pass_costs import measure_pass_costs, time_call, use_best_threads


@dataclass(frozen=True)
class TokenDecoder:
    """`Decoder` of a `TokenModel`."""

    model: TokenModel
    sampling: Sampling

    @property
    def device(self) -> torch.device:
        return self.model.device

    def decode(
        self,
        condition: Any,
        seeds: Tensor,
        method: str | Accelerator,
        callback: Callable[[Progress], bool | None] | None = None,
        profile: bool = False,
    ) -> DecodeOutput:
        return decode(self.model, condition, seeds, method, self.sampling, callback=callback, profile=profile)

    def threads(self, condition: Any, batch: int) -> AbstractContextManager[int]:
        return use_best_threads(self.model, condition, batch, 1)

    def measure_pass_costs(self, condition: Any, batch: int, widths: Sequence[int]) -> dict[int, float]:
        widths = sorted({1, *widths})
        return measure_pass_costs(self.model, condition, batch, widths, repeats=15, force=True)

    def spent(
        self, method: Accelerator, runs: Sequence[DecodeStats], curve: dict[int, float], condition: Any, batch: int
    ) -> tuple[float, int]:
        fed = sum((Counter(run.fed) for run in runs), Counter())
        drafting = {width: method.drafter.measure_cost(self.model, condition, batch, width - 1) for width in fed}
        return sum(passes * (curve[width] + drafting[width]) for width, passes in fed.items()), sum(fed.values())


Place = tuple[str, int, int, bool]  # of a pass: model, first and last fed scale, whether it is guided


@dataclass(frozen=True)
class ScaleDecoder:
    """`Decoder` of a `ScaleModel`."""

    model: ScaleModel
    sampling: Sampling
    _measured: dict[tuple[Place, int], float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def decode(
        self,
        condition: Any,
        seeds: Tensor,
        method: str | ScaleSchedule,
        callback: Callable[[Progress], bool | None] | None = None,
        profile: bool = False,
    ) -> DecodeOutput:
        return decode_scales(self.model, condition, seeds, method, self.sampling, callback=callback, profile=profile)

    def threads(self, condition: Any, batch: int) -> AbstractContextManager[int]:
        """Keep torch's default number of threads, because passes are wide."""
        return nullcontext(torch.get_num_threads())

    def measure_pass_costs(self, condition: Any, batch: int, widths: Sequence[int]) -> dict[int, float]:
        """Measure guided passes of the target, each at its scales of an image."""
        each = sorted({self.model.scale_tokens[0], *widths})
        places = {width: ("target", *scales_of(self.model.scale_tokens, width), True) for width in each}
        return {width: self._seconds(place, condition, batch, force=True) for width, place in places.items()}

    def spent(
        self, method: ScaleSchedule, runs: Sequence[DecodeStats], curve: dict[int, float], condition: Any, batch: int
    ) -> tuple[float, int]:
        stages, seconds, passes = method.bind(self.model), 0.0, 0
        for run in runs:
            for model, fed in (("target", run.fed), ("draft", run.draft_fed)):
                for width, count in fed.items():
                    first, last = scales_of(self.model.scale_tokens, width)
                    guided = stages[last].guidance != 0
                    known = curve.get(width) if model == "target" and guided else None
                    each = self._seconds((model, first, last, guided), condition, batch) if known is None else known
                    seconds, passes = seconds + count * each, passes + count
        return seconds, passes

    def _seconds(self, place: Place, condition: Any, batch: int, force: bool = False, repeats: int = 7) -> float:
        """Seconds of a pass: the minimum of several runs."""
        if force or (place, batch) not in self._measured:
            name, first, last, guided = place
            model = self.model if name == "target" else self.model.draft_model
            assert model is not None
            self._measured[place, batch] = min(_times(model, condition, batch, first, last, float(guided), repeats))
        return self._measured[place, batch]


def scales_of(scale_tokens: Sequence[int], width: int) -> tuple[int, int]:
    """Return the first and the last scale of a pass of `width` tokens; if ambiguous, the pass with the fewest scales.

    Raises:
        ValueError: if no consecutive scales have `width` tokens in total.
    """
    for count in range(1, len(scale_tokens) + 1):
        for first in range(len(scale_tokens) + 1 - count):
            if sum(scale_tokens[first : first + count]) == width:
                return first, first + count - 1
    raise ValueError(f"a pass feeds whole scales, of {', '.join(map(str, scale_tokens))} tokens; got {width}")


def _times(model: ScaleModel, condition: Any, batch: int, first: int, last: int, guidance: float, repeats: int) -> list[float]:
    """Return the seconds of repeated passes with the scales before `first` in the cache. A warm-up pass is not counted."""
    pass_ = scale_pass(model, condition, batch, first, last, guidance)
    return [time_call(pass_, model.device)[0] for _ in range(repeats + 1)][1:]


@torch.no_grad()
def scale_pass(model: ScaleModel, condition: Any, batch: int, first: int, last: int, guidance: float) -> Callable[[], Any]:
    """Return a repeatable function that runs one pass of arbitrary tokens over scales `first` to `last`."""
    canvas, inputs = model.canvas(batch), [None]
    for scale in range(last):
        zeros = torch.zeros(batch, model.scale_tokens[scale], dtype=torch.int64, device=model.device)
        canvas, following = model.add(canvas, zeros, scale)
        inputs.append(following)  # type: ignore[arg-type]
    state = model.start(condition)
    if first:
        model.forward(state, inputs[:first], 1, [1.0])

    @torch.no_grad()
    def run() -> Any:
        out = model.forward(state, inputs, last + 1 - first, [guidance] * (last + 1 - first))
        model.rollback(state, first)
        return out

    return run
