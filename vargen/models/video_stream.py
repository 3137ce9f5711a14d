"""Decoding a video while it is made: latents come block by block, and a block can be taken back.

What a causal decoder keeps of earlier frames is one immutable value. A decoder never changes it but returns a new one. So
whoever keeps the old value can take a block back: by going on from that value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class DecodeState:
    """Where a decoder is in a video.

    Attributes:
        frames: latent frames decoded so far.
        parts: what its causal layers keep, in an order that is the decoder's own: tensors, or marks of the decoder's.
            Nobody writes into these tensors.
    """

    frames: int = 0
    parts: tuple[Any, ...] = ()

    @property
    def nbytes(self) -> int:
        """Memory that the kept tensors take."""
        return sum(part.numel() * part.element_size() for part in self.parts if isinstance(part, Tensor))


@runtime_checkable
class StreamingDecoder(Protocol):
    """Latents to pixels, block by block."""

    def decode_block(self, latents_BFCYX: Tensor, state: DecodeState | None = None) -> tuple[Tensor, DecodeState]:
        """Decode the next latent frames of a video.

        Args:
            latents_BFCYX: standardised latents of one or more frames.
            state: what the block before returned; None at the start of a video.

        Returns:
            Pixels `[B, F', 3, Y, X]` in [-1, 1], not clamped, and the state for the next block. `state` itself is unchanged:
            decoding another block from it is how a block is taken back.
        """
        ...
