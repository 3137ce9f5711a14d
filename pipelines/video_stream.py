"""A video that is being made, and what a call of a pipeline of video gives back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from diffusers.utils import BaseOutput
from PIL import Image
from torch import Tensor

from vargen.compat import without_autocast
from vargen.decoding import Block, BlockStream, VideoStats

if TYPE_CHECKING:
    from vargen.pipelines.video_model import VideoModel


@dataclass
class CausalVideoPipelineOutput(BaseOutput):
    """Result of a call.

    Attributes:
        frames: N videos, one of each prompt: lists of PIL images; or float32 `[N, F, Y, X, 3]` numpy or `[N, F, 3, Y, X]` torch
            in [0, 1]; or latents, float32 `[N, F', C, Y', X']`; by `output_type`. Arrays of a call that was stopped between
            videos come as a list, for they are of different lengths.
        stats: of the video, a row for each block; for a list of prompts, a list of them. See `vargen.decoding.VideoStats`.
        fps: frames per second that it is made for.
    """

    frames: Any
    stats: Any  # VideoStats | list[VideoStats], which would have to be told apart wherever one prompt is given
    fps: int


class VideoStream(Iterator[Block]):
    """A video that is being made: blocks as they are finished; see `CausalVideoPipeline.stream`.

    Attributes:
        fps: frames per second. blocks: how many there will be.
    """

    def __init__(self, pipe: VideoModel, blocks: BlockStream, scorer: Any, prompts: Mapping[int, str], clean: bool):
        self._pipe, self._blocks, self._scorer, self._clean = pipe, blocks, scorer, clean
        self._prompts, self._next = dict(prompts), 0
        self.fps, self.blocks = pipe.transformer.geometry.fps, blocks.blocks

    @torch.no_grad()
    @without_autocast
    def __next__(self) -> Block:
        if (prompt := self._prompts.pop(self._next, None)) is not None:
            self.switch(prompt)
        block = next(self._blocks)
        self._next = block.number + 1
        return block

    @property
    def stats(self) -> VideoStats:
        """Of the blocks that are finished."""
        return self._blocks.stats

    @property
    def tau(self) -> float | None:
        """The threshold just now; what is set counts from the next decision on."""
        return self._blocks.tau

    @tau.setter
    def tau(self, value: float) -> None:
        self._blocks.tau = value

    @torch.no_grad()
    @without_autocast
    def switch(self, prompt: str) -> None:
        """Go on with another prompt from the next block on; drafts are then scored with it."""
        condition = self._pipe.video_condition(prompt, None, self._clean)
        score = None if self._scorer is None else self._scorer.bind(self._pipe.scored_prompt(prompt))
        self._blocks.switch(condition, score)

    def cancel(self) -> None:
        """End the video within a pass; from any thread."""
        self._blocks.cancel()

    def close(self) -> None:
        """Free what it holds; for a video that is not iterated over to its end."""
        self._blocks.close()


def stack_videos(videos: list[list[Tensor]], output_type: str) -> Any:
    """Videos of parts `[F, ...]` as a call returns them."""
    if output_type == "pil":
        return [[Image.fromarray(frame) for part in parts for frame in part.permute(0, 2, 3, 1).numpy()] for parts in videos]
    whole = [torch.cat(parts) if parts else torch.zeros(0) for parts in videos]
    alike = len({video.shape for video in whole}) == 1  # unless the call was stopped
    if output_type != "np":
        return torch.stack(whole) if alike else whole
    arrays = [(video.permute(0, 2, 3, 1) if video.ndim == 4 else video).cpu().numpy() for video in whole]
    return np.stack(arrays) if alike else arrays
