"""The decoder of TA-Tok, Tar's tokenizer: tokens that stand for meaning to features, which its detokenizers take.

Source: Han et al. 2025, "Vision as a Dialect" (arXiv 2506.18898), section 3.1. The layers are those of SigLIP 2.

Shape suffixes: B batch, N tokens of a square grid, V tokens, D width.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor, nn

from vargen.models.storage import ModelMixin, QuantizedStorageMixin  # noqa: F401


class TATokDecoder(QuantizedStorageMixin, ConfigMixin):
    """Codes, transformer layers and a last network of two layers.

    Args:
        codebook_size: number of tokens V.
        dim, n_layer, n_head, hidden: width D, layers, heads, and width of the feed-forwards.
        side: of the square of learned positions, which are resized to that of the tokens.
    """

    @register_to_config
    def __init__(
        self, codebook_size: int = 65_536, dim: int = 1152, n_layer: int = 3, n_head: int = 12, hidden: int = 3072,
        side: int = 16, weight_format: str | None = None,
    ):  # fmt: skip
        super().__init__()
        self.codes = nn.Embedding(codebook_size, dim)  # after the projections, of which the converter makes one table
        self.positions = nn.Parameter(torch.zeros(dim, side, side))
        layer = nn.TransformerEncoderLayer(
            dim, n_head, hidden, dropout=0.0, activation=partial(F.gelu, approximate="tanh"), layer_norm_eps=1e-6,
            batch_first=True, norm_first=True,
        )  # fmt: skip
        self.encoder = nn.TransformerEncoder(layer, n_layer, nn.LayerNorm(dim, eps=1e-6), enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim))

    @apply_forward_hook  # lets CPU offload load the weights
    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """Return features `[B, N, D]` of tokens int64 `[B, N]`. ValueError unless they are a square of known tokens."""
        side = math.isqrt(tokens.shape[-1])
        if tokens.dim() != 2 or side**2 != tokens.shape[1]:
            raise ValueError(f"tokens must be [B, N] with N a square number, got {list(tokens.shape)}")
        if (tokens < 0).any() or (tokens >= (count := self.codes.num_embeddings)).any():
            raise ValueError(f"tokens must be from 0 to {count - 1}, got {int(tokens.min())} to {int(tokens.max())}")
        size, places = (side, side), self.positions[None].float()
        places = F.interpolate(places, size, mode="bilinear", align_corners=False, antialias=True).to(self.positions)
        return self.head(self.encoder(self.codes(tokens.to(self.positions.device)) + places.flatten(2).mT))
