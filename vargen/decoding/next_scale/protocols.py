"""What decoding scale by scale sees of a model.

Shape suffixes: B images, n tokens of a scale, V vocabulary, E width of a code.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class ScaleModel(Protocol):
    """A next-scale model: the tokens of a scale are independent given the coarser scales, and drawn in one pass.

    What crosses from scale to scale, and between models of one image tokenizer, is the *canvas*: the sum of what the scales
    before have contributed. Guidance rows, caches and conditions are the model's own business.

    Attributes:
        vocab: tokens V of the shared codebook.
        scale_tokens: tokens of every scale, coarse to fine.
        scale_codes: how many of the V tokens, the first ones, each scale may draw.
        draft_model: a smaller model of the same image tokenizer; None where there is none.
        cost_key: as of a `TokenModel`.
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
        """The state of B images, which holds no scale. Nothing is run."""

    def canvas(self, batch: int) -> Tensor:
        """What the scales add up to before the first one."""

    def add(self, canvas: Tensor, tokens: Tensor | None, scale: int) -> tuple[Tensor, Tensor | None]:
        """Add the tokens int64 `[B, n]` of a scale, or nothing for None; nothing is changed in place.

        Returns:
            The canvas with them, and what the transformer is fed at the next scale, `[B, n', E]`; None behind the last.
        """

    def forward(self, state: Any, inputs: Sequence[Tensor | None], count: int, guidance: Sequence[float]) -> list[Tensor]:
        """One block-causal pass over the scales that the state does not hold, up to the last of `inputs`; it holds them then.

        Args:
            inputs: by scale, from 0, which has None: what `add` returned.
            count: how many of the last scales logits are wanted of, at most those that this pass feeds.
            guidance: of each of these scales, a factor of the guidance asked for; 0 runs it without the unconditional rows.

        Returns:
            Guided logits of each of these scales, `[B, n, codes]`.
        """

    def rollback(self, state: Any, scale: int) -> None:
        """Forget all scales from `scale` on."""
