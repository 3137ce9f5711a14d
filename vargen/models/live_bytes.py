"""Counts the bytes of tensors that are alive while code runs, also of tensors without memory on the meta device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_UNFOLDED = 20_480  # torch's limit of batch * channels * frames * rows


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations create inside the `with` block, until they are freed.

    On the meta device this predicts the memory of a network without its weights. Attention is counted as fused, so that the
    scores are not stored. Buffers inside operations are not seen, except those of convolutions. A number that the code reads
    from a tensor of the meta device is 0.

    Args:
        ignored: networks whose weights are not counted.
        device: type of the device whose convolutions are counted.

    Attributes:
        current, peak: bytes now, and the maximum; `peak` may be set to start again.
    """

    def __init__(self, ignored: Iterable[nn.Module] = (), device: str = "cpu"):
        super().__init__()
        self.device = device
        self.current = self.peak = 0
        self._ignored = {weight.untyped_storage()._cdata for module in ignored for weight in _tensors_of(module)}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._attention = _FusedAttention()

    def __enter__(self) -> Any:
        self._attention.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._attention.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return 0
        out = func(*args, **(kwargs or {}))
        for key in [key for key, (storage, _) in self._live.items() if storage.expired()]:
            self.current -= self._live.pop(key)[1]
        tree_map_only(Tensor, self._count, out)
        if func is torch.ops.aten.convolution.default:
            self.peak = max(self.peak, self.current + _convolution_workspace(args[0], args[1], out, self.device))
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._ignored or storage._cdata in self._live:
            return
        self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.current += storage.nbytes()
        self.peak = max(self.peak, self.current)


def _convolution_workspace(x: Tensor, weight: Tensor, out: Tensor, device: str) -> int:
    """Return the bytes of buffers inside a convolution.

    torch unfolds the input of a small float32 convolution in three dimensions on a CPU. Otherwise oneDNN and cuDNN reorder the
    input and the output.
    """
    unfolds = x.ndim == 5 and x.dtype == torch.float32 and len(x) == 1 and math.prod(x.shape[:4]) <= _UNFOLDED
    if device == "cpu" and unfolds and max(weight.shape[3:]) > 1:
        return weight[0].numel() * math.prod(out.shape[2:]) * x.element_size()
    return x.nbytes + out.nbytes if x.ndim == 4 else 2 * out.nbytes


def _tensors_of(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


class _FusedAttention(TorchFunctionMode):
    """Replaces attention on the meta device, which would be computed with all scores there, by its result's shape."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention and args[0].device.type == "meta":
            query, _, value = args[:3]
            return query.new_empty(*query.shape[:-1], value.shape[-1])
        return func(*args, **(kwargs or {}))
