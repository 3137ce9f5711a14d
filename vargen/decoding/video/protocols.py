"""What decoding of video block by block sees of a model.

Shape suffixes: F latent frames of a block, C latent channels, Y/X latent rows and columns.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class BlockModel(Protocol):
    """A model that makes video block by block: a few denoising steps for each, which see clean earlier blocks through a cache.

    Latents cross between models, keys and values never do. Prompts and caches are the model's own business.

    Attributes:
        block_shape: `(F, C, Y, X)` of the latents of a block. levels: noise level of each step, falling, the first one 1.
        fresh_noise: whether a step's estimate is noised anew for the next one (distilled models); else velocity is followed.
        draft_model: a smaller model of the same latents; None where there is none. cost_key: as of a `TokenModel`.
    """

    @property
    def block_shape(self) -> tuple[int, int, int, int]: ...

    @property
    def levels(self) -> tuple[float, ...]: ...

    @property
    def fresh_noise(self) -> bool: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def draft_model(self) -> BlockModel | None: ...

    @property
    def cost_key(self) -> Hashable: ...

    def start(self, condition: Any, frames: int) -> Any:
        """The state of one video of at most so many latent frames, which holds none. Nothing is run but what is done once per
        prompt."""

    def switch(self, state: Any, condition: Any) -> None:
        """Go on with another prompt. What the state holds stays as it is."""

    def room(self, state: Any) -> int:
        """How many latent frames one pass may feed, at least a block: more would evict what some of them see."""

    def forward(self, state: Any, clean: Sequence[Tensor], noisy: Tensor | None = None, level: float = 0.0) -> Tensor | None:
        """One pass over the frames that follow those which the state holds.

        Args:
            clean: finished blocks `[1, F, C, Y, X]`, or a single one of any number of frames; the state holds them then.
            noisy: the block behind them, at the noise level `level`; it is not held, and fed anew in every step.

        Returns:
            What the clean latents of `noisy` are estimated to be, float32 `[1, F, C, Y, X]`; None without it.
        """
