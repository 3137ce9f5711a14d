"""Uniforms whose comparisons with probabilities are enumerated.

Shape suffixes: B rows, C elements of one request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from vargen.decoding.noise import Purpose

if TYPE_CHECKING:
    from vargen.evaluation.enumeration import EnumeratedNoise


class NotEnumerableError(ValueError):
    """A drafter or a rule uses random numbers in a way that cannot be enumerated; the message says what it must do instead."""


_MESSAGE = (
    "uniforms were used through {!r}: to be enumerated, a uniform of Noise.uniform may only be compared with a probability, as "
    "in `uniforms < p` or `uniforms * q < p`"
)


class Uniforms:
    """Uniforms that are compared with probabilities, elementwise. Anything else raises NotEnumerableError.

    Attributes:
        key, slot, fold: int64 `[B, ...]`: the identity of each uniform, the fed slot it belongs to, and the number of
            `fold_in`.
        factor: what the uniforms are multiplied by.
    """

    def __init__(self, noise: EnumeratedNoise, purpose: Purpose, key: Tensor, slot: Tensor, fold: Tensor, factor: Any = 1.0):
        self.noise, self.purpose, self.key, self.slot, self.fold, self.factor = noise, purpose, key, slot, fold, factor

    def _map(self, change: Callable[[Tensor], Tensor]) -> Uniforms:
        factor = change(self.factor) if isinstance(self.factor, Tensor) else self.factor
        return Uniforms(self.noise, self.purpose, change(self.key), change(self.slot), change(self.fold), factor)

    def __getitem__(self, index: Any) -> Uniforms:
        return self._map(lambda each: each[index])

    def __mul__(self, other: Any) -> Uniforms:
        if isinstance(other, Tensor):
            other = other.double().expand_as(self.key)
        return Uniforms(self.noise, self.purpose, self.key, self.slot, self.fold, self.factor * other)

    __rmul__ = __mul__

    def __lt__(self, other: Any) -> Tensor:
        threshold = torch.as_tensor(other, dtype=torch.float64) / self.factor
        shape, needed = self.key.shape, self.noise.enumeration.is_needed(self.noise, self.purpose)
        threshold = threshold.nan_to_num(0.0).clamp(0, 1).expand(shape).reshape(shape[0], -1)
        each = self.noise.enumeration
        slot = self.slot.reshape(shape[0], -1)
        if self.purpose == Purpose.ACCEPT and each.tests is not None:
            key, fold = self.key.reshape(shape[0], -1), self.fold.reshape(shape[0], -1)
            each.tests.step = self.noise._step
            return each.tests.answer(key, slot, fold, threshold).view(shape)
        bounds = torch.stack([torch.zeros_like(threshold), threshold, torch.ones_like(threshold)], -1)
        key = self.key.reshape(shape[0], -1)
        used = needed.gather(1, slot)
        return (each.sample_intervals(self.purpose, self.noise._step, key, bounds, used) == 0).view(shape)

    __le__ = __lt__

    def __gt__(self, other: Any) -> Tensor:
        return ~(self < other)

    __ge__ = __gt__

    def __getattr__(self, name: str) -> NoReturn:
        raise NotEnumerableError(_MESSAGE.format(name))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("gt", "__gt__", "ge", "__ge__"):  # p > u
            return args[1] < args[0] if isinstance(args[1], Uniforms) else args[0] > args[1]
        if name in ("lt", "__lt__", "le", "__le__"):
            return args[1] > args[0] if isinstance(args[1], Uniforms) else args[0] < args[1]
        if name in ("mul", "__mul__", "__rmul__"):
            return args[0] * args[1] if isinstance(args[0], Uniforms) else args[1] * args[0]
        if name == "stack":
            parts, dim = args[0], args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
            first = parts[0]
            keys, slots, folds = (torch.stack([getattr(u, name) for u in parts], dim) for name in ("key", "slot", "fold"))
            return Uniforms(first.noise, first.purpose, keys, slots, folds)
        return cls.__getattr__(None, name)  # type: ignore[arg-type]


def _refuse(name: str) -> Any:
    def operator(self: Uniforms, *others: Any) -> NoReturn:
        raise NotEnumerableError(_MESSAGE.format(name))

    return operator


for _name in ("add", "radd", "sub", "rsub", "truediv", "rtruediv", "neg", "pow", "eq", "ne"):
    setattr(Uniforms, f"__{_name}__", _refuse(_name))
