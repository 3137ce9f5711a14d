"""Layer skipping: the target drafts for itself, without some of its layers (Zhang et al. 2023, Draft & Verify)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch

from vargen.decoding.interfaces import TokenModel
from vargen.decoding.speculative import Speculative
from vargen.values import short_repr


@dataclass(frozen=True)
class LayerSkip(Speculative):
    """Draft a chain with the target itself, skipping some of its layers.

    The reduced network is a draft model that needs no training and no memory for weights; it has its own cache.

    Args:
        length, shared_noise: see `Speculative`.
        skip: fraction of layers to skip, between 0 and 1 exclusive, spread evenly while keeping the first two and the last,
            which matter most. Alternatively explicit layer indices from 0, `(3, 5, 6)` or `"3+5+6"`.

    Raises:
        ValueError: if the fraction or the layers are invalid. `bind` raises it if the model cannot skip them.
    """

    model: TokenModel | None = field(default=None, init=False, repr=False)
    skip: float | str | tuple[int, ...] = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        skip = tuple(map(int, self.skip.split("+"))) if isinstance(self.skip, str) else self.skip
        is_valid = 0 < len(set(skip)) == len(skip) if isinstance(skip, tuple) else 0 < skip < 1
        if not is_valid:
            given = short_repr(self.skip)
            raise ValueError(f"skip must be a fraction of the layers, or layers, each once, as in '3+5+6', got {given}")
        object.__setattr__(self, "skip", skip)

    def select_layers(self, count: int) -> tuple[int, ...]:
        """Return the indices of the skipped layers out of `count`."""
        if isinstance(self.skip, tuple):
            return self.skip
        assert not isinstance(self.skip, str)
        first, last = min(2, count - 2), count - 2
        num_skipped = max(1, min(round(self.skip * count), last - first + 1))
        return tuple(torch.linspace(last, first, num_skipped, dtype=torch.float32).round().int().sort().values.tolist())

    def bind(self, model: TokenModel, slots: int) -> Self:
        if model.num_layers < 3:
            raise ValueError(f"skip needs a model with at least three layers that can be skipped, got {model.num_layers}")
        reduced = self.copy(model=model.skip_layers(self.select_layers(model.num_layers)))
        return super(LayerSkip, reduced).bind(model, slots)
