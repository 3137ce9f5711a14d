"""Memory that images of Infinity take, by formula, without text encoder and image tokenizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from vargen.models.infinity.network import feed_forward_width, parameter_count
from vargen.models.infinity.schedules import ScalePlan

_FLOAT = 4  # bytes of a number of the residual stream and of norms


class MemoryNeed(NamedTuple):
    """Bytes: of the transformer; of keys and values of image tokens and of the text; and of temporaries.

    `largest_pass` is an upper bound for the last scale, without what the attention kernel takes, which must not keep all
    weights of the attention.
    """

    weights: int
    keys: int
    text: int
    largest_pass: int


def predict_memory(
    config: Mapping[str, Any],
    plan: ScalePlan,
    *,
    rows: int = 2,
    last_rows: int = 2,
    text: int = 512,
    tile: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> MemoryNeed:
    """Predict the memory for images of the scales of `plan`.

    Args:
        config: `depth`, `dim`, `n_head`, `code_dim` and others of an `InfinityTransformer`.
        rows, last_rows: number of images, twice it under guidance; and at the last scale.
        text: number of rows of the longest text.
        tile, dtype: see `InfinityBlock`; of weights, keys and values.
    """
    sizes = {
        name: config[name] for name in ("depth", "dim", "n_head", "code_dim", "caption_dim", "caption_rows") if name in config
    }
    width, number = sizes["dim"], dtype.itemsize
    tokens = math.prod(plan.scales[-1])
    tiled = min(tile or tokens, tokens) * (4 * _FLOAT * width + 2 * number * feed_forward_width(width))
    whole = tokens * width * 3 * (_FLOAT + number) + plan.ends[-1] * width * 2 * number  # residuals; keys, alone and with all
    layer = 2 * number * sizes["depth"] * rows * width
    return MemoryNeed(number * parameter_count(**sizes), layer * plan.cached_tokens, layer * text, last_rows * (tiled + whole))
