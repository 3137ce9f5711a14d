"""No drafts: each pass feeds the last token and commits the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.draft import Draft, Output, Step
from vargen.decoding.protocols import TokenModel
from vargen.decoding.sampling import Sampling


@dataclass(frozen=True)
class Sequential:
    """Proposes nothing."""

    max_fed: int = 1
    topology: str = "chain"

    def bind(self, model: TokenModel) -> Sequential:
        return self

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> Draft:
        return Draft.empty(len(seeds), model.vocab, torch.device(model.device))

    def propose(self, state: Draft, tokens: Tensor, length: Tensor, step: int | Tensor) -> Draft:
        return state

    def observe(self, state: Draft, step: Step) -> None:
        pass
