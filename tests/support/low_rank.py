"""An adapter of two thin matrices around a linear layer."""

from __future__ import annotations

import torch


class LowRank(torch.nn.Module):
    """An adapter as peft attaches it: the layer that it wraps, and a product of two thin matrices."""

    def __init__(self, layer: torch.nn.Linear):
        super().__init__()
        self.base_layer, generator = layer, torch.Generator().manual_seed(1)
        self.a = torch.nn.Parameter(torch.randn(2, layer.in_features, generator=generator))
        self.b = torch.nn.Parameter(torch.randn(layer.out_features, 2, generator=generator))

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + x @ self.a.T @ self.b.T * 0.1
