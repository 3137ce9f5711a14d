"""Conditions of networks, class labels or caption features, and classifier-free guidance.

Shape suffixes: B rows, P conditioning rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from vargen.decoding import Output, TokenModel, Tree
from vargen.decoding.tree_drafters import repeat_for_cfg
from vargen.values import OPTIONS, require_int, short_repr


@dataclass(frozen=True)
class Condition:
    """Condition of a batch of rows: class labels or caption features.

    Attributes:
        class_labels: int64 `[B]`, 0 to `num_classes - 1`, or `num_classes` for the null class.
        caption_embeds: `[B, P, caption_dim]`, valid rows last (left padding), padding rows zero.
        caption_mask: bool `[B, P]`, True where valid; None makes all rows visible.
        negative: condition of the unconditional rows in guidance. None: see `Guidance`.
        scale: guidance scale of these images in an engine of guided images. None: that of its model.
    """

    class_labels: Tensor | None = None
    caption_embeds: Tensor | None = None
    caption_mask: Tensor | None = None
    negative: Condition | None = None
    scale: float | None = None

    def __len__(self) -> int:
        """Number of rows B."""
        return next((len(part) for part in self._parts if part is not None), 0)

    def __bool__(self) -> bool:
        return True

    @property
    def _parts(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.class_labels, self.caption_embeds, self.caption_mask

    def require(self, kind: str) -> Tensor:
        """Return the labels for `"class"`, the caption features for `"text"`; ValueError without."""
        given = self.class_labels if kind == "class" else self.caption_embeds
        if given is None:
            raise ValueError(f"this model is conditioned on {kind}; the condition holds none")
        return given

    def select_rows(self, chosen: slice | Tensor) -> Condition:
        """Return some rows of the batch, given by a slice or by indices int64 `[n]`."""
        labels, embeds, mask = (None if part is None else part[chosen] for part in self._parts)
        return Condition(labels, embeds, mask, self.negative and self.negative.select_rows(chosen), self.scale)

    def repeat(self, count: int) -> Condition:
        """Repeat each row `count` times; those of row 0 come first."""
        labels, embeds, mask = (None if part is None else part.repeat_interleave(count, dim=0) for part in self._parts)
        return Condition(labels, embeds, mask, self.negative and self.negative.repeat(count), self.scale)

    def cat(self, other: Condition) -> Condition:
        """Concatenate this batch with another, without `negative`.

        If only one has a mask, all caption rows of the other stay visible.
        """
        if (self.class_labels is None) != (other.class_labels is None):
            raise ValueError("cannot concatenate a condition of classes with one of captions")
        own, others = list(self._parts), list(other._parts)
        for parts, beside in ((own, others), (others, own)):
            if parts[2] is None and beside[2] is not None and parts[1] is not None:
                parts[2] = torch.ones(parts[1].shape[:2], dtype=torch.bool, device=parts[1].device)
        joined = [None if a is None or b is None else torch.cat([a, b.to(a)]) for a, b in zip(own, others, strict=True)]
        return Condition(joined[0], joined[1], joined[2])


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance of a call.

    Attributes:
        scale: 1 runs without the unconditional rows.
        interval: last guided decoding step of a next-token model, counted from 0; None guides all. Passes after it run
            without the unconditional rows, once all images of a batch are past it.
        negative: condition of the unconditional rows, unless the condition has its own. Default: the null condition.
    """

    scale: float = 1.0
    interval: int | None = None
    negative: Condition | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", OPTIONS["guidance_scale"].range.check("guidance_scale", self.scale))
        if self.interval is not None:  # at most what fits in a tensor, and beyond every grid
            object.__setattr__(self, "interval", min(require_int("guidance_interval", self.interval, 0), 2**31))

    @property
    def rows_per_image(self) -> int:
        """Rows of the network per image: 1 or 2, conditional rows first."""
        return 1 if self.scale == 1 else 2

    def conditions(self, condition: Condition, transformer: Any) -> list[Condition]:
        """Return the condition of the conditional rows and, under guidance, that of the unconditional rows."""
        if self.rows_per_image == 1:
            return [condition]
        return [condition, condition.negative or self.negative or transformer.null_condition(condition)]

    def rows_of(self, slots: Tensor | None, rows: int, device: torch.device) -> Tensor:
        """Return the network rows, int64 `[R]`, of slots int64 `[n]`, of a state with `rows` rows; None: of all slots."""
        if slots is None:
            return torch.arange(rows, device=device)
        return repeat_for_cfg(slots, rows // self.rows_per_image, rows)

    def repeat(self, tensor: Tensor) -> Tensor:
        """Repeat a tensor `[B, ...]` for the CFG rows, `[R, ...]`."""
        return torch.cat([tensor] * self.rows_per_image) if self.rows_per_image > 1 else tensor

    def start_scales(self, scales: Tensor, rows: Tensor | None, scale: float | None) -> Tensor:
        """Set and return the scales `[n, 1, 1]` of images that start in slots int64 `[n]`; None: of all, and this scale."""
        rows = torch.arange(len(scales), device=scales.device) if rows is None else rows
        scales.index_fill_(0, rows, self.scale if scale is None else scale)
        return scales[rows]


def to_guidance(value: Guidance | float) -> Guidance:
    """Return guidance of this scale, or the given one."""
    return value if isinstance(value, Guidance) else Guidance(value)


class GuidedTokenModel(TokenModel):
    """Base of token models with a cache of the rows of their network, one or two an image, and with draft heads."""

    guidance: Guidance
    rows_per_image: int
    _scale: Any  # of the guidance; of a bound model float32 [slots, 1, 1]

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings `[R, T, D]` of tokens `[B, T]`, an input of trained drafters."""
        raise NotImplementedError

    def head(self, hidden: Tensor, position: Tensor) -> Tensor:
        """Guided logits `[B, T, V]` for the tokens after positions `[B, T]`, from states `[R, T, D]` before the final norm."""
        raise NotImplementedError

    def make_heads(self, makers: Mapping[str, Callable[[Any], Any]] | None) -> None:
        """Make the draft heads of this model, by functions with their names."""
        self._make_heads = dict(makers or {})
        self.draft_heads = {name: make(self) for name, make in self._make_heads.items()}

    def bind(self, slots: int) -> Self:
        bound = copy(self)
        if self.rows_per_image == 2:
            bound._scale = torch.full((slots, 1, 1), self.guidance.scale, dtype=torch.float32, device=self.device)
        bound.make_heads(self._make_heads)
        return bound

    def narrow(self, state: Any, length: int) -> Any:
        interval = self.guidance.interval  # of a token at this position, the root of a pass or a later one
        is_past = self.rows_per_image == 2 and interval is not None and length - 1 > interval
        return state.conditional if is_past else state

    def forward(self, tokens: Tensor, state: Any, tree: Tree) -> Output:
        """See `TokenModel`. Unconditional rows that are not computed have the features of the conditional ones."""
        if state.rows == len(tokens) * self.rows_per_image:
            return self.run_pass(tokens, state, tree)
        out = self._unguided.run_pass(tokens, state, tree)
        return Output(out.logits, None if out.features is None else self.guidance.repeat(out.features))

    def run_pass(self, tokens: Tensor, state: Any, tree: Tree) -> Output:
        """Run a pass of all rows; as `forward`."""
        raise NotImplementedError

    @cached_property
    def _unguided(self) -> Self:
        """The same model without guidance."""
        model = copy(self)
        model.guidance, model.rows_per_image, model._scale = Guidance(), 1, None
        return model

    def commit(self, state: Any, path: Tensor, count: Tensor, tree: Tree) -> None:
        if tree.is_chain:
            state.commit_chain(count)
        else:
            state.commit_path(self.guidance.repeat(path), self.guidance.repeat(count))

    def rollback(self, state: Any, length: Tensor) -> None:
        state.rollback(self.guidance.repeat(length))

    def repeat_rows(self, part: Tensor, dims: int) -> Tensor:
        """Repeat a per-image tensor of a tree for the CFG rows; one with `dims` dimensions is of all images."""
        return part if part.dim() == dims else self.guidance.repeat(part)


def apply_guidance(conditional: Tensor, unconditional: Tensor, scale: float | Tensor) -> Tensor:
    """Classifier-free guidance on float32 logits: u + s (c - u) (Ho & Salimans 2022, in LlamaGen's form)."""
    difference = conditional - unconditional
    if isinstance(scale, Tensor):
        return torch.addcmul(unconditional, difference, scale)
    return unconditional.add(difference, alpha=scale)


def validate_skipped(layers: Sequence[int], count: int) -> None:
    """Raise ValueError unless `layers` are some, but not all, of the layers of a network."""
    if not set(layers) < set(range(count)):
        raise ValueError(f"layers must be some of 0 to {count - 1}, but not all, got {short_repr(tuple(layers))}")


def cost_key(transformer: Any, *facts: str) -> str:
    """Return the key of measured pass costs: sizes and dtype of the network, and further facts that change a pass's time."""
    config = {name: value for name, value in transformer.config.items() if not name.startswith("_")}
    sizes = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]
    dtype = str(transformer.dtype).removeprefix("torch.")
    parts = (f"{type(transformer).__name__} {sizes}", dtype, *facts)
    return ", ".join(part for part in parts if part)
