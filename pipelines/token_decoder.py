"""The decoder of next-token models: one guidance and sampling, any method, and what passes cost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import Accelerator, Decoded, Progress, Sampling, TokenModel, decode
from vargen.decoding.cost import pass_costs, suitable_threads


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
    ) -> Decoded:
        return decode(self.model, condition, seeds, method, self.sampling, callback=callback, profile=profile)

    def threads(self, condition: Any, batch: int) -> AbstractContextManager[int]:
        return suitable_threads(self.model, condition, batch, 1)

    def pass_costs(self, condition: Any, batch: int, widths: list[int]) -> dict[int, float]:
        return pass_costs(self.model, condition, batch, widths, repeats=15, anew=True)

    def drafting_cost(self, method: Accelerator, condition: Any, batch: int, width: int) -> float:
        return method.drafting_cost(self.model, condition, batch, width - 1)
