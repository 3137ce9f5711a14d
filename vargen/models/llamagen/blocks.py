"""Layers of LlamaGen's transformer: rotary embedding, norm, attention, feed-forward and condition embedders.

A pass of one token has about a hundred matrix products and many small operations, which on a CPU take as long as the products.
So the number of operations matters here.

Shape suffixes: B rows (images; twice as many under guidance), T tokens of one pass, S cache slots, D width, H heads, K head
width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vargen.kernels import ops
from vargen.kernels.linear_layout import TransposableWeights
from vargen.kernels.ops import KernelMask
from vargen.models.attention import attend
from vargen.models.kv_cache import KVCache
from vargen.models.storage import QuantizedStorageMixin
from vargen.values import require_int

Rotary = Tensor | tuple[Tensor, Tensor]
# Weights do not determine the grid, and memory of rotary table and cache grows with its area: up to 640 GB for a wrong one.
MAX_GRID = 256


def build_rotary(positions_N2: Tensor, head_dim: int, base: float = 10000.0) -> Tensor:
    """Build the rotary table `[N, K/2, 2]`, float32 (cos, sin): half of the pairs encode rows, half columns."""
    half = head_dim // 2
    frequency = base ** (-torch.arange(0, half, 2).float() / half)
    angles = (positions_N2.float()[..., None] * frequency).flatten(1)
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


def build_rotary_2d(grid: int, head_dim: int, base: float = 10000.0) -> Tensor:
    """Build the rotary table `[grid*grid, K/2, 2]` of a square grid."""
    return build_rotary(torch.cartesian_prod(torch.arange(grid), torch.arange(grid)), head_dim, base)


def rotary_factors(table_TK2: Tensor, compiled: bool = False) -> Rotary:
    """Return the factors for `rotate_`, once per pass: complex numbers `[..., T, 1, K/2]`, one operation per layer.

    The compiler does not support complex numbers, and autograd needs copies for them. With gradients, or if what rotates by
    them is `compiled`, return real factors `[..., T, 1, K]` of a vector and of its swapped pairs.
    """
    if not compiled and not torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return torch.view_as_complex(table_TK2.float())[..., None, :]
    cos, sin = table_TK2.unbind(-1)
    return cos.repeat_interleave(2, dim=-1)[..., None, :], torch.stack([-sin, sin], dim=-1).flatten(-2)[..., None, :]


def rotate_(x_BTHK: Tensor, rotary: Rotary) -> None:
    """Rotate interleaved pairs (x0, x1), (x2, x3), ... in float32, in place."""
    x = x_BTHK.float()
    if not isinstance(rotary, Tensor):
        swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        x_BTHK.copy_(torch.addcmul(x * rotary[0], swapped, rotary[1]))
        return
    x.view(torch.complex64).mul_(rotary)
    if x_BTHK.dtype != torch.float32:
        x_BTHK.copy_(x)


class Linear(nn.Linear):
    """A linear layer without bias."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)


class RMSNorm(nn.Module):
    """RMS norm with a learned weight."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class LlamaGenAttention(nn.Module):
    """Attention with rotary positions. Queries, keys and values are one product; several query heads may share a key head."""

    def __init__(self, dim: int, n_head: int, n_kv_head: int):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = n_head, n_kv_head, dim // n_head
        self.wqkv = Linear(dim, (n_head + 2 * n_kv_head) * self.head_dim)
        self.wo = Linear(dim, dim)

    def project(self, x_BTD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Return rotated queries `[B, T, H, K]`, and rotated keys followed by values `[B, T, 2 G, K]`, of G key heads."""
        qkv = self.wqkv(x_BTD).view(*x_BTD.shape[:2], -1, self.head_dim)
        if qkv.requires_grad:
            qkv = qkv.clone()  # autograd refuses to change parts of a product
        rotate_(qkv[:, :, : self.n_head + self.n_kv_head], rotary)
        return qkv[:, :, : self.n_head], qkv[:, :, self.n_head :]

    def values(self, x_BTD: Tensor) -> Tensor:
        """Return only the values `[B, T, H, K]`, all that a conditioning row contributes."""
        first = self.n_head + self.n_kv_head
        weight = self.wqkv.weight if type(self.wqkv) is Linear else None
        if type(weight) is nn.Parameter and (weight.device, weight.dtype) == (x_BTD.device, x_BTD.dtype):
            return F.linear(x_BTD, weight[first * self.head_dim :]).unflatten(-1, (-1, self.head_dim))
        # Adapted, offloaded, quantized or stored in another dtype: only its module's `forward` computes them.
        return self.wqkv(x_BTD).unflatten(-1, (-1, self.head_dim))[:, :, first:]

    def attend(self, q_BTHK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, bias: Tensor | KernelMask) -> Tensor:
        """Attend and project to `[B, T, D]`; with gradients by the form that autograd supports. `bias`: see `ops.attend`."""
        if torch.is_grad_enabled() and isinstance(bias, Tensor):
            return self.wo(attend(q_BTHK.transpose(1, 2), k_BHSK, v_BHSK, bias).transpose(1, 2).flatten(2))
        return self.wo(ops.attend(q_BTHK, k_BHSK, v_BHSK, bias).flatten(2))


class SwiGLU(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1, self.w3, self.w2 = Linear(dim, hidden), Linear(dim, hidden), Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaGenBlock(nn.Module):
    """Attention and feed-forward over the norm of the residual, to which each adds its output."""

    def __init__(self, dim: int, n_head: int, n_kv_head: int, hidden: int, eps: float, dropout: float):
        super().__init__()
        self.attention = LlamaGenAttention(dim, n_head, n_kv_head)
        self.feed_forward = SwiGLU(dim, hidden)
        self.attention_norm = RMSNorm(dim, eps)
        self.ffn_norm = RMSNorm(dim, eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, rotary: Rotary, visible: Tensor | KernelMask, cache: Any = None) -> Tensor:
        """Run on whole sequences, or on the tokens of a pass, with the `LayerView` of its cache.

        `visible`: which columns each row attends to, bool `[B or 1, 1, T, T]` or `[T, T]`; of a pass, `KVCache.attention_mask`.
        """
        q, kv = self.attention.project(self.attention_norm(x_BTD), rotary)
        k, v = kv.transpose(1, 2).chunk(2, dim=1) if cache is None else cache.write(kv)
        return self.add_residuals(x_BTD, self.attention.attend(q, k, v, visible))

    def add_residuals(self, x_BTD: Tensor, attended_BTD: Tensor) -> Tensor:
        """Add attention output and feed-forward to the residual."""
        if not self.training:  # skips the calls of dropout
            h = x_BTD + attended_BTD
            return h + self.feed_forward(self.ffn_norm(h))
        h = x_BTD + self.dropout(attended_BTD)
        return h + self.dropout(self.feed_forward(self.ffn_norm(h)))


class GridNetwork(TransposableWeights, QuantizedStorageMixin):
    """Base of networks of `LlamaGenBlock` layers over a square grid of tokens.

    Attributes:
        rotary: `[N, K/2, 2]`; float32 for any dtype of the weights, because rounded angles could not be restored.
        ffn_width: width of the feed-forward: 8/3 `dim` times `ffn_dim_multiplier`, rounded up to `multiple_of`.
    """

    rotary: Tensor

    def __init__(self) -> None:
        super().__init__()
        config = self.config
        dim, heads, grid = config.dim, config.n_head, require_int("grid_size", config.grid_size, 1, MAX_GRID)
        if dim % heads or (dim // heads) % 4:
            raise ValueError(f"dim / n_head must be a whole number divisible by 4 (two rotary axes), got {dim} / {heads}")
        hidden = int(2 * (4 * dim) / 3 * (config.ffn_dim_multiplier or 1.0))
        self.ffn_width = config.multiple_of * math.ceil(hidden / config.multiple_of)
        self.register_buffer("rotary", build_rotary_2d(grid, dim // heads, config.rope_base), persistent=False)

    @property
    def tokens(self) -> int:
        """Number of image tokens N of the grid."""
        return self.config.grid_size**2

    def _apply(self, fn: Any, *args: Any, **options: Any) -> Any:
        table = self.rotary
        super()._apply(fn, *args, **options)
        if self.rotary.dtype != table.dtype:
            self.rotary = table.to(self.rotary.device)
        return self

    def run_layers(
        self,
        layers: Sequence[Any] | nn.ModuleList,
        x_BTD: Tensor,
        cache: KVCache,
        positions: Tensor | None,
        ancestors: Tensor | None,
        earlier: int = 0,
    ) -> Tensor:
        """Run layers on the inputs of a pass, without advancing the cache's pointer.

        Args:
            positions: int64 `[T]` or `[B, T]`, grid cells. Default: consecutive from the pointer, after `earlier` ones. Cells
                past the grid are clamped, and their outputs are meaningless.
            ancestors, earlier: see `KVCache.attention_mask`.
        """
        T = x_BTD.shape[1]
        if positions is None:
            positions = cache.positions(T, earlier)
        compiled = layers[0]._compiled_call_impl is not None
        rotary = rotary_factors(self.rotary[positions.clamp(max=self.tokens - 1)], compiled)
        span = cache.view_for_pass(T, earlier)
        bias = cache.attention_mask(T, ancestors, self.config.n_head, span.num_slots_read, earlier)
        for layer, part in zip(layers, span.layers, strict=False):
            x_BTD = layer(x_BTD, rotary, bias, part)
        return x_BTD


class LabelEmbedder(nn.Module):
    """One embedding per class, and a last one for the null class."""

    def __init__(self, num_classes: int, dim: int):
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, dim)

    def forward(self, class_labels: Tensor) -> Tensor:
        return self.embedding_table(class_labels)[:, None]


class CaptionProjection(nn.Module):
    """Maps caption features `[B, P, caption_dim]` to rows `[B, P, D]`, by two linear layers with a GELU between them."""

    def __init__(self, caption_dim: int, dim: int):
        super().__init__()
        self.fc1, self.fc2 = Linear(caption_dim, dim), Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class CaptionEmbedder(nn.Module):
    """Two-layer projection of caption features. The null caption is a persistent buffer, not a parameter."""

    def __init__(self, caption_dim: int, dim: int, cls_token_num: int):
        super().__init__()
        self.cap_proj = CaptionProjection(caption_dim, dim)
        self.register_buffer("uncond_embedding", torch.randn(cls_token_num, caption_dim) / caption_dim**0.5)

    def forward(self, caption_embeds: Tensor) -> Tensor:
        return self.cap_proj(caption_embeds.to(self.cap_proj.fc1.weight.dtype))
