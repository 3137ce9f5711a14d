"""What the HTTP interface knows of its model, without networks, and what one request may ask for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.causal_video import CausalVideoPipeline
from vargen.values import number_field, validate_fields


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request; a larger one is refused before anything is generated.

    Attributes:
        body_bytes: of the body. Also limits the memory of requests that are being read.
        upload_bytes: of a body with images.
        prompt_characters: of the prompt.
        images: number of images `n`.
        seconds: from the first byte of the body to the last one of the answer.
        blocks: length of a video in blocks.
        kept_bytes: of images with an address, and of videos, that are kept in memory.
        connections: number of requests at a time, beyond which new ones are refused; twice as many connections may be open.
        connections_per_address: number of open connections of one address, such as that of a proxy.
        header_seconds: from the start of a connection, or the first byte of a further request, to the end of its header.
    """

    body_bytes: int = number_field(64 * 1024, 1024, 2**30, is_integer=True)
    upload_bytes: int = number_field(8 * 2**20, 1024, 2**30, is_integer=True)
    prompt_characters: int = number_field(4000, 1, 10**6, is_integer=True)
    images: int = number_field(10, 1, 1024, is_integer=True)
    seconds: float = number_field(120.0, 0, 86400, open_below=True)
    blocks: int = number_field(64, 1, 100_000, is_integer=True)
    kept_bytes: int = number_field(64 * 2**20, 1024, 2**40, is_integer=True)
    connections: int = number_field(512, 1, 10**6, is_integer=True)
    connections_per_address: int = number_field(256, 1, 10**6, is_integer=True)
    header_seconds: float = number_field(10.0, 0, 86400, open_below=True)

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(frozen=True)
class ModelCard:
    """What the interface knows of a model, without its networks.

    Attributes:
        name: by which clients name it.
        size: width and height of its images in pixels.
        vocab_size: of its tokens; 0 for video.
        num_classes: 0 for models that read prompts.
        class_names: number of each class by its names, in lower case.
        defaults: temperature, top-k and top-p by name, and the guidance scale.
        edits_images: whether it inpaints.
        fps: frames per second; 0 for images.
        block_frames, num_blocks: of videos: frames of each block, the first one and the others, and blocks by default.
        created: Unix time.
    """

    name: str
    size: tuple[int, int]
    vocab_size: int = 0
    num_classes: int = 0
    class_names: Mapping[str, int] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    edits_images: bool = False
    fps: int = 0
    block_frames: tuple[int, int] = (0, 0)
    num_blocks: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, pipe: VisualPipeline, name: str, size: tuple[int, int] | None = None) -> ModelCard:
        """Describe a pipeline; `size` is that of its images."""
        if isinstance(pipe, CausalVideoPipeline):
            geometry = pipe.transformer.geometry
            frames = [geometry.pixel_frames(start, geometry.block_frames) for start in (0, geometry.block_frames)]
            shape = geometry.pixel_size[::-1]
            return cls(name, shape, fps=pipe.fps, block_frames=tuple(frames), num_blocks=int(pipe.setting("num_blocks")))
        assert size is not None
        numbers = {each.strip().lower(): number for number, names in pipe.class_names.items() for each in names.split(",")}
        edits = pipe.image_size is not None
        return cls(name, size, pipe.vocab_size, pipe.num_classes, numbers, dict(pipe.default_sampling), edits)

    @property
    def size_name(self) -> str:
        """The size as OpenAI's clients write it."""
        return f"{self.size[0]}x{self.size[1]}"

    @property
    def document(self) -> dict[str, Any]:
        """The entry of `GET /v1/models`."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "vargen"}
