"""Which path a pass takes: decided here, once, for all kernels and networks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor


def eager_on_cpu(tensor: Tensor) -> bool:
    """Whether to take what is made for eager passes on a CPU: NumPy, other orders of operands, shapes that change."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Inside `quick_passes`, for what outlives them: tensors made here may be written to, and used in training, anywhere."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def quick_passes(device: torch.device) -> AbstractContextManager[None]:
    """Passes without gradients: on a CPU torch's inference mode, in which an operation costs it less.

    Elsewhere `no_grad`: there the host is not what is waited for, and offloaded weights, which are moved amid a pass, would be
    of no use for training afterwards.
    """
    return torch.inference_mode() if device.type == "cpu" else torch.no_grad()


def float32_on_cpu(x: Tensor) -> bool:
    """Whether a pass in float32 may take the forms that are quicker on a CPU, operation by operation, without gradients."""
    return x.dtype == torch.float32 and not torch.is_grad_enabled() and eager_on_cpu(x)
