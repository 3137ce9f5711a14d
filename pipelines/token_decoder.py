"""The decoder of next-token models: one guidance and sampling, any method, and what passes cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import Accelerator, DecodeOutput, DecodeStats, Progress, Sampling, TokenModel, decode
from vargen.decoding.pass_costs import measure_pass_costs, use_best_threads


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
        return measure_pass_costs(self.model, condition, batch, widths, repeats=15, anew=True)

    def spent(
        self, method: Accelerator, runs: Sequence[DecodeStats], curve: dict[int, float], condition: Any, batch: int
    ) -> tuple[float, int]:
        fed = sum((Counter(run.fed) for run in runs), Counter())
        drafting = {width: method.drafting_cost(self.model, condition, batch, width - 1) for width in fed}
        return sum(passes * (curve[width] + drafting[width]) for width, passes in fed.items()), sum(fed.values())
