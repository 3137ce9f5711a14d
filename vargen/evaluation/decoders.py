"""Decoders that compare methods of a model: fixed guidance and sampling, any method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import DecodeOutput, Progress, Sampling, decode, decode_scales
from vargen.decoding.costs import token_threads
from vargen.device import limit_threads
from vargen.models.guidance import Condition
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.validation import validate_sampling


@dataclass(frozen=True)
class FixedDecoder:
    """Generates tokens with a decoding model and fixed sampling."""

    model: Any
    sampling: Sampling
    paradigm: str

    @property
    def device(self) -> torch.device:
        return self.model.device

    def decode(
        self,
        condition: Condition,
        seeds: Tensor,
        method: Any,
        callback: Callable[[Progress], bool | None] | None = None,
        profile: bool = False,
    ) -> DecodeOutput:
        """Generate B images with a preset (by name) or a method; see `vargen.decoding.decode`."""
        loop: Any = decode_scales if self.paradigm == "next-scale" else decode
        return loop(self.model, condition, seeds, method, self.sampling, callback=callback, profile=profile)

    def limit_threads(self, condition: Condition, batch: int) -> AbstractContextManager[None]:
        """Use the autotuned number of CPU threads while the block runs; torch's own for the wide passes of scales."""
        return limit_threads(None if self.paradigm == "next-scale" else token_threads(self.model, condition, batch, 1))


def open_decoder(pipe: VisualPipeline, settings: Mapping[str, Any] | None = None) -> FixedDecoder:
    """Return the decoder of an image pipeline.

    Args:
        settings: `guidance_scale`, `temperature`, `top_k` and `top_p` where they differ from the checkpoint's.
    """
    scale, sampling = validate_sampling({**pipe.default_sampling, **(settings or {})})
    return FixedDecoder(pipe.decoding_model(scale), sampling, pipe.paradigm)
