"""Validation of the arguments of a video pipeline's call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vargen.pipelines import validation as checks
from vargen.values import parse_int, short_repr


def check_window(window: Any, sinks: Any, block: int) -> None:
    if sinks is not None and parse_int(sinks, 0) is None:
        raise ValueError(f"sinks must be a whole number of latent frames from 0, got {short_repr(sinks)}")
    least = block + (sinks or 0)
    if window is not None and parse_int(window, least) is None:
        raise ValueError(f"window must be a whole number of at least {least} latent frames, got {short_repr(window)}")


def check_then(then: Any, blocks: int) -> dict[int, str]:
    if then is None:
        return {}
    if not isinstance(then, Mapping) or any(parse_int(block, 1, blocks - 1) is None for block in then):
        raise ValueError(f"then must map blocks from 1 to {blocks - 1} to prompts, got {short_repr(then)}")
    for prompt in then.values():
        if len(checks.check_prompts(prompt, "then")) != 1:
            raise ValueError(f"then must have one prompt for each block, got {short_repr(prompt)}")
    return dict(then)
