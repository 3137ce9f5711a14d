"""Memory that images of Infinity take, by formula.

Letters: R rows, n tokens of the last scale, S tokens of all, N rows of text, D width, F width of the feed-forward, C bits of a
token, m tokens of a tile, b bytes of a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vargen.models.infinity.network import feed_forward_width, parameter_count
from vargen.models.infinity.schedules import ScalePlan

_FLOAT = 4  # bytes of a number of residual stream, norms and logits


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that generating images takes.

    Attributes:
        weights: of the transformer.
        keys: keys and values of all scales but the last, of all layers.
        text: keys and values of the text, of all layers.
        largest_pass: temporaries of the last scale, which is the largest: an upper bound, without those of the attention
            kernel, which needs few. So no kernel may be used that keeps all attention weights.
    """

    weights: int
    keys: int
    text: int
    largest_pass: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.keys + self.text + self.largest_pass


def predict_memory(
    config: Mapping[str, Any],
    plan: ScalePlan,
    *,
    images: int = 1,
    text_rows: int = 512,
    guided: bool = True,
    guided_last: bool = True,
    tile: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> MemoryNeed:
    """Predict the memory of a transformer and its passes, without text encoder and image tokenizer.

    Args:
        config: `depth`, `dim`, `n_head`, `code_dim` and others of an `InfinityTransformer`.
        plan: scales of the images.
        images: number generated at a time.
        text_rows: rows of the longest text N.
        guided, guided_last: whether any scale, and the last one, has unconditional rows.
        tile: see `InfinityBlock`.
        dtype: of weights, and of keys and values.
    """
    sizes = {
        name: config[name] for name in ("depth", "dim", "n_head", "code_dim", "caption_dim", "caption_rows") if name in config
    }
    depth, width, b = sizes["depth"], sizes["dim"], dtype.itemsize
    rows, last_rows = images * (2 if guided else 1), images * (2 if guided and guided_last else 1)
    n, everything = math.prod(plan.scales[-1]), plan.ends[-1]
    m = min(tile or n, n)
    queries = m * (8 * _FLOAT * width + 2 * b * feed_forward_width(width))  # residuals, norms, and both sides of the GELU
    whole = (
        n * width * (3 * _FLOAT + 3 * b) + everything * 2 * b * width
    )  # residual, its result, keys alone and with all others
    return MemoryNeed(
        weights=b * parameter_count(**sizes),
        keys=2 * b * depth * rows * plan.cached_tokens * width,
        text=2 * b * depth * rows * text_rows * width,
        largest_pass=last_rows * (queries + whole),
    )
