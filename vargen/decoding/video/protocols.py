"""Interface of the models that block-wise video decoding runs.

Shape suffixes: F latent frames of a block, C latent channels, Y/X latent rows and columns.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class BlockModel(Protocol):
    """A block-wise video model.

    Each block takes a few denoising steps, which attend to clean earlier blocks through a KV cache. Models exchange latents,
    never keys and values. Prompts and caches are internal to the model.

    Attributes:
        block_shape: `(F, C, Y, X)` of the latents of a block.
        levels: noise level of each step, decreasing from 1.
        resamples_noise: whether noise is added to the estimate of a step for the next one (distilled models); otherwise the
            sampler follows the velocity.
        draft_model: a smaller model with the same latents; None if there is none.
        shares_cache: whether `draft_model` is the same network with other steps, and one cache serves both.
        cost_key: as in `TokenModel`.
    """

    @property
    def block_shape(self) -> tuple[int, int, int, int]: ...

    @property
    def levels(self) -> tuple[float, ...]: ...

    @property
    def resamples_noise(self) -> bool: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def draft_model(self) -> BlockModel | None: ...

    @property
    def shares_cache(self) -> bool: ...

    @property
    def cost_key(self) -> Hashable: ...

    def start(self, condition: Any, frames: int) -> Any:
        """Return the empty state of one video of at most `frames` latent frames. Runs only the work done once per prompt."""

    def switch(self, state: Any, condition: Any) -> None:
        """Switch to another prompt. The content of the cache is unchanged."""

    def free_frames(self, state: Any) -> int:
        """Maximum number of latent frames that one pass may feed, at least a block.

        Feeding more would evict frames that some of them attend to.
        """

    def forward(self, state: Any, clean: Sequence[Tensor], noisy: Tensor | None = None, level: float = 0.0) -> Tensor | None:
        """Run one pass over the frames that follow those in the cache.

        Args:
            clean: finished blocks `[1, F, C, Y, X]`, or a single one with any number of frames; they are written to the cache.
            noisy: the next block, at noise level `level`; it is not cached and is fed again in every step.

        Returns:
            The estimated clean latents of `noisy`, float32 `[1, F, C, Y, X]`; None without `noisy`.
        """
