"""What is asked of a loop, what comes back, and what the host and callbacks learn of passes in between.

Shape suffixes: B images, N tokens of the grid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.sampling import Sampling
from vargen.decoding.stats import DecodeStats
from vargen.values import short_repr


class NonFiniteLogitsError(RuntimeError):
    """The model returned NaN or infinite logits; no image is returned."""

    @classmethod
    def at(cls, position: int, total: int, step: int) -> NonFiniteLogitsError:
        """Return the error for a token of an image in one of its passes."""
        return cls(
            f"the model returned NaN or infinite logits at token {position} of {total}, pass {step}; no image is returned. "
            "Check the checkpoint, or run with torch_dtype=torch.float32"
        )


@dataclass
class Progress:
    """State passed to a callback after each pass.

    Attributes:
        step: number of target passes so far; the prefill is the first.
        length: int64 `[B]`, tokens generated per image, as far as the host knows: on a GPU without the last pass.
        total: N.
        num_committed: int64 `[B]`, tokens that this pass committed.
        read_tokens: returns `tokens`, which are copied only if they are read.
    """

    step: int
    length: Tensor
    total: int
    num_committed: Tensor
    read_tokens: Callable[[], Tensor] = field(repr=False)

    @cached_property
    def tokens(self) -> Tensor:
        """int64 `[B, N]`; entries from `length` on are not generated yet. The callback may change the others."""
        return self.read_tokens()


@dataclass
class DecodeOutput:
    """Result of `decode`: tokens int64 `[B, N]`, length int64 `[B]` (N unless a callback stopped the run), and statistics.

    `decode_scales` also returns the canvas, the accumulated image of all scales.
    """

    tokens: Tensor
    length: Tensor
    stats: DecodeStats
    canvas: Tensor | None = None

    @property
    def finished(self) -> bool:
        """Whether no callback stopped the run."""
        return not self.stats.stopped


Callback = Callable[[Progress], bool | None]


def validate_call(seeds: Any, sampling: Any, callback: Any) -> None:
    """Validate the arguments that all loops share."""
    if not isinstance(seeds, Tensor) or seeds.dtype != torch.int64 or seeds.dim() != 1:
        given = f"{seeds.dtype} {list(seeds.shape)}" if isinstance(seeds, Tensor) else short_repr(seeds)
        raise TypeError(f"seeds must be an int64 tensor [B], one per image, got {given}")
    if not len(seeds):
        raise ValueError("seeds must hold one number per image, got none")
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a Sampling, or None for the plain softmax, got {short_repr(sampling)}")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be a function of a Progress, or None, got {short_repr(callback)}")


# -- images of an engine ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FinishedImage:
    """A finished image.

    Attributes:
        number: of the request.
        seed: of the image.
        tokens: int64 `[N]`; invalid if there is an error.
        stats: of this image alone, without seconds; its passes are those that the image took part in, the prefill included.
        error: why the image failed: a `NonFiniteLogitsError`, or a ValueError for a condition that is longer than the engine
            has room for. None if it did not fail.
    """

    number: int
    seed: int
    tokens: Tensor
    stats: DecodeStats
    error: Exception | None = None


@dataclass(eq=False)
class Request:
    """A requested image: its number, the row of its condition, its seed and its sampling options.

    Attributes:
        length, relaxation: tokens, and acceptance probability spent beyond the exact rule, as far as the host has read.
        is_done: whether the host knows that the image finished or failed.
        counts: tokens committed by each of its passes that the host has read, prefill included.
        widths: number of its passes by the number of tokens that they fed to it, prefill excluded.
    """

    number: int
    condition: Any
    row: int
    seed: int
    sampling: Sampling
    length: int = 0
    relaxation: float = 0.0
    is_done: bool = False
    counts: list[int] = field(default_factory=list)
    widths: Counter[int] = field(default_factory=Counter)

    def is_like(self, other: Request) -> bool:
        """Whether both have the same condition object and equal options."""
        return self.condition is other.condition and self.sampling == other.sampling

    def record(self, length: int, width: int, relaxation: float) -> None:
        """Record a pass after which the image has `length` tokens and spent `relaxation`; `width` is 0 for the prefill."""
        self.counts.append(length - self.length)
        self.length, self.relaxation = length, relaxation
        if width:
            self.widths[width] += 1


def select_rows(condition: Any, rows: list[int]) -> Any:
    """Return a copy of some rows of a condition: a tensor `[M, ...]`, or an object of length M with `select_rows(indices)`."""
    index = torch.tensor(rows)
    return condition[index.to(condition.device)] if isinstance(condition, Tensor) else condition.select_rows(index)
