"""What the HTTP interface needs to know of a model, without its networks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.causal_video import CausalVideoPipeline


@dataclass(frozen=True)
class ModelCard:
    """A served model.

    Attributes:
        name: by which clients name it.
        makes_video: whether it generates video.
        size: width and height of its images in pixels.
        num_tokens: number of tokens of an image.
        vocab_size: of its tokens; 0 for video.
        num_classes: 0 for models that read prompts.
        class_names: number of each class by its names, in lower case.
        default_sampling: temperature, top-k and top-p by name, and the guidance scale.
        fps, block_frames, num_blocks: of videos: frames per second, frames of a block, and blocks of a video by default.
        created: Unix time.
    """

    name: str
    makes_video: bool
    size: tuple[int, int]
    num_tokens: int = 0
    vocab_size: int = 0
    num_classes: int = 0
    class_names: dict[str, int] = field(default_factory=dict)
    default_sampling: dict[str, Any] = field(default_factory=dict)
    fps: int = 0
    block_frames: int = 0
    num_blocks: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of_images(cls, pipe: VisualPipeline, name: str, size: tuple[int, int]) -> ModelCard:
        """Describe an image pipeline."""
        numbers = {each.strip().lower(): number for number, names in pipe.class_names.items() for each in names.split(",")}
        classes = pipe.transformer.config.num_classes if pipe.is_class_conditional else 0
        return cls(name, False, size, pipe.num_tokens, pipe.vocab_size, classes, numbers, dict(pipe.default_sampling))

    @classmethod
    def of_video(cls, pipe: CausalVideoPipeline, name: str) -> ModelCard:
        """Describe a video pipeline."""
        geometry = pipe.transformer.geometry
        rows, columns = geometry.pixel_size
        frames, blocks = geometry.block_frames * geometry.temporal_stride, int(pipe.setting("num_blocks"))
        return cls(name, True, (columns, rows), fps=pipe.fps, block_frames=frames, num_blocks=blocks)

    @property
    def size_name(self) -> str:
        """The size as OpenAI's clients write it."""
        return f"{self.size[0]}x{self.size[1]}"

    @property
    def document(self) -> dict[str, Any]:
        """The entry of `GET /v1/models`."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "vargen"}
