"""Data types that describe pipelines and models: supported methods, contents of a folder, and the decoder protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from vargen.decoding import DecodeOutput, DecodeStats, Progress
from vargen.models.condition import Condition


@dataclass(frozen=True)
class Method:
    """A preset, and whether a pipeline supports it.

    Attributes:
        name, kind, summary, source: from the preset; kind is `"exact"` or `"relaxed"`.
        reason: why this pipeline cannot run it; None if it can.
    """

    name: str
    kind: str
    summary: str
    source: str
    reason: str | None = None


@dataclass(frozen=True)
class ModelInfo:
    """Description of a model folder, available without loading weights.

    Attributes:
        folder: path of the folder.
        pipeline: name of the pipeline class.
        condition: `"text"` or `"class"`.
        vocab: vocabulary size V; 0 for video models.
        tokens: number of tokens N of an image; for video models, the number of frames of a video of default length.
        num_classes, id2label: number of classes, and their names by number (`"class"` only).
        has_draft: whether it has a draft transformer.
        steps: number of passes of the baseline, for an image or a video of default length.
        image_size: width and height in pixels of the source image of a call; None if calls take no image.
        drafters: names of the drafters in the folder that are trained on the transformer's features.
        low_res: whether it has a low-resolution transformer.
        fps: frames per second of video models; None for image models.
    """

    folder: Path
    pipeline: str
    condition: str
    vocab: int
    tokens: int
    num_classes: int
    id2label: dict[int, str]
    has_draft: bool
    steps: int
    image_size: int | None = None
    drafters: tuple[str, ...] = ()
    low_res: bool = False
    fps: int | None = None


class Decoder(Protocol):
    """Generates tokens with fixed guidance and sampling, and measures the cost of passes; used to compare methods."""

    @property
    def device(self) -> torch.device: ...

    def decode(
        self,
        condition: Condition,
        seeds: Tensor,
        method: Any,
        callback: Callable[[Progress], bool | None] | None = None,
        profile: bool = False,
    ) -> DecodeOutput:
        """Generate B images with a preset (by name) or a method of this paradigm; see `vargen.decoding.decode`."""

    def threads(self, condition: Condition, batch: int) -> AbstractContextManager[int]:
        """Use the autotuned number of CPU threads for passes of the baseline while the block runs."""

    def measure_pass_costs(self, condition: Condition, batch: int, widths: Sequence[int]) -> dict[int, float]:
        """Measure the seconds of a target pass by number of fed tokens, for `widths` and the narrowest pass, uncached."""

    def spent(
        self, method: Any, runs: Sequence[DecodeStats], curve: dict[int, float], condition: Condition, batch: int
    ) -> tuple[float, int]:
        """Return the seconds of all passes of some runs according to the cost curve, including drafting but nothing else, and
        the number of passes, excluding those of a drafter that only proposes."""
