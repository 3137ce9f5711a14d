"""Losses of next-scale training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROWS = 1024  # whose logits are alive at once: at 4096 codes they stay in a CPU's cache


class HeadLoss(torch.autograd.Function):
    """Weighted cross-entropy of a linear head, a few rows at a time: all logits of a batch would be 140 MB to write and read.

    The gradient is computed with the loss, as it needs the same logits.
    """

    @staticmethod
    def forward(
        context: Any, features: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            features: `[n, D]`. weight, bias: of the head. targets: int64 `[n]`. weights: float32 `[n]`, of the rows.
            dtype: of the products.

        Returns:
            The weighted sum, and each row's cross-entropy `[n]`, which has no gradient.
        """
        low = weight.to(dtype)
        grad_features, losses = torch.empty_like(features), torch.empty_like(weights)
        grad_weight, grad_bias = torch.zeros_like(weight), torch.zeros_like(bias)
        for start in range(0, len(features), _ROWS):
            part = slice(start, start + _ROWS)
            rows = features[part].to(dtype)
            logits = torch.addmm(bias.to(dtype), rows, low.T).float()
            top = logits.amax(-1, keepdim=True)
            right = logits.gather(-1, targets[part, None])
            probs = logits.sub_(top).exp_()
            total = probs.sum(-1, keepdim=True)
            losses[part] = (total.log() + top - right).squeeze(-1)
            probs.mul_(weights[part, None] / total)
            probs.scatter_add_(-1, targets[part, None], -weights[part, None])
            grad_bias += probs.sum(0)
            probs_low = probs.to(dtype)
            grad_features[part] = (probs_low @ low).to(features.dtype)
            grad_weight += (probs_low.T @ rows).to(weight.dtype)
        context.save_for_backward(grad_features, grad_weight, grad_bias)
        context.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(context: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_features, grad_weight, grad_bias = context.saved_tensors
        return grad_features * grad, grad_weight * grad, grad_bias * grad, None, None, None


def head_loss(head: nn.Linear, features: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weighted sum of cross-entropies, and each `[B, T]`; see `HeadLoss`.

    Args:
        features: `[B, T, D]`. targets: `[B, T]`. weights: `[T]`.
    """
    rows = weights.expand(targets.shape).flatten()
    loss, each = HeadLoss.apply(features.flatten(0, 1), head.weight, head.bias, targets.flatten(), rows, dtype)
    return loss, each.view(targets.shape)


def distillation(logits: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over rows of KL(teacher || student), from logits `[B, T, V]` and weights `[T]`."""
    expected = teacher.log_softmax(-1)
    each = F.kl_div(logits.log_softmax(-1), expected, reduction="none", log_target=True).sum(-1)
    return (each * weights).sum()


def scale_weights(scales: tuple[int, ...], device: torch.device) -> Tensor:
    """`[T]`: 1/side for every token, so that a scale counts with its side rather than its area."""
    return torch.cat([torch.full((side * side,), 1 / side, device=device) for side in scales])
