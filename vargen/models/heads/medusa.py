"""Medusa: heads that predict several future tokens in parallel from one feature of a frozen transformer.

Source: Cai et al. 2024, Medusa (arXiv:2401.10774). The heads share the target's frozen norm and output layer. In the paper,
each has its own output layer, which in a small model would be nearly all of its parameters. As in Hydra (arXiv:2402.05109),
they also get the token that was sampled from the feature, which is known when they run.

Shape suffixes: R rows (images, times two under guidance), T slots, D width, h heads.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor, nn

from vargen.kernels.dispatch import is_eager_cpu
from vargen.kernels.linear import TransposableWeights, transpose_linear_weights
from vargen.models.llamagen.blocks import Linear
from vargen.models.storage import ModelMixin, QuantizedStorageMixin  # noqa: F401
from vargen.values import require_int


class ResidualBlock(nn.Module):
    """x + silu(W x + b), initialized as the identity (Medusa, section 2.1)."""

    def __init__(self, dim: int):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Module):
    """Maps [feature; embedding] to the feature that predicts one of the next tokens; initialized to return the feature."""

    def __init__(self, dim: int, blocks: int):
        super().__init__()
        self.fc = Linear(2 * dim, dim)
        self.blocks = nn.Sequential(*(ResidualBlock(dim) for _ in range(blocks)))
        with torch.no_grad():
            self.fc.weight[:, :dim].copy_(torch.eye(dim))
            self.fc.weight[:, dim:].zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.fc(x))


class MedusaDrafter(TransposableWeights, QuantizedStorageMixin, ConfigMixin):
    """Maps the target's feature that predicted token j, and token j, to features that predict tokens j + 1 to j + h.

    Args:
        dim, vocab_size, grid_size: as in the target.
        heads: number of heads h, one per future token.
        blocks: residual blocks per head.
        target: digest that identifies a target of transformers; None for a LlamaGen, which its sizes identify.
    """

    layer_prefixes: ClassVar[dict[str, tuple[str, ...]]] = {"heads": ("ahead.",), "blocks": ("ahead.0.blocks.",)}
    target_settings: ClassVar[tuple[str, ...]] = ("dim", "vocab_size", "grid_size", "target")  # copied from the target
    trains_features: ClassVar[bool] = False  # whether the loss also compares features with the target's

    feature_scale: Tensor
    token_scale: Tensor

    @register_to_config
    def __init__(
        self,
        dim: int = 768,
        vocab_size: int = 16384,
        grid_size: int = 16,
        heads: int = 3,
        blocks: int = 2,
        target: str | None = None,
        weight_format: str | None = None,
    ):
        super().__init__()
        require_int("heads", heads, 1)
        self.ahead = nn.ModuleList(MedusaHead(dim, blocks) for _ in range(heads))
        self.register_buffer("feature_scale", torch.ones(dim))
        self.register_buffer("token_scale", torch.ones(()))

    def forward(self, features: Tensor, embeddings: Tensor) -> Tensor:
        """Compute features `[R, T, h, D]` from features and embeddings `[R, T, D]`."""
        if is_eager_cpu(features) and not torch.is_grad_enabled():
            transpose_linear_weights(self)
        given = torch.cat([features / self.feature_scale, embeddings / self.token_scale], dim=-1)
        given = given.to(self.feature_scale.dtype)
        return torch.stack([head(given) for head in self.ahead], dim=2) * self.feature_scale

    def training_outputs(self, features: Tensor, embeddings: Tensor, steps: int) -> list[Tensor]:
        """Return for each head s the features `[R, N - 1 - s, D]` whose row i predicts token i + 1 + s; see `EagleDrafter`."""
        ahead, last = self(features, embeddings), features.shape[1] - 1
        return [ahead[:, : last - s, s] for s in range(min(self.config.heads, last))]
