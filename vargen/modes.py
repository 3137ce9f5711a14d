"""In which of torch's modes passes run: without gradients, and on a CPU in inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Inside `inference_mode_for`, for what outlives them: tensors made here may be written to, and used in training,
    anywhere."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def inference_mode_for(device: torch.device) -> AbstractContextManager[None]:
    """Passes without gradients: on a CPU torch's inference mode, in which an operation costs it less.

    Elsewhere `no_grad`: there the host is not what is waited for, and offloaded weights, which are moved amid a pass, would be
    of no use for training afterwards.
    """
    return torch.inference_mode() if device.type == "cpu" else torch.no_grad()
