"""Interface of the models that next-scale decoding runs.

Shape suffixes: B images, n tokens of a scale, V vocabulary, E width of a code.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class ScaleModel(Protocol):
    """A next-scale model: the tokens of a scale are independent given the coarser scales, and are sampled in one pass.

    Scales, and models with the same image tokenizer, exchange only the *canvas*: the accumulated contributions of the scales so
    far. CFG rows, caches and conditions are internal to the model.

    Attributes:
        vocab: number V of tokens in the shared codebook.
        scale_tokens: number of tokens of every scale, coarse to fine.
        scale_codes: number of tokens that each scale may use, which are the first ones of the V.
        draft_model: a smaller model with the same image tokenizer; None if there is none.
        cost_key: as in `TokenModel`.
    """

    @property
    def vocab(self) -> int: ...

    @property
    def scale_tokens(self) -> tuple[int, ...]: ...

    @property
    def scale_codes(self) -> tuple[int, ...]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def draft_model(self) -> ScaleModel | None: ...

    @property
    def cost_key(self) -> Hashable: ...

    def start(self, condition: Any) -> Any:
        """Return the state of B images with no scale in its cache. Runs no pass."""

    def canvas(self, batch: int) -> Tensor:
        """Return the canvas before the first scale."""

    def add(self, canvas: Tensor, tokens: Tensor, scale: int) -> tuple[Tensor, Tensor | None]:
        """Add the tokens int64 `[B, n]` of a scale to the canvas. Does not modify its arguments.

        Returns:
            The new canvas, and the transformer input at the next scale, `[B, n', E]`; None after the last scale.
        """

    def forward(self, state: Any, inputs: Sequence[Tensor | None], guidance: float) -> Tensor:
        """Run one block-causal pass over the scales that are not in the cache yet, up to the last of `inputs`, and cache them.

        Args:
            inputs: what `add` returned, by scale; None for scale 0.
            guidance: a factor on the requested guidance of the last scale; 0 skips the unconditional rows.

        Returns:
            Guided logits of the last scale, `[B, n, codes]`.
        """

    def rollback(self, state: Any, scale: int) -> None:
        """Discard all scales from `scale` on."""
