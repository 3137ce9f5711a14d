"""Decoders that compare methods of a model: fixed guidance and sampling, any method, and measured seconds of passes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from vargen.decoding import DecodeOutput, DecodeStats, Progress, Sampling, ScaleModel, ScaleSchedule, decode, decode_scales
from vargen.decoding.pass_costs import measure_pass_costs, time_call, use_best_threads
from vargen.models.condition import Condition
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.validation import validate_sampling


@dataclass(frozen=True)
class PricedDecoder(ABC):
    """Generates tokens with a decoding model and fixed sampling, and measures the seconds of its passes."""

    model: Any
    sampling: Sampling
    _loop: ClassVar[Callable[..., DecodeOutput]]

    @property
    def device(self) -> torch.device:
        return self.model.device

    def decode(
        self,
        condition: Condition,
        seeds: Tensor,
        method: Any,
        callback: Callable[[Progress], bool | None] | None = None,
        profile: bool = False,
    ) -> DecodeOutput:
        """Generate B images with a preset (by name) or a method; see `vargen.decoding.decode`."""
        return self._loop(self.model, condition, seeds, method, self.sampling, callback=callback, profile=profile)

    @abstractmethod
    def limit_threads(self, condition: Condition, batch: int) -> AbstractContextManager[int]:
        """Use the autotuned number of CPU threads for passes of the baseline while the block runs."""

    @abstractmethod
    def measure_pass_seconds(self, condition: Condition, batch: int, widths: Sequence[int]) -> dict[int, float]:
        """Measure the seconds of a target pass by number of fed tokens, for `widths` and the narrowest pass, uncached."""

    @abstractmethod
    def estimate_seconds(
        self, method: Any, runs: Sequence[DecodeStats], curve: dict[int, float], condition: Condition, batch: int
    ) -> tuple[float, int]:
        """Return the seconds of all passes of some runs according to the cost curve, and the number of passes, both without
        those of a drafter that only proposes."""


def open_decoder(pipe: VisualPipeline, settings: Mapping[str, Any] | None = None, compile: bool = False) -> PricedDecoder:
    """Return the decoder of an image pipeline.

    Args:
        settings: `guidance_scale`, `temperature`, `top_k` and `top_p` where they differ from the checkpoint's.
        compile: run the passes through `torch.compile`.
    """
    scale, sampling = validate_sampling({**pipe.default_sampling, **(settings or {})})
    kinds = {"next-token": TokenPricedDecoder, "next-scale": ScalePricedDecoder}
    return kinds[pipe.paradigm](pipe.decoding_model(scale, compile=compile), sampling)


@dataclass(frozen=True)
class TokenPricedDecoder(PricedDecoder):
    """Decoder of a `TokenModel`."""

    _loop = staticmethod(decode)

    def limit_threads(self, condition: Condition, batch: int) -> AbstractContextManager[int]:
        return use_best_threads(self.model, condition, batch, 1)

    def measure_pass_seconds(self, condition: Condition, batch: int, widths: Sequence[int]) -> dict[int, float]:
        return measure_pass_costs(self.model, condition, batch, sorted({1, *widths}), repeats=15, force=True)

    def estimate_seconds(
        self, method: Any, runs: Sequence[DecodeStats], curve: dict[int, float], condition: Condition, batch: int
    ) -> tuple[float, int]:
        fed = sum((Counter(run.passes_by_width) for run in runs), Counter())
        return sum(passes * curve[width] for width, passes in fed.items()), sum(fed.values())


PassShape = tuple[str, int, int, bool]  # of a pass: model, first and last fed scale, whether it is guided


@dataclass(frozen=True)
class ScalePricedDecoder(PricedDecoder):
    """Decoder of a `ScaleModel`."""

    _measured: dict[tuple[PassShape, int], float] = field(default_factory=dict, repr=False, compare=False)

    _loop = staticmethod(decode_scales)

    def limit_threads(self, condition: Condition, batch: int) -> AbstractContextManager[int]:
        """Keep torch's default number of threads, because passes are wide."""
        return nullcontext(torch.get_num_threads())

    def measure_pass_seconds(self, condition: Condition, batch: int, widths: Sequence[int]) -> dict[int, float]:
        """Measure guided passes of the target, each at its scales of an image."""
        each = sorted({self.model.scale_tokens[0], *widths})
        shapes = {width: ("target", *find_pass_scales(self.model.scale_tokens, width), True) for width in each}
        return {width: self._seconds(shape, condition, batch, cached=False) for width, shape in shapes.items()}

    def estimate_seconds(
        self, method: ScaleSchedule, runs: Sequence[DecodeStats], curve: dict[int, float], condition: Condition, batch: int
    ) -> tuple[float, int]:
        stages, seconds, passes = method.bind(self.model), 0.0, 0
        for run in runs:
            for model, fed in (("target", run.passes_by_width), ("draft", run.draft_passes_by_width)):
                for width, count in fed.items():
                    first, last = find_pass_scales(self.model.scale_tokens, width)
                    guided = stages[last].guidance != 0
                    known = curve.get(width) if model == "target" and guided else None
                    each = self._seconds((model, first, last, guided), condition, batch) if known is None else known
                    seconds, passes = seconds + count * each, passes + count
        return seconds, passes

    def _seconds(self, shape: PassShape, condition: Condition, batch: int, cached: bool = True) -> float:
        """Seconds of a pass: the minimum of seven runs after a warm-up pass, with the earlier scales in the cache."""
        if not cached or (shape, batch) not in self._measured:
            name, first, last, guided = shape
            model = self.model if name == "target" else self.model.draft_model
            run = scale_pass(model, condition, batch, first, last, float(guided))
            self._measured[shape, batch] = min([time_call(run, model.device)[0] for _ in range(8)][1:])
        return self._measured[shape, batch]


def find_pass_scales(scale_tokens: Sequence[int], width: int) -> tuple[int, int]:
    """Return the first and the last scale of a pass of `width` tokens; if ambiguous, the pass with the fewest scales.

    Raises:
        ValueError: if no consecutive scales have `width` tokens in total.
    """
    for count in range(1, len(scale_tokens) + 1):
        for first in range(len(scale_tokens) + 1 - count):
            if sum(scale_tokens[first : first + count]) == width:
                return first, first + count - 1
    raise ValueError(f"a pass feeds whole scales, of {', '.join(map(str, scale_tokens))} tokens; got {width}")


@torch.no_grad()
def scale_pass(
    model: ScaleModel, condition: Condition, batch: int, first: int, last: int, guidance: float
) -> Callable[[], Any]:
    """Return a repeatable function that runs one pass of arbitrary tokens over scales `first` to `last`."""
    canvas, inputs = model.canvas(batch), [None]
    for scale in range(last):
        zeros = torch.zeros(batch, model.scale_tokens[scale], dtype=torch.int64, device=model.device)
        canvas, following = model.add(canvas, zeros, scale)
        inputs.append(following)  # type: ignore[arg-type]
    state = model.start(condition)
    if first:
        model.forward(state, inputs[:first], 1.0)

    @torch.no_grad()
    def run() -> Any:
        out = model.forward(state, inputs, guidance)
        model.rollback(state, first)
        return out

    return run
