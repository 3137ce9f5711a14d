"""Pixels as the training of image tokenizers sees them: plain patches, distances of reconstructions."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


def plain_colours(pixels: Tensor, patch: int, step: int = 4, tolerance: int = 2) -> Tensor:
    """Which patches are of one colour, and of which.

    Args:
        pixels: float `[B, 3, Y, X]` in [-1, 1]. patch: side of a patch in pixels.
        step: levels of 256 that count as one colour. tolerance: levels that may lie between a patch's extremes.

    Returns:
        int64 `[B, Y/patch, X/patch]`: a number for the colour, -1 where the patch is not plain.
    """
    levels = (pixels.float() + 1) * 127.5
    high, low = F.max_pool2d(levels, patch), -F.max_pool2d(-levels, patch)
    red, green, blue = ((high + low) / 2).round().long().div(step, rounding_mode="floor").unbind(1)
    colour = (red * 256 + green) * 256 + blue
    return torch.where(((high - low) <= tolerance + 0.5).all(1), colour, -1)


class ReconstructionWeights(Protocol):
    """What a recipe says about the parts of `reconstruction_loss`."""

    @property
    def l1_weight(self) -> float: ...
    @property
    def mse_weight(self) -> float: ...
    @property
    def gradient_weight(self) -> float: ...
    @property
    def colour_weight(self) -> float: ...


def reconstruction_loss(predicted: Tensor, target: Tensor, recipe: ReconstructionWeights, patch: int) -> Tensor:
    """L1 and MSE on pixels, L1 on their differences (edges), and L1 and MSE on the mean colour of each patch.

    The pixel terms hold the last one too, but it is what a token can always carry, and early reconstructions without its weight
    were pale.
    """
    error = predicted - target
    gradient = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    colour = F.avg_pool2d(error, patch)
    return (
        recipe.l1_weight * error.abs().mean()
        + recipe.mse_weight * error.square().mean()
        + recipe.gradient_weight * gradient
        + recipe.colour_weight * (colour.abs().mean() + colour.square().mean())
    )
