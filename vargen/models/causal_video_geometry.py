"""Sizes of block-wise video models, in one place: what networks, caches, decoders and the block loop agree on."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class VideoGeometry:
    """Shapes of the latents of a video, and of the blocks that it is made in.

    Attributes:
        channels: of a latent. height, width: of a latent frame.
        patch: side of the squares of latent positions that are one token.
        block_frames: latent frames of a block.
        spatial_stride: pixels per latent position along a side.
        temporal_stride: pixel frames of a latent frame; the first latent frame of a video is always one.
        fps: pixel frames per second.

    Raises:
        ValueError: for a number below 1, or a frame that does not divide into patches.
    """

    channels: int = 16
    height: int = 60
    width: int = 104
    patch: int = 2
    block_frames: int = 3
    spatial_stride: int = 8
    temporal_stride: int = 4
    fps: int = 16

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{part.name} must be a whole number of at least 1, got {value!r}")
        if self.height % self.patch or self.width % self.patch:
            raise ValueError(f"patch must divide the latent frame {self.height}x{self.width}, got {self.patch}")

    @property
    def rows(self) -> int:
        """Rows of tokens in a frame."""
        return self.height // self.patch

    @property
    def columns(self) -> int:
        """Columns of tokens in a frame."""
        return self.width // self.patch

    @property
    def frame_tokens(self) -> int:
        """Tokens of a latent frame."""
        return self.rows * self.columns

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.frame_tokens * self.block_frames

    @property
    def pixel_size(self) -> tuple[int, int]:
        """Rows and columns of a pixel frame."""
        return self.height * self.spatial_stride, self.width * self.spatial_stride

    def latent_shape(self, batch: int, frames: int | None = None) -> tuple[int, int, int, int, int]:
        """`[B, F, C, Y, X]` of latents, by default of a block."""
        return batch, self.block_frames if frames is None else frames, self.channels, self.height, self.width

    def pixel_frames(self, start: int, frames: int) -> int:
        """How many pixel frames the latent frames `start` to `start + frames` are."""
        return frames * self.temporal_stride - (self.temporal_stride - 1 if start == 0 and frames else 0)

    def same_latents(self, other: VideoGeometry) -> bool:
        """Whether latents of one may go to the other: all but the patch is equal."""
        return all(getattr(self, part.name) == getattr(other, part.name) for part in fields(self) if part.name != "patch")
