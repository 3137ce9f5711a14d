"""Interfaces of block-wise video decoding: models, decoders, scorers and routers, and what callers get of each block.

Shape suffixes: F latent frames of a block, C latent channels, Y/X latent rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vargen.decoding.video.stats import BlockRecord


class BlockModel:
    """Base class of block-wise video models.

    Each block takes a few denoising steps, which attend to clean earlier blocks through a KV cache. Models exchange latents,
    never keys and values. Prompts and caches are internal to the model.

    Attributes:
        block_shape: `(F, C, Y, X)` of the latents of a block.
        levels: noise level of each step, decreasing from 1; none if the model has its own loop over the steps of a block.
        resamples_noise: whether noise is added to the estimate of a step for the next one (distilled models); otherwise the
            sampler follows the velocity.
        draft_model: a smaller model with the same latents; None if there is none.
        shares_cache: whether `draft_model` is the same network with other steps, and one cache serves both.
        cost_key: as in `TokenModel`.
        generator_class: a subclass of `BlockGenerator` for models with a loop of their own; None: that class.
    """

    block_shape: tuple[int, int, int, int]
    levels: tuple[float, ...] = ()
    device: torch.device
    resamples_noise: bool = True
    draft_model: BlockModel | None = None
    shares_cache: bool = False
    cost_key: Hashable = None
    generator_class: Any = None

    def start(self, condition: Any, frames: int) -> Any:
        """Return the empty state of one video of at most `frames` latent frames. Runs only the work done once per prompt."""
        raise NotImplementedError

    def switch(self, state: Any, condition: Any) -> None:
        """Switch to another prompt. The content of the cache is unchanged."""
        raise NotImplementedError

    def free_frames(self, state: Any) -> int:
        """Maximum number of latent frames that one pass may feed, at least a block.

        Feeding more would evict frames that some of them attend to.
        """
        raise NotImplementedError

    def forward(self, state: Any, clean: Sequence[Tensor], noisy: Tensor | None = None, level: float = 0.0) -> Tensor | None:
        """Run one pass over the frames that follow those in the cache.

        Args:
            clean: finished blocks `[1, F, C, Y, X]`, or a single one with any number of frames; they are written to the cache.
            noisy: the next block, at noise level `level`; it is not cached and is fed again in every step.

        Returns:
            The estimated clean latents of `noisy`, float32 `[1, F, C, Y, X]`; None without `noisy`.
        """
        raise NotImplementedError


class BlockDecoder(Protocol):
    """Decodes latents to pixels in [-1, 1], block by block. States are immutable, so that a block can be discarded."""

    def decode_block(self, latents: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return the pixels `[1, F', 3, Y, X]` of the next latents and the state after them; state None starts a video."""


class BlockView(NamedTuple):
    """Input of a scorer for one block.

    Attributes:
        number: index of the block.
        latents: float `[F, C, Y, X]`.
        frames: float32 `[T, 3, Y, X]` in [0, 1], from the preview decoder if there is one.
        previous: the frame before them from the same decoder, `[3, Y, X]`; None at the start of a video.
    """

    number: int
    latents: Tensor
    frames: Tensor
    previous: Tensor | None


BlockScorer = Callable[[BlockView], Tensor]  # scores [T], one per frame or otherwise; the smallest counts


class DraftView(NamedTuple):
    """Input of a router for one draft.

    Attributes:
        number: index of the block, above 0.
        latents: the draft, float `[1, F, C, Y, X]`.
        previous: the finished block before it. first: the one at the start of the video.
    """

    number: int
    latents: Tensor
    previous: Tensor
    first: Tensor


DraftRouter = Callable[[DraftView], float]  # the share, in [0, 1], of drafts from which the target would gain less


class BlockProgress(NamedTuple):
    """State passed to a callback after every pass: the current block, the number of blocks, and the total number of passes."""

    block: int
    blocks: int
    passes: int


BlockCallback = Callable[[BlockProgress], bool | None]


@dataclass(frozen=True)
class VideoBlock:
    """A finished block.

    Attributes:
        number: from 0.
        latents: float32 `[F, C, Y, X]`, of the first block with given latents before its own.
        frames: float32 `[F', 3, Y, X]` in [0, 1].
        record: how it was generated.
    """

    number: int
    latents: Tensor
    frames: Tensor
    record: BlockRecord

    def __repr__(self) -> str:
        latents, frames = list(self.latents.shape), list(self.frames.shape)
        return f"VideoBlock(number={self.number}, source={self.record.source!r}, latents={latents}, frames={frames})"
