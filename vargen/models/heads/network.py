"""Drafters on the features of a frozen transformer: EAGLE's decoder layer, and Medusa's parallel heads.

Features are hidden states before the target's final norm, from which drafts are far better than from those after it (SSD,
arXiv:2606.20543). Embedding, norm and output layer belong to the target and are not stored here.

Shape suffixes: R rows (images, times two under guidance), T slots, D width, H heads, K head width, h heads of Medusa.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor, nn

from vargen.kernels.host import normal_tensors
from vargen.kernels.ops import TransposableWeights
from vargen.models.kv_cache import KVCache
from vargen.models.llamagen.blocks import GridNetwork, Linear, LlamaGenBlock
from vargen.models.storage import ModelMixin, QuantizedStorageMixin  # noqa: F401
from vargen.values import require_int


class EagleDrafter(GridNetwork, ConfigMixin):
    """One-layer drafter, which extends the features autoregressively.

    Sources: Li et al. 2024, EAGLE (arXiv:2401.15077), whose layer takes [feature; embedding]; EAGLE-3 (arXiv:2503.01840), which
    trains it on its own outputs.

    Slot j takes the feature that predicted token j and the embedding of token j, and returns the feature that predicts token
    j + 1. Its input is the target's feature if the target has processed token j - 1, and its own output otherwise.

    Args:
        dim, vocab_size, grid_size: as in the target.
        n_head, multiple_of, ffn_dim_multiplier, norm_eps, rope_base: parameters of the layer, as in `LlamaGenTransformer`.
        above: add the target's feature after the token above the one to predict as an input; zero where there is none yet.
        target: digest that identifies a target of transformers; None for a LlamaGen, which its sizes identify.
    """

    target_settings: ClassVar[tuple[str, ...]] = (  # copied from the target
        "dim", "vocab_size", "grid_size", "n_head", "multiple_of", "ffn_dim_multiplier", "norm_eps", "rope_base",
        "target",
    )  # fmt: skip
    trains_features: ClassVar[bool] = True  # whether the loss also compares features with the target's

    feature_scale: Tensor
    token_scale: Tensor

    @register_to_config
    def __init__(
        self,
        dim: int = 768,
        vocab_size: int = 16384,
        grid_size: int = 16,
        n_head: int = 12,
        multiple_of: int = 256,
        ffn_dim_multiplier: float | None = None,
        norm_eps: float = 1e-5,
        rope_base: float = 10000.0,
        above: bool = False,
        target: str | None = None,
        weight_format: str | None = None,
    ):
        super().__init__()
        self.fc = Linear(dim * (3 if above else 2), dim)
        self.layer = LlamaGenBlock(dim, n_head, n_head, self.ffn_width, norm_eps, dropout=0.0)
        # Divisors of the inputs, measured at the start of training. A norm would discard the magnitude of features.
        self.register_buffer("feature_scale", torch.ones(dim))
        self.register_buffer("token_scale", torch.ones(()))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        with torch.no_grad():  # initialized to pass the feature through
            self.fc.weight[:, :dim].copy_(torch.eye(dim))

    def new_cache(self, rows: int, scratch: int, device: torch.device | None = None) -> KVCache:
        """Create a cache for `rows` rows and at most `scratch` slots per proposal."""
        self.choose_layout(self.fc.weight)
        shape = 1, rows, self.config.n_head, self.layer.attention.head_dim
        place = device or self.device
        with normal_tensors():
            return KVCache(*shape, prefix=0, tokens=self.tokens, scratch=scratch, dtype=self.dtype, device=place)

    def merge_inputs(self, features_RTD: Tensor, embeddings_RTD: Tensor, above_RTD: Tensor | None = None) -> Tensor:
        """Scale and project the inputs to the input of the layer, `[R, T, D]`."""
        parts = [features_RTD / self.feature_scale, embeddings_RTD / self.token_scale]
        if self.config.above:
            assert above_RTD is not None
            parts.append(above_RTD / self.feature_scale)
        return self.fc(torch.cat(parts, dim=-1).to(self.fc.weight.dtype))

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        cache: KVCache,
        positions: Tensor | None = None,
        ancestors: Tensor | None = None,
        earlier: int = 0,
        above: Tensor | None = None,
    ) -> Tensor:
        """Return features `[R, T, D]` that predict the token after each slot. Does not advance the cache's pointer.

        Args:
            features, embeddings, above: `[R, T, D]`; see the class.
            positions, ancestors, earlier: of a tree that earlier passes started; see `run_layers`.
        """
        x = self.merge_inputs(features, embeddings, above)
        return self.run_layers([self.layer], x, cache, positions, ancestors, earlier) * self.feature_scale


# -- Medusa -------------------------------------------------------------------------------------------------------------


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

    Source: Cai et al. 2024, Medusa (arXiv:2401.10774), where each head has its own output layer, which in a small model would
    be nearly all of its parameters. As in Hydra (arXiv:2402.05109), heads also get the token that was sampled from the feature,
    which is known when they run.

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
        self.choose_layout(features)
        given = torch.cat([features / self.feature_scale, embeddings / self.token_scale], dim=-1)
        given = given.to(self.feature_scale.dtype)
        return torch.stack([head(given) for head in self.ahead], dim=2) * self.feature_scale
