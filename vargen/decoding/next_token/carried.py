"""State that passes hand on, kept in tensors at fixed addresses; found by walking through arbitrary objects.

A captured pass reads and writes the same memory in every replay, but drafters put new tensors into their state. After two
passes that leave states of the same structure, each tensor that the second one replaced gets a fixed place. At the end of a
captured pass, its new value is copied there, and the objects are restored. Tensors that passes modify in place, such as those
of a KV cache, are left alone. Everything else in a state must be unchanged, because host code does not run in a replay.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pathlib
import random
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Compared by equality; those below are compared by identity.
_VALUES = (
    type(None), bool, int, float, complex, str, bytes, Enum, range, slice, frozenset, set, pathlib.PurePath, re.Pattern,
    torch.dtype, torch.device, torch.layout,
)  # fmt: skip
_FIXED = (type, ModuleType, BuiltinFunctionType, nn.Module, functools._lru_cache_wrapper)
_HIDDEN = (random.Random,)  # their state is not visible as Python attributes
_READ_ONLY = (tuple, functools.partial, MethodType)


class CannotCarryError(ValueError):
    """The state that passes hand on cannot be kept at fixed addresses."""


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a value by key; None for values that are not inspected."""
    if isinstance(value, (*_VALUES, *_FIXED, *_HIDDEN, Tensor, np.ndarray)):
        return None
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, MethodType):
        return {"__self__": value.__self__}
    if isinstance(value, FunctionType):
        return {name: cell.cell_contents for name, cell in _cells(value).items()}
    slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    found = {name: getattr(value, name) for name in slots if name != "__dict__" and hasattr(value, name)}
    if not found and not hasattr(value, "__dict__"):
        return None
    return found | getattr(value, "__dict__", {})


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _cells(function: FunctionType) -> dict[str, Any]:
    """Return the closure cells of a function that hold a value."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return {name: cell for name, cell in cells.items() if cell != type(cell)()}


def _below(path: str, of: Any, key: Any) -> str:
    return f"{path}[{key!r}]" if isinstance(of, dict | list | tuple) else f"{path}.{key}"


def _walk(value: Any, path: str, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Yield everything a value consists of, each object once, at the first path that leads to it."""
    yield path, value
    parts = None if id(value) in seen else _parts(value)
    if parts is not None:
        seen[id(value)] = value  # keep a reference: the id of a freed object can be reused
        for key, part in parts.items():
            yield from _walk(part, _below(path, value, key), seen)


class Snapshot:
    """The structure of some objects at one moment.

    Args:
        roots: the objects, by name.

    Attributes:
        tensors: by path, such as `"state.last.probs"`.

    Raises:
        CannotCarryError: if an object may change without being noticed, such as a generator.
    """

    def __init__(self, roots: Mapping[str, Any]):
        self.roots = dict(roots)
        self.tensors: dict[str, Tensor] = {}
        self._fixed: dict[str, Any] = {}
        self._contents: list[tuple[Any, dict[Any, Any]]] = []
        seen: dict[int, Any] = {}
        for name, root in self.roots.items():
            for path, value in _walk(root, name, seen):
                if isinstance(value, Tensor):
                    self.tensors[path] = value
                elif (parts := _parts(value)) is None:
                    self._fixed[path] = _comparable(value, path)
                elif not isinstance(value, _READ_ONLY):
                    self._contents.append((value, parts))

    def difference(self, other: Snapshot) -> str | None:
        """Describe the first difference to another snapshot other than tensor values; None if there is none."""
        mine, its = self.tensors.keys() | self._fixed.keys(), other.tensors.keys() | other._fixed.keys()
        for path in sorted(mine ^ its):
            return f"{path} is there after some passes only"
        for path, tensor in self.tensors.items():
            another = other.tensors.get(path)
            if another is None or _form(tensor) != _form(another):
                return f"{path} changes its shape from pass to pass"
        for path, value in self._fixed.items():
            if path not in other._fixed or not _same(value, other._fixed[path]):
                return f"{path}, a value of the host, changes from pass to pass"
        return None

    def restore(self) -> None:
        """Restore the structure of the objects; tensor values are unchanged."""
        for value, parts in self._contents:
            _fill(value, parts)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _comparable(value: Any, path: str) -> Any:
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, (*_VALUES, *_FIXED)) or type(value) is object:
        return value
    raise CannotCarryError(f"{path} is a {type(value).__name__}, whose changes a graph would not repeat")


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, (*_VALUES, tuple)) and type(one) is type(other) and bool(one == other))


def _fill(value: Any, parts: Mapping[Any, Any]) -> None:
    """Write parts, by the keys of `_parts`, into a mutable value."""
    if isinstance(value, dict):
        value.clear()
        value.update(parts)
    elif isinstance(value, list):
        value[:] = parts.values()
    elif isinstance(value, FunctionType):
        for name, cell in _cells(value).items():
            cell.cell_contents = parts[name]
    else:
        present = _parts(value) or {}
        for name in present.keys() - parts.keys():
            object.__delattr__(value, name)
        for name, part in parts.items():
            if name not in present or present[name] is not part:
                object.__setattr__(value, name, part)


def _with(value: Any, path: str, tensors: Mapping[str, Tensor], seen: dict[int, Any]) -> Any:
    """Replace the tensors at the given paths: in place if the value is mutable, otherwise in a copy."""
    if path in tensors:
        return tensors[path]
    if id(value) in seen:
        return seen[id(value)][1]
    parts = _parts(value)
    if parts is None:
        return value
    seen[id(value)] = value, value
    put = {key: _with(part, _below(path, value, key), tensors, seen) for key, part in parts.items()}
    if all(put[key] is part for key, part in parts.items()):
        return value
    made = value
    if isinstance(value, tuple):
        made = type(value)(*put.values()) if hasattr(value, "_fields") else tuple(put.values())
    elif isinstance(value, _READ_ONLY):
        raise CannotCarryError(f"{path} is a {type(value).__name__}, and passes replace tensors in it")
    else:
        if _frozen(value):
            made = copy.copy(value)
        _fill(made, put)
    seen[id(value)] = value, made
    return made


def _frozen(value: Any) -> bool:
    kind: Any = type(value)
    found: Any = getattr(kind, dataclasses._PARAMS, None)  # type: ignore[attr-defined]
    return found is not None and bool(found.frozen)


class Carried:
    """Objects whose tensors stay at fixed addresses, provided that `settle` is called at the end of each pass.

    Args:
        before, after: snapshots of the same objects around a pass, with no difference between them.

    Raises:
        CannotCarryError: if passes replace tensors in something that can be neither modified nor copied.
    """

    def __init__(self, before: Snapshot, after: Snapshot):
        found = {path: tensor for path, tensor in after.tensors.items() if tensor is not before.tensors[path]}
        self._places = {path: tensor.clone(memory_format=torch.contiguous_format) for path, tensor in found.items()}
        seen: dict[int, Any] = {}
        for name, root in after.roots.items():
            if _with(root, name, self._places, seen) is not root:
                raise CannotCarryError(f"{name} is a {type(root).__name__}, and passes replace tensors in it")
        self._kept = Snapshot(after.roots)

    def settle(self) -> None:
        """Copy the tensors of a pass to their fixed places, and restore the objects. Reads no value on the host.

        Raises:
            CannotCarryError: if the pass changed anything but tensors.
        """
        now = Snapshot(self._kept.roots)
        if difference := self._kept.difference(now):
            raise CannotCarryError(difference)
        made = {path: tensor for path, tensor in now.tensors.items() if tensor is not self._kept.tensors[path]}
        if others := made.keys() - self._places.keys():
            raise CannotCarryError(f"{min(others)} is replaced by some passes only")
        held = {_memory(tensor) for tensor in self._places.values()}
        # Clone sources that overlap a destination first: a state may move tensors from one place to another.
        moved = {path: tensor.clone() if _memory(tensor) in held else tensor for path, tensor in made.items()}
        for path, tensor in moved.items():
            self._places[path].copy_(tensor)
        self.restore()

    def restore(self) -> None:
        """Put the fixed tensors back where passes left others."""
        self._kept.restore()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
