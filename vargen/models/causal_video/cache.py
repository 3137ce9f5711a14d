"""Sizes and key/value caches of block-wise video models: self-attention over earlier blocks, and to the prompt.

The self-attention cache has keys and values of clean frames, one slot per frame. Slots of the first `sinks` frames are
permanent. The others form a ring buffer, in which a new frame replaces the oldest one. Keys include their position (RoPE at
absolute frames), so the order of slots does not matter, nothing is ever moved, and the visible slots are one slice.

Every denoising pass of a block writes to the block's own slots: begin, any number of passes, a clean pass, commit. A rejected
block needs no cleanup, because the next attempt overwrites it.

Shape suffixes: B rows, H heads, K head width, S slots (tokens), T tokens of a pass, F frames, P rows of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from vargen.values import require_int


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
            require_int(part.name, getattr(self, part.name), 1)
        if self.height % self.patch or self.width % self.patch:
            raise ValueError(f"patch must divide the latent frame {self.height}x{self.width}, got {self.patch}")

    @property
    def frame_tokens(self) -> int:
        """Number of tokens of a latent frame."""
        return (self.height // self.patch) * (self.width // self.patch)

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


def validate_attention_window(window: int | None, sinks: int, least: int) -> None:
    """Raise ValueError unless a window (None for all frames) has room for `sinks` and at least `least` more frames."""
    require_int("sinks", sinks, 0)
    if window is None and sinks:
        raise ValueError(f"sinks must be 0 without a window, got {sinks}")
    if window is not None and require_int("window", window, 0) < sinks + least:
        raise ValueError(f"window must be at least {sinks + least} frames ({sinks} sinks and a block of {least}), got {window}")


def visible_frames(frames: int, block: int, window: int | None = None, sinks: int = 0) -> Tensor:
    """Return the attention mask of frames, bool `[F, F]`: whether the frame of a row attends to the frame of a column.

    A frame attends to its own block of `block` frames and all earlier frames. With a window, it attends only to the first
    `sinks` of these frames and to the latest ones, `window` frames in total.
    """
    own = torch.arange(frames) // block
    seen = own[:, None] >= own[None]
    if window is not None:
        column, end = torch.arange(frames)[None], (own[:, None] + 1) * block
        seen = seen & ((column >= end - (window - sinks)) | (column < sinks))
    return seen


class VideoCache:
    """Keys and values of every layer, `[B, H, S, K]` each.

    Args:
        frames: maximum number of frames; ignored with a window.
        window: maximum number of frames that a block attends to, including its own and the sinks; None for all.
        sinks: number of first frames of the video that always stay visible.

    Attributes:
        frames: number of committed frames from the start of the video.
        pending: number of frames of the current block, after the committed ones.
    """

    def __init__(
        self,
        geometry: VideoGeometry,
        layers: int,
        batch: int,
        heads: int,
        head_dim: int,
        *,
        frames: int,
        window: int | None = None,
        sinks: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        validate_attention_window(window, sinks, geometry.block_frames)
        self.geometry, self.window, self.sinks = geometry, window, sinks
        self.slots = require_int("frames", frames, 1) if window is None else window
        shape = (layers, batch, heads, self.slots * geometry.frame_tokens, head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.frames = self.pending = 0
        self._written = 0  # end of the frames that were ever written

    @property
    def nbytes(self) -> int:
        """Size of keys and values in bytes."""
        return self.keys.nbytes + self.values.nbytes

    def free_frames(self) -> int:
        """Return how many more frames fit before a frame is evicted or the cache is full."""
        return max(0, self.slots - self.frames)

    def begin_block(self, frames: int | None = None) -> None:
        """Start the next `frames` frames (default: a block), which passes then write. Replaces the current block.

        Several blocks can be started together, as long as none evicts frames that another one attends to.
        """
        count = self.geometry.block_frames if frames is None else require_int("frames", frames, 1)
        if self.window is None and self.frames + count > self.slots:
            raise ValueError(
                f"the cache is for {self.slots} frames, got {self.frames + count}: make it larger, or give a window"
            )
        if count > self.geometry.block_frames and count > (free := self.free_frames()):
            raise ValueError(f"{count} frames are more than a block, and the window has room for {free}: commit them singly")
        if self.frames + count < self._written > self.slots:
            lost = self._written - self.frames
            raise ValueError(f"a refused block has evicted frames that the next one would see: begin its {lost} frames")
        self.pending = count

    def write(self, layer: int, k_BHTK: Tensor, v_BHTK: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values of the pending frames; returns all that these attend to, `[B, H, S, K]`, with themselves."""
        tokens = self.geometry.frame_tokens
        if k_BHTK.shape[2] != self.pending * tokens:
            raise ValueError(f"{self.pending} frames of {tokens} tokens were begun, got {k_BHTK.shape[2]} tokens")
        self._written = max(self._written, self.frames + self.pending)
        done = 0
        for slot, count in self._slot_runs():
            into, of = slice(slot * tokens, (slot + count) * tokens), slice(done * tokens, (done + count) * tokens)
            self.keys[layer, :, :, into] = k_BHTK[:, :, of].to(self.keys.dtype)
            self.values[layer, :, :, into] = v_BHTK[:, :, of].to(self.values.dtype)
            done += count
        seen = min(self.frames + self.pending, self.slots) * tokens
        return self.keys[layer, :, :, :seen].type_as(k_BHTK), self.values[layer, :, :, :seen].type_as(v_BHTK)

    def layer(self, layer: int) -> LayerCache:
        """Return the cache of one layer."""
        return LayerCache(self, layer)

    def _slot_runs(self) -> list[tuple[int, int]]:
        """Slots of the pending frames as runs (first, count): at most three, split at the sinks and where the ring wraps."""
        runs: list[tuple[int, int]] = []
        for slot in range(self.frames, self.frames + self.pending):
            if self.window is not None and slot >= self.sinks:
                slot = self.sinks + (slot - self.sinks) % (self.window - self.sinks)
            if runs and sum(runs[-1]) == slot:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((slot, 1))
        return runs

    def select_rows(self, chosen: Sequence[int]) -> VideoCache:
        """Return a cache with copies of some of the videos, in this order; a video may be chosen several times."""
        selected = copy(self)
        selected.keys, selected.values = self.keys[:, list(chosen)], self.values[:, list(chosen)]
        return selected

    def commit(self, frames: int | None = None) -> None:
        """Commit the first `frames` pending frames (default: all), whose keys and values should be from a clean pass."""
        count = self.pending if frames is None else require_int("frames", frames, 0, self.pending)
        self.frames += count
        self.pending -= count


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer. Layers get this instead of their index, because code would be recompiled for every index."""

    cache: VideoCache
    layer: int

    def write(self, k_BHTK: Tensor, v_BHTK: Tensor) -> tuple[Tensor, Tensor]:
        """See `VideoCache.write`."""
        return self.cache.write(self.layer, k_BHTK, v_BHTK)


LayerTextCache = tuple[Tensor, Tensor, Tensor | None]  # keys, values and bias of one layer


@dataclass(frozen=True)
class TextCache:
    """Keys and values of a prompt for cross-attention, computed once per prompt for all blocks.

    Attributes:
        keys, values: by layer, `[B, H, P, K]`.
        bias: additive attention bias, float `[B, 1, 1, P]`; None makes all rows visible.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Size of keys and values in bytes."""
        return sum(part.nbytes for part in (*self.keys, *self.values))

    def layer(self, layer: int) -> LayerTextCache:
        """Return keys, values and bias of one layer."""
        return self.keys[layer], self.values[layer], self.bias

    def select_rows(self, chosen: slice | Sequence[int]) -> TextCache:
        """Return some of the prompts."""
        index = chosen if isinstance(chosen, slice) else list(chosen)
        keys, values = (tuple(part[index] for part in parts) for parts in (self.keys, self.values))
        return TextCache(keys, values, None if self.bias is None else self.bias[index])
