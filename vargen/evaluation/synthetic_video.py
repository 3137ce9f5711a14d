"""A pair of video models with a known gap in quality and in cost: what routing can gain is known, so the loop can be measured.

The true video of a seed is smooth noise. The large model draws each block true but for a share of the error of the block
before. The small model inherits that error whole and adds its own, which is small for most blocks and large for some, in
streaks. A pass costs a number of matrix products. Quality is the mean absolute error with its sign turned; a scorer sees it
with noise.

Shape suffixes: F frames, C channels, Y/X rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import View
from vargen.decoding.flow import warped_levels
from vargen.decoding.noise import Purpose, gaussian, uniform

SHAPE = (3, 3, 8, 8)
_SIZE = 192  # of the matrices that stand for work


def _numbers(seed: int, block: int, what: int) -> Tensor:
    """Standard normal `[1, *SHAPE]`, a function of all three."""
    count = int(torch.Size(SHAPE).numel())
    return gaussian(torch.tensor([seed]), block, count, 1000 + what).reshape(1, *SHAPE)


def truth(seed: int, block: int) -> Tensor:
    """The true latents of a block, `[1, *SHAPE]` within about [-0.7, 0.7]: each block is near the one before."""
    parts = [_numbers(seed, max(0, block - back), 0) * 0.6**back for back in range(4)]
    return torch.tanh(0.3 * sum(parts, torch.zeros(1, *SHAPE)))


def hardness(seed: int, block: int) -> float:
    """How large the small model's own error is: 0.02 for most blocks, up to 0.5 for about a fourth of them, in streaks."""
    coins = uniform(torch.tensor([seed]), torch.tensor([[block // 2, block + 1000]]), Purpose.CHOICE)[0]
    return 0.02 + (0.1 + 0.4 * float(coins[1]) if float(coins[0]) > 0.75 else 0.03 * float(coins[1]))


@dataclass
class _State:
    seed: int
    held: list[Tensor] = field(default_factory=list)  # the last block alone
    number: int = 0


class SyntheticModel:
    """See `vargen.decoding.BlockModel`; its condition is the seed of the true video.

    Args:
        products: matrix products of a pass over a block. inherits: share of the error before that a block has, too.
        errs: whether it adds the error of `hardness`.
    """

    fresh_noise = True
    block_shape = SHAPE
    device = torch.device("cpu")

    def __init__(self, products: int, inherits: float, errs: bool, draft_model: SyntheticModel | None = None):
        self.products, self.inherits, self.errs, self.draft_model = products, inherits, errs, draft_model
        self.levels = warped_levels()
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

    def forward(
        self, state: _State, clean: Sequence[Tensor], noisy: Tensor | None = None, level: float = 0.0
    ) -> Tensor | None:
        for _ in range(self.products * (len(clean) + (noisy is not None))):
            self._matrix @ self._matrix
        if clean:
            state.held, state.number = [clean[-1]], state.number + len(clean)
        if noisy is None:
            return None
        found = truth(state.seed, state.number)
        if state.held:
            found = found + self.inherits * (state.held[0] - truth(state.seed, state.number - 1))
        if self.errs:
            found = found + hardness(state.seed, state.number) * _numbers(state.seed, state.number, 1)
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


def noisy_score(seed: int, noise: float = 0.03) -> Callable[[View], Tensor]:
    """A scorer `[F]` of one video: the quality of each frame, with noise of a deviation of its own."""

    def score(view: View) -> Tensor:
        errors = (view.latents - truth(seed, view.number)[0]).abs().mean((1, 2, 3))
        return -errors + noise * _numbers(seed, view.number, 2)[0, :, 0, 0, 0]

    return score


def synthetic_pair(ratio: int = 8, products: int = 48) -> SyntheticModel:
    """A target whose pass over a block costs `ratio` times the drafter's, with that drafter."""
    small = SyntheticModel(max(1, products // ratio), inherits=1.0, errs=True)
    return SyntheticModel(products, inherits=0.3, errs=False, draft_model=small)
