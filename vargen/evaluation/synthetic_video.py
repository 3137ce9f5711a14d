"""Synthetic video models with a known gap in quality and cost: the gain of routing is known, so the loop can be measured.

The true video of a seed is smooth noise. The target model generates each block with a fraction of the error of the previous
block. The draft model inherits that error, fully or in part, and adds its own, which is small for most blocks and large for
some, in runs of blocks. A pass costs a number of matrix products. MethodMetrics is the negative mean absolute error; a scorer
observes it with noise.

Shape suffixes: F frames, C channels, Y/X rows and columns.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import BlockView
from vargen.decoding.noise import Purpose, sample_normal, sample_uniform
from vargen.decoding.video.denoising import shifted_levels
from vargen.decoding.video.routing import DraftRouter, DraftView

SHAPE = (3, 3, 8, 8)
_SIZE = 192  # of the matrices whose products simulate work


@lru_cache(maxsize=4096)
def _numbers(seed: int, block: int, what: int) -> Tensor:
    """Return standard normal numbers `[1, *SHAPE]` determined by the arguments; callers must not modify them in place."""
    count = int(torch.Size(SHAPE).numel())
    return sample_normal(torch.tensor([seed]), block, count, 1000 + what).reshape(1, *SHAPE)


@lru_cache(maxsize=1024)
def truth(seed: int, block: int) -> Tensor:
    """Return the true latents of a block, `[1, *SHAPE]` within about [-0.7, 0.7]; consecutive blocks are similar."""
    parts = [_numbers(seed, max(0, block - back), 0) * 0.6**back for back in range(4)]
    return torch.tanh(0.3 * sum(parts, torch.zeros(1, *SHAPE)))


Errors = tuple[tuple[float, float, float], ...]  # cumulative fraction of the blocks, least error and greatest error
OWN_ERRORS: Errors = ((0.75, 0.02, 0.05), (1.0, 0.12, 0.52))


def hardness(seed: int, block: int, errors: Errors = OWN_ERRORS) -> float:
    """Return the size of the draft model's own error, by `errors`; each pair of consecutive blocks has one error range."""
    kind, size = _place(seed, block)
    low, high = next((low, high) for share, low, high in errors if kind <= share)
    return low + (high - low) * size


def _place(seed: int, block: int) -> tuple[float, float]:
    """Uniform numbers that determine the error of a block: of its range, and within it."""
    places = torch.tensor([[block // 2, block + 1000]])
    kind, size = sample_uniform(torch.tensor([seed]), places, Purpose.CHOICE)[0].tolist()
    return kind, size


@dataclass
class _State:
    seed: int
    held: list[Tensor] = field(default_factory=list)  # the last block only
    number: int = 0


class SyntheticModel:
    """A synthetic `vargen.decoding.BlockModel`; its condition is the seed of the true video.

    Args:
        products: matrix products per pass over a block. inherits: fraction of the previous block's error that a block inherits.
        errors: distribution of its own errors, see `hardness`; None for a model without any.
    """

    resamples_noise = True
    shares_cache = False
    block_shape = SHAPE
    device = torch.device("cpu")

    def __init__(self, products: int, inherits: float, errors: Errors | None, draft_model: SyntheticModel | None = None):
        self.products, self.inherits, self.errors, self.draft_model = products, inherits, errors, draft_model
        self.levels = shifted_levels()
        self._matrix = torch.randn(_SIZE, _SIZE, generator=torch.Generator().manual_seed(0)) / _SIZE**0.5

    @property
    def cost_key(self) -> None:
        return None

    def start(self, condition: int, frames: int) -> _State:
        return _State(condition)

    def switch(self, state: _State, condition: int) -> None:
        state.seed = condition

    def free_frames(self, state: _State) -> int:
        return 64 * SHAPE[0]

    def fork(self, state: _State, first: int, frames: int) -> tuple[_State, Callable[[], None]]:
        return replace(state), lambda: None  # passes replace `held`, and change nothing in it

    def forward(self, state: _State, clean: Sequence[Tensor], noisy: Tensor | None = None, level: float = 0.0) -> Tensor | None:
        for _ in range(self.products * (len(clean) + (noisy is not None))):
            self._matrix @ self._matrix
        if clean:
            state.held, state.number = [clean[-1]], state.number + len(clean)
        if noisy is None:
            return None
        found = truth(state.seed, state.number)
        if state.held:
            found = found + self.inherits * (state.held[0] - truth(state.seed, state.number - 1))
        if self.errors:
            found = found + hardness(state.seed, state.number, self.errors) * _numbers(state.seed, state.number, 1)
        return found


class SyntheticDecoder:
    """Decoder whose pixels are the latents; matrix products simulate the cost of a real decoder."""

    def __init__(self, products: int):
        self.products = products
        self._matrix = torch.randn(_SIZE, _SIZE, generator=torch.Generator().manual_seed(0)) / _SIZE**0.5

    def decode_block(self, latents: Tensor, state: Any = None) -> tuple[Tensor, int]:
        for _ in range(self.products):
            self._matrix @ self._matrix
        return latents, (state or 0) + 1


def quality(seed: int, block: int, latents_FCYX: Tensor) -> float:
    """Return the negative mean absolute error of a block: 0 is the true video."""
    return -float((latents_FCYX - truth(seed, block)[0]).abs().mean())


def noisy_score(seed: int, noise: float = 0.03, products: int = 0) -> Callable[[BlockView], Tensor]:
    """Return a scorer `[F]` of one video: quality of each frame plus noise of deviation `noise`; costs matrix `products`."""
    matrix = torch.randn(_SIZE, _SIZE, generator=torch.Generator().manual_seed(0)) / _SIZE**0.5

    def score(view: BlockView) -> Tensor:
        for _ in range(products):
            matrix @ matrix
        errors = (view.latents - truth(seed, view.number)[0]).abs().mean((1, 2, 3))
        return -errors + noise * _numbers(seed, view.number, 2)[0, :, 0, 0, 0]

    return score


def noisy_router(seed: int, correlation: float, errors: Errors = OWN_ERRORS) -> DraftRouter:
    """Return a router of one video whose ranks have this correlation with those of the drafter's own errors, both as normal
    numbers; it costs nothing."""
    normal = statistics.NormalDist()

    def rank(view: DraftView) -> float:
        (kind, size), lower = _place(seed, view.number), 0.0
        for upper, _, _ in errors:
            if kind <= upper:
                break
            lower = upper
        true = normal.inv_cdf(min(max(lower + (upper - lower) * size, 1e-6), 1 - 1e-6))
        noise = float(_numbers(seed, view.number, 3).flatten()[0])
        return normal.cdf(correlation * true + math.sqrt(1 - correlation**2) * noise)

    return rank


@dataclass(frozen=True)
class Work:
    """Costs of a model pair in matrix products, and how their errors propagate.

    Attributes:
        target, drafter: per pass over a block. decode, preview: per block. score: for the frames of a block.
        inherits: fraction of the previous block's error that a drafted block inherits. errors: added errors, see `hardness`.
    """

    target: int = 48
    drafter: int = 6
    decode: int = 36
    preview: int = 2
    score: int = 0
    inherits: float = 1.0
    errors: Errors = OWN_ERRORS


# Costs fitted to the published times: a target pass 1.83 s, the drafter's five passes 1.24 s, decoding 1.62 s, scoring 0.5 s;
# a preview would take 0.1 s. Errors are such that the best 73 % of the drafts account for a tenth of the gap in quality, and
# the best 90 % for a quarter, matching the published quality at those acceptance rates; half of an error is inherited.
PUBLISHED = Work(170, 23, 150, 9, 46, 0.5, ((0.73, 0.007, 0.02), (0.9, 0.05, 0.1), (1.0, 0.4, 1.06)))
PUBLISHED_DRAFTER = 0.817  # the published drafter's score, as a fraction of the target's


def synthetic_pair(work: Work = Work()) -> SyntheticModel:
    """Create a target model with its drafter."""
    small = SyntheticModel(work.drafter, work.inherits, work.errors)
    return SyntheticModel(work.target, 0.3, None, small)
