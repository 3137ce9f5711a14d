"""Rows of a running batch: replace images of its states by new ones, in place, while the others go on.

Shape suffixes: B images of the batch, n new images. A tensor may have several network rows per image (CFG rows): those of all
images come first, then again those of all images.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def put_rows(held: Tensor, new: Tensor, rows: Tensor) -> Tensor:
    """Write `new` `[k n, ...]` over rows `[n]` of `held` `[k B, ...]` and return the tensor written to.

    Where the second dimension of `held` is larger, the rest becomes zero. A tensor whose elements share memory is copied first.
    """
    images = len(held) * len(rows) // len(new)
    index = torch.cat([rows + first for first in range(0, len(held), images)])
    if any(stride == 0 and size > 1 for stride, size in zip(held.stride(), held.shape, strict=True)):
        held = held.clone()
    if held.dim() > 1 and held.shape[1] != new.shape[1]:
        width = min(held.shape[1], new.shape[1])
        held.index_fill_(0, index, 0)
        held[:, :width].index_copy_(0, index, new[:, :width].to(held.dtype))
        return held
    return held.index_copy_(0, index, new.to(held.dtype))


def insert_rows(state: Any, new: Any, rows: Tensor) -> Any:
    """Return `state` with the images of `new` in rows int64 `[n]` of its batch. Both are of the same class.

    Tensors are written in place; tuples and registered states (`register_state`) are followed; an object with a method
    `insert_rows` decides itself. Numbers, strings, frozen dataclasses, and objects that belong to the batch as a whole, which
    declare `is_shared = True`, are kept.
    """
    if hasattr(state, "insert_rows"):
        return state.insert_rows(new, rows)
    if isinstance(state, Tensor):
        return put_rows(state, new, rows)
    if isinstance(state, tuple):
        return tuple(insert_rows(each, other, rows) for each, other in zip(state, new, strict=True))
    if is_dataclass(state) and type(state) in pytree.SUPPORTED_NODES:
        parts = {each.name: insert_rows(getattr(state, each.name), getattr(new, each.name), rows) for each in fields(state)}
        return replace(state, **parts)  # type: ignore[type-var]
    is_frozen = getattr(getattr(state, "__dataclass_params__", None), "frozen", False)
    if state is None or isinstance(state, int | float | str) or is_frozen or getattr(state, "is_shared", False):
        return state
    name = type(state).__name__
    raise TypeError(f"state of a batch that images join must be registered (register_state) or have insert_rows, got {name}")


def select_rows(condition: Any, rows: list[int]) -> Any:
    """Return a copy of some rows of a condition: a tensor `[M, ...]`, or an object with a method `select_rows(indices)`."""
    index = torch.tensor(rows)
    return condition[index.to(condition.device)] if isinstance(condition, Tensor) else condition.select_rows(index)
