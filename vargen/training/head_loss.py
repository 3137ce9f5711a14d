"""Cross-entropy of a linear head without materializing all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROWS = 1024  # rows of logits held at a time: with 4096 codes they fit a CPU's cache


class HeadLoss(torch.autograd.Function):
    """Weighted cross-entropy of a linear head, computed a few rows at a time.

    The logits of a full batch would be 140 MB to write and read. The gradient is computed together with the loss, because it
    needs the same logits.
    """

    @staticmethod
    def forward(
        context: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss and its gradients.

        Args:
            features: `[n, D]`. weight, bias: of the head.
            targets: int64 `[n]`. weights: float32 `[n]`, per row.
            dtype: of the matrix products.

        Returns:
            The weighted sum, and the cross-entropy of each row `[n]`, which has no gradient.
        """
        low = weight.to(dtype)
        grad_features, losses = torch.empty_like(features), torch.empty_like(weights)
        grad_weight = torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, len(features), _ROWS):
            part = slice(start, start + _ROWS)
            rows = features[part].to(dtype)
            logits = (rows @ low.T if bias is None else torch.addmm(bias.to(dtype), rows, low.T)).float()
            top = logits.amax(-1, keepdim=True)
            right = logits.gather(-1, targets[part, None])
            probs = logits.sub_(top).exp_()
            total = probs.sum(-1, keepdim=True)
            losses[part] = (total.log() + top - right).squeeze(-1)
            probs.mul_(weights[part, None] / total)
            probs.scatter_add_(-1, targets[part, None], -weights[part, None])
            if grad_bias is not None:
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
        return grad_features * grad, grad_weight * grad, None if grad_bias is None else grad_bias * grad, None, None, None


def head_loss(
    weight: Tensor, bias: Tensor | None, features: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of cross-entropies, and each of them `[B, T]`; see `HeadLoss`.

    Args:
        weight, bias: of the head. features: `[B, T, D]`. targets: `[B, T]`. weights: `[T]`, per position, or `[B, T]`.
    """
    rows = weights.expand(targets.shape).flatten()
    loss, each = HeadLoss.apply(features.flatten(0, 1), weight, bias, targets.flatten(), rows, dtype)
    return loss, each.view(targets.shape)
