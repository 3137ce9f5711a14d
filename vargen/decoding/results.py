"""What a loop returns and reports: the output, the progress that callbacks see, and the error for logits that are not finite.

Shape suffixes: B images, N units (tokens) of an image.
"""

from __future__ import annotations

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


@dataclass
class Progress:
    """State passed to a callback after each pass.

    Attributes:
        step: number of target passes so far; the prefill is the first.
        length: int64 `[B]`, tokens generated per image.
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

    @property
    def are_tokens_read(self) -> bool:
        """Whether the callback read the tokens, and so may have changed them."""
        return "tokens" in vars(self)


@dataclass
class DecodeOutput:
    """Result of `decode`: tokens int64 `[B, N]`, length int64 `[B]` (N unless a callback stopped the run), and statistics.

    `decode_scales` also returns the canvas, the accumulated image of all scales.
    """

    tokens: Tensor
    length: Tensor
    stats: DecodeStats
    finished: bool = field(default=True)
    canvas: Tensor | None = None


def describe_non_finite_logits(position: int, total: int, step: int) -> str:
    """Return the error message for logits that are not finite at a token in a pass."""
    return (
        f"the model returned NaN or infinite logits at token {position} of {total}, pass {step}; no image is returned. Check "
        "the checkpoint, or run with torch_dtype=torch.float32"
    )


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
