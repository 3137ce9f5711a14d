"""Latents to frames, block by block, where a block may be taken back."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class BlockDecoder(Protocol):
    """Latents to pixels in [-1, 1], block by block; a state is never changed, so that a block can be taken back."""

    def decode_block(self, latents: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Pixels `[1, F', 3, Y, X]` of the next latents, and the state behind them; None stands for the start of a video."""


class DecodedBlock(NamedTuple):
    frames: Tensor  # float32 [T, 3, Y, X] in [0, 1]
    state: Any


class BlockPixels:
    """A decoder in one video: where it is, and the last frame that it made of a block that stands."""

    def __init__(self, decoder: BlockDecoder):
        self.decoder, self.state = decoder, None
        self.last: Tensor | None = None
        self._latest: tuple[Tensor, DecodedBlock] | None = None

    def decoded(self, latents: Tensor) -> DecodedBlock:
        """The next block. What was decoded to be scored is not decoded again to be kept."""
        if self._latest is None or self._latest[0] is not latents:
            pixels, state = self.decoder.decode_block(latents, self.state)
            self._latest = latents, DecodedBlock((pixels[0].float() / 2 + 0.5).clamp(0, 1), state)
        return self._latest[1]

    def keep(self, latents: Tensor) -> Tensor:
        """The block stands; its frames."""
        frames, self.state = self.decoded(latents)
        self.last, self._latest = frames[-1].clone(), None
        return frames
