"""Arguments of `decode_video`, and what it yields and passes to callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from vargen.decoding.video.method import VideoMethod
from vargen.decoding.video.protocols import BlockModel
from vargen.decoding.video.routing import DraftRouter
from vargen.decoding.video.scoring import BlockDecoder, BlockScorer
from vargen.decoding.video.stats import BlockRecord
from vargen.values import parse_int, short_repr

MAX_BLOCKS = 1_000_000


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


@dataclass(frozen=True)
class VideoRequest:
    """The validated arguments of `decode_video`."""

    model: BlockModel
    condition: Any
    seed: int
    method: VideoMethod
    blocks: int
    decoder: BlockDecoder
    preview: BlockDecoder | None
    score: BlockScorer | None
    given: Sequence[Tensor]
    callback: BlockCallback | None
    profile: bool
    router: DraftRouter | None = None

    def __post_init__(self) -> None:
        if parse_int(self.blocks, 1, MAX_BLOCKS) is None:
            raise ValueError(f"blocks must be a whole number from 1 to {MAX_BLOCKS}, got {short_repr(self.blocks)}")
        if parse_int(self.seed, -(2**63), 2**63 - 1) is None:
            raise ValueError(f"seed must be a whole number of 64 bits, got {short_repr(self.seed)}")
        for name, function in (("callback", self.callback), ("score", self.score), ("router", self.router)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function or None, got {short_repr(function)}")
        for latents in self.given:
            shape = list(latents.shape) if isinstance(latents, Tensor) else None
            if shape is None or len(shape) != 5 or shape[2:] != list(self.model.block_shape[1:]):
                got = short_repr(latents) if shape is None else shape
                raise ValueError(f"given must be latents [1, F, *{list(self.model.block_shape[1:])}], got {got}")
        self.method.validate_models(self.model, self.score is not None, self.router is not None)
