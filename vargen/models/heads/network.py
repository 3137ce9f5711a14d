"""Networks that draft tokens: EAGLE's decoder layer and Medusa's parallel heads on the features of a frozen transformer, and an
up-sampler that predicts high-resolution tokens from a low-resolution image.

Features are hidden states before the target's final norm, from which drafts are far better than from those after it (SSD,
arXiv:2606.20543). Embedding, norm and output layer belong to the target and are not stored here.

Shape suffixes: B images, R rows (images, times two under guidance), T slots, D width, H heads, K head width, h heads of Medusa,
V vocabulary; of the up-sampler r/c rows and columns of the low-resolution grid, R/C of the high one, N = R C.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor, nn

from vargen.kernels.host import normal_tensors
from vargen.kernels.linear_layout import TransposableWeights
from vargen.models.kv_cache import KVCache
from vargen.models.llamagen.blocks import GridNetwork, Linear, LlamaGenBlock
from vargen.models.storage import ModelMixin, QuantizedStorageMixin, read_weight  # noqa: F401
from vargen.values import require_int


class EagleCache(KVCache):
    """A cache that, for drafters that use the row above, also has the target's features by slot, `[R, N + scratch, D]`."""

    seen: Tensor | None = None


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

    def new_cache(self, rows: int, scratch: int, device: torch.device | None = None) -> EagleCache:
        """Create a cache for `rows` rows and at most `scratch` slots per proposal."""
        self.choose_layout(self.fc.weight)
        shape = 1, rows, self.config.n_head, self.layer.attention.head_dim
        place: dict[str, Any] = {"dtype": self.dtype, "device": device or self.device}
        with normal_tensors():
            cache = EagleCache(*shape, prefix=0, tokens=self.tokens, scratch=scratch, **place)
            if self.config.above:
                cache.seen = torch.zeros(rows, self.tokens + scratch, self.config.dim, **place)
        return cache

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


# -- up-sampler ----------------------------------------------------------------------------------------------------------

_ABOVE = (3, 5)  # receptive field at the high resolution: rows above, columns


class _Residual(nn.Module):
    """x + second(silu(first(norm x))), initialized as the identity."""

    def __init__(self, norm: nn.Module, first: nn.Module, second: nn.Module):
        super().__init__()
        self.norm, self.first, self.second = norm, first, second
        for parameter in second.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(self.norm(x))))


def _mix_neighbors(dim: int) -> _Residual:
    return _Residual(nn.GroupNorm(8, dim), nn.Conv2d(dim, 2 * dim, 3, padding=1), nn.Conv2d(2 * dim, dim, 1))


def _mix_channels(dim: int) -> _Residual:
    return _Residual(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim))


class TokenUpsampler(QuantizedStorageMixin, ConfigMixin):
    """Predicts the logits of high-resolution tokens from a low-resolution image and the rows accepted so far.

    It follows MuLo-SD (2026, arXiv 2601.05149), whose up-sampler regresses latents with masked row-causal convolutions. This
    one predicts probabilities, because exact methods need the distribution from which a draft was sampled. It uses the whole
    low-resolution image, and of the high-resolution tokens only the rows above, so a row is drafted in one pass.

    Args:
        low_grid, grid_size: tokens per side at the low and the high resolution; the second is a multiple of the first.
        dim: width, a multiple of 8.
        blocks: number of residual blocks at the low resolution, and of position-wise blocks at the high resolution.
        codes: digest of the tokens' codebook, which must equal that of a model; None if unknown.
    """

    unquantized_suffixes = ("embedding.weight",)
    layer_prefixes: ClassVar[dict[str, tuple[str, ...]]] = {"blocks": ("low.",)}

    @register_to_config
    def __init__(
        self,
        vocab_size: int = 16384,
        low_grid: int = 8,
        grid_size: int = 16,
        dim: int = 128,
        blocks: int = 3,
        weight_format: str | None = None,
        codes: str | None = None,
    ):
        super().__init__()
        if low_grid < 1 or grid_size % low_grid or grid_size == low_grid:
            raise ValueError(f"grid_size must be a multiple of low_grid, got {grid_size} and {low_grid}")
        if dim < 8 or dim % 8:
            raise ValueError(f"dim must be a multiple of 8, got {dim}")
        self.factor = grid_size // low_grid
        self.embedding = nn.Embedding(vocab_size, dim)
        self.place = nn.Parameter(torch.zeros(1, dim, low_grid, low_grid))
        self.low = nn.Sequential(*(_mix_neighbors(dim) for _ in range(blocks)))
        self.up = nn.Conv2d(dim, dim * self.factor**2, 1)
        self.above = nn.Conv2d(dim + 1, dim, _ABOVE, padding=(0, _ABOVE[1] // 2))
        self.high = nn.Sequential(*(_mix_channels(dim) for _ in range(blocks)))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab_size)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.output.weight, std=0.02)
        nn.init.zeros_(self.output.bias)

    def unquantized_dtype(self, name: str) -> torch.dtype:
        return torch.float16 if self.config.weight_format == "int6" and name == "embedding.weight" else torch.float32

    def features(self, low: Tensor) -> Tensor:
        """Compute features `[B, D, R, C]` from low-resolution tokens `[B, r, c]`, once per image."""
        x = self.low(self.embedding(low).movedim(-1, 1) + read_weight(self, "place"))
        return F.pixel_shuffle(self.up(x), self.factor)

    def forward(self, features: Tensor, tokens: Tensor, known: Tensor, position: Tensor | None = None) -> Tensor:
        """Logits `[B, S, V]` of tokens at positions, from the result of `features`.

        Args:
            tokens, known: int64 and bool `[B, N]`; tokens that are not known are ignored.
            position: int64 `[B, S]`; None: all N positions in raster order.
        """
        x = features.flatten(2).movedim(1, 2)
        if position is None:
            seen = self._masked_embedding(tokens, known).movedim(-1, 1).unflatten(2, (-1, features.shape[-1]))
            above = self.above(F.pad(seen[:, :, :-1], (0, 0, _ABOVE[0], 0)))  # row i: i - 3 to i - 1
            x = x + above.flatten(2).movedim(1, 2)
        else:
            x = x.gather(1, position[..., None].expand(-1, -1, x.shape[-1]))
            x = x + self._context_at(tokens, known, features.shape[-1], position)
        return self.output(self.norm(self.high(x)))

    def _context_at(self, tokens: Tensor, known: Tensor, columns: int, position: Tensor) -> Tensor:
        """Features `[B, S, D]` of the rows above the tokens at some positions.

        A pass drafts a few tokens, and a convolution of the whole grid would be most of its arithmetic. No state is kept
        between passes, because no other layer depends on high-resolution tokens."""
        rows, width = _ABOVE
        row, column = (position // columns)[..., None], (position % columns)[..., None]
        tap = torch.arange(rows * width, device=position.device)
        row, column = row - rows + tap // width, column - width // 2 + tap % width
        inside = (row >= 0) & (column >= 0) & (column < columns)
        at = torch.where(inside, row * columns + column, 0)
        near, there = (each.gather(1, at.flatten(1)).view_as(at) for each in (tokens, known))
        seen = self._masked_embedding(near, there & inside)
        weight = read_weight(self.above).permute(2, 3, 1, 0).flatten(0, 2)  # same order of taps and channels as in `seen`
        return seen.flatten(2) @ weight + read_weight(self.above, "bias")

    def _masked_embedding(self, tokens: Tensor, known: Tensor) -> Tensor:
        """Features `[..., D + 1]`: the embedding of a known token (else zero), and whether it is known."""
        known = known[..., None]
        return torch.cat([self.embedding(tokens) * known, known.to(self.embedding.weight.dtype)], dim=-1)
