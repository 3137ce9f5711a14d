"""The torch mode of forward passes: no gradients, and inference mode on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Make normal tensors inside `inference_mode_for`, for use after it: they may be written to and used in training."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def inference_mode_for(device: torch.device) -> AbstractContextManager[None]:
    """Run passes without gradients: in torch's inference mode on a CPU, where it lowers the cost of each operation.

    Elsewhere in `no_grad`: the host is not the bottleneck there, and offloaded weights, which are moved during a pass, could
    not be trained afterwards.
    """
    return torch.inference_mode() if device.type == "cpu" else torch.no_grad()
