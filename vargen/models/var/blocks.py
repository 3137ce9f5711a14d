"""Layers of a next-scale transformer: blocks with adaptive layer norm, their modulation, and the key/value cache.

Shape suffixes: R rows (images; twice as many under guidance), P caption rows, L image tokens of all scales, T tokens of one
pass, D width, H heads, K head width.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vargen.kernels.host import is_hooked
from vargen.models.attention import attend
from vargen.models.storage import read_weight

_NORM_EPS = 1e-6
_SHORTEST = 1e-12  # minimum norm of a query or key that is normalized
MOST_SHARPNESS = math.log(100)  # maximum of a head's log scale of unit queries


@dataclass(frozen=True)
class Modulation:
    """Parameters of adaptive layer norms. They depend only on the label or caption, so they are computed once per image.

    Attributes:
        blocks: `[depth, 6, R, 1, D]`: gains of attention and feed-forward, scales (1 already added), shifts.
        head: `[2, R, 1, D]`: scale (1 already added) and shift of the final norm.
    """

    blocks: Tensor
    head: Tensor

    def select_rows(self, chosen: slice) -> Modulation:
        """Return a view of a slice of the rows."""
        return Modulation(self.blocks[:, :, chosen], self.head[:, chosen])


class ScaleCache:
    """Static keys and values of every layer, `[depth, R, H, P + L, K]`, and the number of cached scales.

    Keys and values of a scale depend on its *input*, which earlier scales determine, not on the tokens sampled at it. So
    rollback to a scale only sets `scale`.

    Attributes:
        scale: number of cached scales.
        modulation: modulation of the rows, from the first pass on.
        prefix_mask: bool `[R, P]`, valid caption rows.
    """

    def __init__(
        self,
        depth: int,
        rows: int,
        heads: int,
        head_dim: int,
        *,
        prefix: int,
        tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        shape = (depth, rows, heads, prefix + tokens, head_dim)
        self.rows, self.prefix, self.tokens = rows, prefix, tokens
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.scale = 0
        self.modulation: Modulation | None = None
        self.prefix_mask: Tensor | None = None

    def select_rows(self, chosen: slice) -> ScaleCache:
        """Return a slice of the rows as a cache with shared memory and its own `scale`."""
        part = copy.copy(self)
        part.k, part.v = self.k[:, chosen], self.v[:, chosen]
        part.rows = part.k.shape[1]
        part.modulation = self.modulation and self.modulation.select_rows(chosen)
        part.prefix_mask = None if self.prefix_mask is None else self.prefix_mask[chosen]
        return part

    def keep(self, modulation: Modulation, mask: Tensor | None) -> None:
        """Keep the modulation and the caption mask of new images, in the memory of those before."""
        if self.modulation is None:
            self.modulation = Modulation(modulation.blocks.clone(), modulation.head.clone())
            self.prefix_mask = None if mask is None else mask.clone()
            return
        self.modulation.blocks.copy_(modulation.blocks)
        self.modulation.head.copy_(modulation.head)
        if mask is not None and self.prefix_mask is not None:
            self.prefix_mask.copy_(mask)

    def layer(self, layer: int, start: int) -> LayerView:
        """Return what a pass that starts at slot `start` reads and writes of a layer."""
        return LayerView(self.k[layer], self.v[layer], start)


class LayerView:
    """Keys and values of a layer, `[R, H, P + L, K]`. Blocks get this and not their number: code is compiled once for all."""

    def __init__(self, k: Tensor, v: Tensor, start: int):
        self.k, self.v, self.start = k, v, start

    def write(self, k_RHTK: Tensor, v_RHTK: Tensor) -> tuple[Tensor, Tensor]:
        """Write a pass, and return the keys and values up to its end."""
        end = self.start + k_RHTK.shape[2]
        self.k[:, :, self.start : end] = k_RHTK
        self.v[:, :, self.start : end] = v_RHTK
        return self.k[:, :, :end], self.v[:, :, :end]


class VARAttention(nn.Module):
    """Attention with fused projections and no key bias. `l2_norm`: unit queries and keys, with a learned scale per head."""

    zero_k_bias: Tensor

    def __init__(self, dim: int, n_head: int, l2_norm: bool):
        super().__init__()
        self.n_head, self.head_dim, self.l2_norm = n_head, dim // n_head, l2_norm
        if l2_norm:
            self.scale_mul_1H11 = nn.Parameter(torch.full((1, n_head, 1, 1), math.log(4.0)))
        self.mat_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("zero_k_bias", torch.zeros(dim), persistent=False)
        self.proj = nn.Linear(dim, dim)

    def product(self, x_RTD: Tensor, first: int = 0, last: int = 3) -> Tensor:
        """Return some of the queries (0), keys (1) and values (2), `[R, T, last - first, H, K]`, before the norm."""
        bias = torch.cat([self.q_bias, self.zero_k_bias.type_as(self.q_bias), self.v_bias])
        rows = slice(first * len(self.q_bias), last * len(self.q_bias))
        if type(self.mat_qkv) is nn.Linear and not is_hooked(self.mat_qkv):
            weight = self.mat_qkv.weight
            if last - first < 3:  # weights of torchao's formats are not indexed for nothing
                weight, bias = weight[rows], bias[rows]
            fused = F.linear(x_RTD, weight, bias)
        else:  # also an adapter's layer
            fused = self.mat_qkv(x_RTD).add_(bias)[..., rows]
        return fused.unflatten(-1, (last - first, self.n_head, self.head_dim))

    def project(self, x_RTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scaled queries, keys and values, `[R, H, T, K]`."""
        fused = self.product(x_RTD)
        q, k, v = fused.permute(2, 0, 3, 1, 4)
        if self.l2_norm:
            q, k = to_unit(fused[:, :, :2]).permute(2, 0, 3, 1, 4)
            q = q * self.scale_mul_1H11.clamp_max(MOST_SHARPNESS).exp()
        else:
            q = q * (0.25 / math.sqrt(self.head_dim))
        return q.type_as(v), k.type_as(v), v

    def forward(self, x_RTD: Tensor, visible: Tensor | None, cache: LayerView | None) -> Tensor:
        q, k, v = self.project(x_RTD)
        if cache is not None:
            k, v = cache.write(k, v)
        visible = None if visible is None else visible.type_as(q)
        out = attend(q, k, v, visible, scale=1.0)
        return self.proj(out.transpose(1, 2).flatten(2))


def to_unit(x: Tensor) -> Tensor:
    """Normalize vectors `[..., K]` to length 1, float32."""
    x = x.float()
    return x / x.norm(dim=-1, keepdim=True).clamp_min(_SHORTEST)


class GELUMLP(nn.Module):
    """Feed-forward: two linear layers with a GELU, in its tanh form, between them."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class VARBlock(nn.Module):
    """Attention and feed-forward with adaptive norms, whose modulation has its own weights or an offset to shared ones."""

    def __init__(self, dim: int, n_head: int, hidden: int, l2_norm: bool, shared: bool):
        super().__init__()
        self.attn = VARAttention(dim, n_head, l2_norm)
        self.ffn = GELUMLP(dim, hidden)
        if shared:
            self.ada_gss = nn.Parameter(torch.zeros(1, 1, 6, dim))
        else:
            self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, modulation: Tensor, visible: Tensor | None, cache: LayerView | None = None) -> Tensor:
        """Run on `[R, T, D]`, with modulation `[6, R, 1, D]` and an additive attention bias `[T, S]` or `[R, 1, T, S]`."""
        gain1, gain2, scale1, scale2, shift1, shift2 = modulation.unbind(0)
        attended = self.attn(modulate(x, scale1, shift1), visible, cache)
        x = torch.addcmul(x, gain1, attended.type_as(x))
        return torch.addcmul(x, gain2, self.ffn(modulate(x, scale2, shift2)).type_as(x))


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Apply layer norm without weights, times `scale` (1 already added), plus `shift`."""
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=_NORM_EPS), scale)


def make_modulation(
    vector_RD: Tensor, blocks: nn.ModuleList, head_nm: nn.ModuleDict, shared: nn.Module | None = None
) -> Modulation:
    """Compute the modulation from condition vectors, by one network for all blocks, `shared`, or by one for each."""
    if shared is not None:
        offsets = torch.stack([read_weight(block, "ada_gss").view(1, 6, -1) for block in blocks])
        found = shared(vector_RD).unflatten(-1, (6, -1)) + offsets
    else:
        found = torch.stack([block.ada_lin(vector_RD).unflatten(-1, (6, -1)) for block in blocks])
    plain = found.new_zeros(6, 1, 1)
    plain[2:4] = 1
    found = found.permute(0, 2, 1, 3) + plain  # [depth, 6, R, D]
    scale, shift = head_nm["ada_lin"](vector_RD).chunk(2, dim=-1)
    return Modulation(found[:, :, :, None], torch.stack([scale + 1, shift])[:, :, None])


def make_caption_mlp(width_in: int, width: int) -> nn.Sequential:
    """Two linear layers with a GELU between them, from caption features `[..., width_in]` to the network's width."""
    return nn.Sequential(nn.Linear(width_in, width), nn.GELU(approximate="tanh"), nn.Linear(width, width))
