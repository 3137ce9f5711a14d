"""Scorers and an extractor of features in arithmetic, which evaluation imports by their names."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vargen.scoring import BatchedScorer
from vargen.scoring.protocol import Images, to_tensor

calls: list[int] = []  # prompts of each batch that `Brightness` has scored


class Brightness(BatchedScorer):
    """Mean pixel, in points per letter of the prompt's first word."""

    identity = "brightness-1"

    def __init__(self) -> None:
        super().__init__("brightness")

    def score_batch(self, images: Images, prompts: Sequence[str]) -> torch.Tensor:
        calls.append(len(prompts))
        return to_tensor(images).mean((1, 2, 3)) * len(prompts[0].split()[0])


def level(images: Images, prompts: Sequence[str]) -> torch.Tensor:
    return to_tensor(images).mean((1, 2, 3))


def nan(images: Images, prompts: Sequence[str]) -> list[float]:
    return [float("nan")] * len(prompts)


def net() -> torch.nn.Module:
    """Of an image, the mean of each channel."""
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())


class Halves(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.mean((2, 3)), x[..., : x.shape[-1] // 2].mean((1, 2, 3))[:, None]], 1)


def tower() -> torch.nn.Module:
    """Of an image, the mean of each channel, and of its left half."""
    return Halves()
