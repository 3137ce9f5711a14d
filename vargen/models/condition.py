"""Conditions of networks: class labels or caption features.

Shape suffixes: B rows, P conditioning rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Condition:
    """Condition of a batch of rows: class labels or caption features.

    Attributes:
        class_labels: int64 `[B]`, 0 to `num_classes - 1`, or `num_classes` for the null class.
        caption_embeds: `[B, P, caption_dim]`, valid rows last (left padding), padding rows zero.
        caption_mask: bool `[B, P]`, True where valid; None makes all rows visible.
        negative: condition of the unconditional rows in guidance. None: see `vargen.adapters.Guidance`.
    """

    class_labels: Tensor | None = None
    caption_embeds: Tensor | None = None
    caption_mask: Tensor | None = None
    negative: Condition | None = None

    def __len__(self) -> int:
        """Number of rows B."""
        return next((len(part) for part in self._parts if part is not None), 0)

    def __bool__(self) -> bool:
        return True

    @property
    def _parts(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.class_labels, self.caption_embeds, self.caption_mask

    def select_rows(self, chosen: slice | Tensor) -> Condition:
        """Return some rows of the batch, given by a slice or by indices int64 `[n]`."""
        negative = self.negative and self.negative.select_rows(chosen)
        labels, embeds, mask = (None if part is None else part[chosen] for part in self._parts)
        return Condition(labels, embeds, mask, negative)

    def repeat(self, count: int) -> Condition:
        """Repeat each row `count` times; those of row 0 come first."""
        labels, embeds, mask = (None if part is None else part.repeat_interleave(count, dim=0) for part in self._parts)
        return Condition(labels, embeds, mask, self.negative and self.negative.repeat(count))

    def cat(self, other: Condition) -> Condition:
        """Concatenate this batch with another, without `negative`.

        If only one has a mask, all caption rows of the other stay visible.
        """
        labels, embeds = (self.class_labels, other.class_labels), (self.caption_embeds, other.caption_embeds)
        masks = [self.caption_mask, other.caption_mask]
        if (labels[0] is None) != (labels[1] is None) or (embeds[0] is None) != (embeds[1] is None):
            raise ValueError("cannot concatenate a condition of classes with one of captions")
        if (masks[0] is None) != (masks[1] is None):
            pairs_of_masks = [(m, e) for m, e in zip(masks, embeds, strict=True) if e is not None]
            masks = [torch.ones(e.shape[:2], dtype=torch.bool, device=e.device) if m is None else m for m, e in pairs_of_masks]
        pairs = (labels, embeds, masks)
        joined = [None if a is None or b is None else torch.cat([a, b.to(a)]) for a, b in pairs]
        return Condition(joined[0], joined[1], joined[2])
