"""A pair of video models with a known gap in quality and in cost: what routing can gain is known, so the loop can be measured.

The true video of a seed is smooth noise. The large model draws each block true but for a share of the error of the block
before. The small model inherits that error, whole or in part, and adds its own, which is small for most blocks and large for
some, in streaks. A pass costs a number of matrix products. Quality is the mean absolute error with its sign turned; a scorer
sees it with noise.

Shape suffixes: F frames, C channels, Y/X rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import View
from vargen.decoding.noise import Purpose, gaussian, uniform
from vargen.decoding.video.denoising import shifted_levels

SHAPE = (3, 3, 8, 8)
_SIZE = 192  # of the matrices that stand for work


@lru_cache(maxsize=4096)
def _numbers(seed: int, block: int, what: int) -> Tensor:
    """Standard normal `[1, *SHAPE]`, a function of all three; never changed in place."""
    count = int(torch.Size(SHAPE).numel())
    return gaussian(torch.tensor([seed]), block, count, 1000 + what).reshape(1, *SHAPE)


@lru_cache(maxsize=1024)
def truth(seed: int, block: int) -> Tensor:
    """The true latents of a block, `[1, *SHAPE]` within about [-0.7, 0.7]: each block is near the one before."""
    parts = [_numbers(seed, max(0, block - back), 0) * 0.6**back for back in range(4)]
    return torch.tanh(0.3 * sum(parts, torch.zeros(1, *SHAPE)))


Errors = tuple[tuple[float, float, float], ...]  # up to which share of the blocks, the least error and the greatest
OWN_ERRORS: Errors = ((0.75, 0.02, 0.05), (1.0, 0.12, 0.52))


def hardness(seed: int, block: int, errors: Errors = OWN_ERRORS) -> float:
    """How large the small model's own error is: by `errors`, of two neighbouring blocks alike."""
    places = torch.tensor([[block // 2, block + 1000]])
    kind, size = uniform(torch.tensor([seed]), places, Purpose.CHOICE)[0].tolist()
    low, high = next((low, high) for share, low, high in errors if kind <= share)
    return low + (high - low) * size


@dataclass
class _State:
    seed: int
    held: list[Tensor] = field(default_factory=list)  # the last block alone
    number: int = 0


class SyntheticModel:
    """See `vargen.decoding.BlockModel`; its condition is the seed of the true video.

    Args:
        products: matrix products of a pass over a block. inherits: share of the error before that a block has, too.
        errors: of its own, see `hardness`; None for a model that makes none.
    """

    fresh_noise = True
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

    def room(self, state: _State) -> int:
        return 64 * SHAPE[0]

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
    """Latents are pixels; work stands for what a decoder costs."""

    def __init__(self, products: int):
        self.products = products
        self._matrix = torch.randn(_SIZE, _SIZE, generator=torch.Generator().manual_seed(0)) / _SIZE**0.5

    def decode_block(self, latents: Tensor, state: Any = None) -> tuple[Tensor, int]:
        for _ in range(self.products):
            self._matrix @ self._matrix
        return latents, (state or 0) + 1


def quality(seed: int, block: int, latents_FCYX: Tensor) -> float:
    """Mean absolute error of a block, with its sign turned: 0 is true."""
    return -float((latents_FCYX - truth(seed, block)[0]).abs().mean())


def noisy_score(seed: int, noise: float = 0.03, products: int = 0) -> Callable[[View], Tensor]:
    """A scorer `[F]` of one video: the quality of each frame, with noise of that deviation, for some matrix products."""
    matrix = torch.randn(_SIZE, _SIZE, generator=torch.Generator().manual_seed(0)) / _SIZE**0.5

    def score(view: View) -> Tensor:
        for _ in range(products):
            matrix @ matrix
        errors = (view.latents - truth(seed, view.number)[0]).abs().mean((1, 2, 3))
        return -errors + noise * _numbers(seed, view.number, 2)[0, :, 0, 0, 0]

    return score


@dataclass(frozen=True)
class Work:
    """What a pair costs, in matrix products, and how far its errors carry.

    Attributes:
        target, drafter: of a pass over a block. decode, preview: of a block. score: of a block's frames.
        inherits: share of the error before a block that the drafter's block has, too. errors: that it adds, see `hardness`.
    """

    target: int = 48
    drafter: int = 6
    decode: int = 36
    preview: int = 2
    score: int = 0
    inherits: float = 1.0
    errors: Errors = OWN_ERRORS


# Costs as fitted to the published times: a target's pass 1.83 s, the drafter's five 1.24 s, decoding 1.62 s, scoring 0.5 s; a
# preview would take 0.1 s. Errors are such that the best 73 % of the drafts hold a tenth of the gap in quality, and the best
# 90 % a quarter, as what is kept at those acceptances says; half of an error carries on.
PUBLISHED = Work(170, 23, 150, 9, 46, 0.5, ((0.73, 0.007, 0.02), (0.9, 0.05, 0.1), (1.0, 0.4, 1.06)))
PUBLISHED_DRAFTER = 0.817  # of the target's score that the published drafter alone has


def synthetic_pair(work: Work = Work()) -> SyntheticModel:
    """A target with its drafter."""
    small = SyntheticModel(work.drafter, work.inherits, work.errors)
    return SyntheticModel(work.target, 0.3, None, small)
