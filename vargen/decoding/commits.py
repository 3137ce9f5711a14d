"""When a video model sees the clean blocks that it did not draw, or drew from noise: at once, when it is needed, or anew.

K/V of a block are those of its clean latents, whoever made it. So a block that is finished must pass through each model once,
before that model draws again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from vargen.decoding.block_protocols import BlockModel
from vargen.values import shown, whole


@runtime_checkable
class Commit(Protocol):
    """How a model follows the video.

    Attributes:
        exact: whether the model then sees what it would if it had seen each block when it was finished.
    """

    @property
    def exact(self) -> bool: ...

    def frames(self, model: BlockModel, frames: int) -> int:
        """How many latent frames a state must hold in a video of so many."""

    def due(self, waiting: int, last: bool) -> bool:
        """Whether the blocks that wait must be seen now, `last` being whether the video ends with them."""

    def renews(self) -> bool:
        """Whether each block is drawn from a state of its own."""

    def kept(self, seen: list[Tensor]) -> list[Tensor]:
        """Those of the finished blocks that a renewed state is made of."""


def _check(value: Any, name: str) -> None:
    if whole(value, 1) is None:
        raise ValueError(f"{name} must be a whole number of at least 1, got {shown(value)}")


@dataclass(frozen=True)
class Eager:
    """A clean pass behind every block but the last."""

    exact = True

    def frames(self, model: BlockModel, frames: int) -> int:
        return frames

    def due(self, waiting: int, last: bool) -> bool:
        return not last

    def renews(self) -> bool:
        return False

    def kept(self, seen: list[Tensor]) -> list[Tensor]:
        return []


@dataclass(frozen=True)
class Lazy:
    """Blocks wait until the model is needed, and then share as few passes as the cache allows: what comes after the model's
    last block is never run. Equal to `Eager` but for the order in which sums are rounded.

    Args:
        most: blocks that wait at most, so that memory stays flat.

    Raises:
        ValueError: for a number below 1.
    """

    most: int = 16
    exact = True

    def __post_init__(self) -> None:
        _check(self.most, "most")

    def frames(self, model: BlockModel, frames: int) -> int:
        return frames

    def due(self, waiting: int, last: bool) -> bool:
        return waiting > self.most and not last

    def renews(self) -> bool:
        return False

    def kept(self, seen: list[Tensor]) -> list[Tensor]:
        return []


@dataclass(frozen=True)
class Window:
    """Before each block of its own, the model sees the latest `blocks` of them anew, as if the video began there (as Krea's
    realtime model does): accepted drafts cost it nothing. Only for models that were trained to draw so.

    Raises:
        ValueError: for a number below 1.
    """

    blocks: int = 1
    exact = False

    def __post_init__(self) -> None:
        _check(self.blocks, "blocks")

    def frames(self, model: BlockModel, frames: int) -> int:
        return min(frames, (self.blocks + 1) * model.block_shape[0])

    def due(self, waiting: int, last: bool) -> bool:
        return False

    def renews(self) -> bool:
        return True

    def kept(self, seen: list[Tensor]) -> list[Tensor]:
        return seen[-self.blocks :]
