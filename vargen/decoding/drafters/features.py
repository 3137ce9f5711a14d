"""What drafters trained on a target's features share: the features that passes left, and a trained drafter that fits the target.

Shape suffixes: B images, R rows of the target (B times its guidance halves), A slots of an accepted path, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from vargen.decoding.draft import Output, Step
from vargen.decoding.protocols import HeadedModel, TokenModel

Trained = TypeVar("Trained")


@dataclass
class Features:
    """The target's features by which the newest tokens were drawn, `[R, A, D]`, and how many of them each image has, `[B]`."""

    held: Tensor
    count: Tensor

    @classmethod
    def first(cls, output: Output, images: int) -> Features:
        """Behind the prefill, which drew one token."""
        return cls(_there(output.features), torch.ones(images, dtype=torch.int64, device=output.logits.device))

    def observe(self, step: Step) -> None:
        """Take those of the tokens that a pass committed. On a CPU as many slots as any image committed, else always the
        longest path: the host does not wait for a device."""
        features = _there(step.features)
        path, self.count = step.verdict.path, step.count
        if path.device.type == "cpu":
            path = path[:, : max(int(step.count.max()), 1)]
        slots = path.repeat(len(features) // len(path), 1)
        self.held = features.gather(1, slots[..., None].expand(-1, -1, features.shape[2]))

    def last(self) -> Tensor:
        """That by which each image's newest token was drawn, `[R, 1, D]`."""
        return at_slot(self.held, (self.count - 1).clamp(min=0))


def at_slot(rows: Tensor, slot: Tensor) -> Tensor:
    """`[R, 1, D]` of features or logits `[R, A, D]` at slots `[B]`, for all guidance halves."""
    index = slot.repeat(len(rows) // len(slot))[:, None, None]
    return rows.gather(1, index.expand(-1, 1, rows.shape[2]))


def _there(features: Tensor | None) -> Tensor:
    if features is None:
        raise ValueError("a trained drafter needs the model's features, and its passes return none")
    return features


def trained(kind: str, given: Trained | None, model: TokenModel) -> Trained:
    """The trained drafter `given`, or the model's own of a kind, `"eagle"` or `"medusa"`.

    Raises:
        ValueError: if there is none, or it has another vocabulary or grid.
    """
    found: Any = given if given is not None else getattr(model, kind) if isinstance(model, HeadedModel) else None
    if found is None:
        raise ValueError(
            f"this method needs a drafter trained for the model ({kind}), and this pipeline has none: train one with "
            f"`vargen train drafter --kind {kind}`, then pipe.load_drafter(folder)"
        )
    if (found.vocab, found.grid) != (model.vocab, model.grid):
        raise ValueError(
            f"the {kind} drafter must share the target's vocabulary and grid, {model.vocab} tokens on {model.grid}, "
            f"got {found.vocab} on {found.grid}"
        )
    return found
