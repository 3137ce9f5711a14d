"""What pipelines say of themselves and their models: methods, a folder's contents, and how tokens are drawn and priced."""

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
    """A preset as a pipeline sees it.

    Attributes:
        name, kind, summary, source: of the preset; kind is `"exact"` or `"relaxed"`.
        reason: why this pipeline cannot run it; None where it can.
    """

    name: str
    kind: str
    summary: str
    source: str
    reason: str | None = None


@dataclass(frozen=True)
class ModelInfo:
    """What a model folder says without its weights.

    Attributes:
        folder: where it is. pipeline: name of the class that opens it.
        condition: `"text"` or `"class"`. num_classes, id2label: classes, and their names by number (`"class"` only).
        vocab: tokens V to draw from. tokens: N that a picture has.
        has_draft: whether it has a smaller model to draft with.
        steps: passes of the baseline.
        image_size: side in pixels of pictures that a call may start from; None where it starts from none.
        drafters: drafters trained on its features that it has, `"eagle"` and `"medusa"`.
        low_res: whether it has a low-resolution transformer.
        fps: frames per second, of models of video; None for those of pictures. Video has no tokens: `vocab` is 0 then, `tokens`
            the frames of a usual video, and `steps` its passes.
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
    """Draws tokens with one guidance and sampling, and says what its passes cost: what comparisons of methods need."""

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
        """Draw B pictures by a preset's name or a method of this family; see `vargen.decoding.decode`."""

    def threads(self, condition: Condition, batch: int) -> AbstractContextManager[int]:
        """As many CPU threads as passes of the baseline are worth, for as long as the block runs."""

    def measure_pass_costs(self, condition: Condition, batch: int, widths: Sequence[int]) -> dict[int, float]:
        """Seconds of a target pass by the tokens it feeds, measured anew; of `widths` and of the narrowest that there is."""

    def spent(
        self, method: Any, runs: Sequence[DecodeStats], curve: dict[int, float], condition: Condition, batch: int
    ) -> tuple[float, int]:
        """Seconds that the passes of some runs of a method take by the cost curve, drafting included, and nothing else; and how
        many passes these are, those of a drafter that only proposes left out."""
