"""Losses of next-scale training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def distillation(logits: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over rows of KL(teacher || student), from logits `[B, T, V]` and weights `[T]`."""
    expected = teacher.log_softmax(-1)
    each = F.kl_div(logits.log_softmax(-1), expected, reduction="none", log_target=True).sum(-1)
    return (each * weights).sum()


def scale_weights(scales: tuple[int, ...], device: torch.device) -> Tensor:
    """`[T]`: 1/side for every token, so that a scale counts with its side rather than its area."""
    return torch.cat([torch.full((side * side,), 1 / side, device=device) for side in scales])
