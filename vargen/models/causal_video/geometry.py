"""Sizes of block-wise video models, shared by networks, caches, decoders and the block loop."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class VideoGeometry:
    """Shapes of the latents of a video and of its blocks.

    Attributes:
        channels: latent channels.
        height, width: size of a latent frame.
        patch: side of the square patch of latent positions that forms a token.
        block_frames: latent frames per block.
        spatial_stride: pixels per latent position along each side.
        temporal_stride: pixel frames per latent frame, except that the first latent frame of a video is one pixel frame.
        fps: pixel frames per second.
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
        """Number of token rows of a frame."""
        return self.height // self.patch

    @property
    def columns(self) -> int:
        """Number of token columns of a frame."""
        return self.width // self.patch

    @property
    def frame_tokens(self) -> int:
        """Number of tokens of a latent frame."""
        return self.rows * self.columns

    @property
    def pixel_size(self) -> tuple[int, int]:
        """Rows and columns of a pixel frame."""
        return self.height * self.spatial_stride, self.width * self.spatial_stride

    def pixel_frames(self, start: int, frames: int) -> int:
        """Return the number of pixel frames of `frames` latent frames from `start` on."""
        return frames * self.temporal_stride - (self.temporal_stride - 1 if start == 0 and frames else 0)

    def same_latents(self, other: VideoGeometry) -> bool:
        """Whether latents are compatible: all sizes except the patch are equal."""
        return all(getattr(self, part.name) == getattr(other, part.name) for part in fields(self) if part.name != "patch")
