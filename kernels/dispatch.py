"""Which path a pass takes: decided here, once, for all kernels and networks."""

from __future__ import annotations

import torch
from torch import Tensor


def eager_on_cpu(tensor: Tensor) -> bool:
    """Whether to take what is made for eager passes on a CPU: NumPy, other orders of operands, shapes that change."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def float32_on_cpu(x: Tensor) -> bool:
    """Whether a pass in float32 may take the forms that are quicker on a CPU, operation by operation, without gradients."""
    return x.dtype == torch.float32 and not torch.is_grad_enabled() and eager_on_cpu(x)
