"""Layers of Infinity, and its key/value cache.

Attention projections, feed-forward, adaptive norms and the cache of scales are VAR's (`vargen.models.var.blocks`), rotation is
LlamaGen's. Own are the rotary positions of a pass, attention to the text, and that the keys of the last scale are not kept.

Shape suffixes: R rows (images; twice as many under guidance), P text rows, L image tokens of all scales, T tokens of one pass,
S keys, D width, H heads, K head width, E width of the text features.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vargen.models.attention import attend
from vargen.models.infinity.schedules import ScalePlan
from vargen.models.llamagen.blocks import Rotary, build_rotary, rotate_
from vargen.models.storage import read_weight
from vargen.models.var.blocks import (
    GELUMLP,
    MOST_SHARPNESS,
    LayerView,
    ScaleCache,
    VARAttention,
    modulate,
    to_unit,
)

_NORM_EPS = 1e-6


class InfinityCache(ScaleCache):
    """Keys and values of every layer: of the tokens of all scales but the last, and of the text, `[depth, R, H, P, K]`.

    No pass reads the keys of the last scale, nearly half of all tokens, so they are not kept. Those of the text are computed
    once per image.

    Args:
        shape: depth, R, heads and head width.
        text: number of text rows P.

    Attributes:
        ends: number of tokens before each scale, and of all.
        rotary: float32 `[L, K/2, 2]`. levels: scale of each token, int64 `[L]`.
        prefix_mask: bool `[R, P]`, valid text rows.
    """

    def __init__(
        self,
        plan: ScalePlan,
        shape: tuple[int, int, int, int],
        *,
        text: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(*shape, prefix=0, tokens=plan.cached_tokens, dtype=dtype, device=device)
        self.ends, self.levels = (0, *plan.ends), plan.levels(device)
        self.rotary = build_rotary(plan.positions(), shape[-1]).to(device)
        texts = (*shape[:3], text, shape[3])
        self.text_k, self.text_v = (torch.zeros(texts, dtype=dtype, device=device) for _ in range(2))

    def select_rows(self, chosen: slice) -> InfinityCache:
        part = copy.copy(super().select_rows(chosen))
        assert isinstance(part, InfinityCache)
        part.text_k, part.text_v = self.text_k[:, chosen], self.text_v[:, chosen]
        return part

    def layer(self, layer: int, start: int) -> LayerView:
        return UnkeptLayerView(self.k[layer], self.v[layer], start)


class UnkeptLayerView(LayerView):
    """Keys and values of a layer with room for all scales but the last, whose own are added behind for its pass alone."""

    def write(self, k_RHTK: Tensor, v_RHTK: Tensor) -> tuple[Tensor, Tensor]:
        kept = min(k_RHTK.shape[2], self.k.shape[2] - self.start)
        k, v = super().write(k_RHTK[:, :, :kept], v_RHTK[:, :, :kept])
        if kept == k_RHTK.shape[2]:
            return k, v
        return torch.cat([k, k_RHTK[:, :, kept:]], dim=2), torch.cat([v, v_RHTK[:, :, kept:]], dim=2)


class RotaryAttention(VARAttention):
    """VAR's attention with unit queries and keys, which are rotated by their positions after that.

    Both steps are calls of the module, because hooks that offload its weights load them for calls.
    """

    def forward(  # type: ignore[override]
        self, x_RTD: Tensor, rotary: Rotary, keys: Any = None, visible: Tensor | None = None
    ) -> Any:
        """Return keys and values `[R, H, T, K]` of tokens; or, given those to attend to, the attention `[R, T, D]`."""
        if keys is None:
            k, v = self.product(x_RTD, 1, 3).unbind(2)
            k = to_unit(k)
            rotate_(k, rotary)
            return k.type_as(v).transpose(1, 2), v.transpose(1, 2)
        k, v = keys
        sharpness = self.scale_mul_1H11.float().clamp_max(MOST_SHARPNESS).exp()
        q = to_unit(self.product(x_RTD, 0, 1)[:, :, 0]) * sharpness.view(self.n_head, 1)
        rotate_(q, rotary)
        out = attend(q.type_as(v).transpose(1, 2), k, v, visible, scale=1.0)
        return self.proj(out.transpose(1, 2).flatten(2))


class TextKeys(nn.Module):
    """Base of attention to a text: keys and values of its rows, and the layer after the attention."""

    def __init__(self, text_dim: int, dim: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.mat_kv = nn.Linear(text_dim, 2 * dim, bias=False)
        self.v_bias = nn.Parameter(torch.zeros(dim))
        self.proj = nn.Linear(dim, dim)

    def keys(self, text_RPE: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values `[R, H, P, K]`."""
        k, v = self.mat_kv(text_RPE).chunk(2, dim=-1)
        return tuple(part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in (k, v + self.v_bias))


class TextAttention(TextKeys):
    """Attention of image tokens to the text, whose keys and values are computed once per image."""

    def __init__(self, dim: int, n_head: int):
        super().__init__(dim, dim, n_head)
        self.mat_q = nn.Linear(dim, dim)

    def forward(self, x_RTD: Tensor, keys: Any = None, mask: Tensor | None = None) -> Any:
        """Return keys and values of text `[R, P, D]`; or, given those, the attention `[R, T, D]` of image tokens to them."""
        if keys is None:
            return self.keys(x_RTD)
        q = self.mat_q(x_RTD).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
        return self.proj(attend(q, *keys, mask).transpose(1, 2).flatten(2))


class TextPool(TextKeys):
    """Pools text features to one vector by a learned query."""

    def __init__(self, text_dim: int, dim: int):
        heads = max(1, text_dim // (128 if dim <= 4096 else 64))  # official rule
        if dim % heads:
            raise ValueError(f"dim must be divisible by the {heads} heads that pool caption_dim {text_dim}, got {dim}")
        super().__init__(text_dim, dim, heads)
        self.mat_q = nn.Parameter(torch.zeros(1, heads, dim // heads))

    def forward(self, text_RPE: Tensor, mask: Tensor | None) -> Tensor:
        """Return `[R, D]`; mask bool `[R, 1, 1, P]`."""
        k, v = self.keys(text_RPE)
        q = self.mat_q.to(k.dtype).expand(len(k), -1, -1)[:, :, None]
        return self.proj(attend(q, k, v, mask).flatten(1))


class InfinityBlock(nn.Module):
    """Self-attention, attention to the text and feed-forward; the first and the last with adaptive norms and gains."""

    def __init__(self, dim: int, n_head: int, hidden: int):
        super().__init__()
        self.sa = RotaryAttention(dim, n_head, l2_norm=True)
        self.ca = TextAttention(dim, n_head)
        self.ca_norm = nn.LayerNorm(dim, eps=_NORM_EPS)
        self.ffn = GELUMLP(dim, hidden)
        self.ada_gss = nn.Parameter(torch.zeros(1, 1, 6, dim))

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        cache: LayerView,
        text: tuple[Tensor, Tensor],
        mask: Tensor | None,
        rotary: Rotary,
        visible: Tensor | None = None,
        tile: int | None = None,
    ) -> Tensor:
        """Run on `[R, T, D]`, float32, with modulation float32 `[6, R, 1, D]`.

        Args:
            text, mask: keys and values of the text `[R, H, P, K]`, and which are valid, bool `[R, 1, 1, P]`.
            visible: keys that each token attends to, bool `[T, S]`; None: all.
            tile: number of tokens that are queries at a time, which bounds all temporaries but keys and values.
        """
        gain1, gain2, scale1, scale2, shift1, shift2 = modulation.unbind(0)
        dtype = self.ada_gss.dtype
        h = modulate(x, scale1, shift1).to(dtype)
        keys = cache.write(*self.sa(h, rotary))
        weight, bias = (read_weight(self.ca_norm, name).float() for name in ("weight", "bias"))
        done, tiles = [], [slice(None)]
        if tile is not None:
            tiles = [slice(first, first + tile) for first in range(0, x.shape[1], tile)]
        for part in tiles:
            turned = rotary[part] if isinstance(rotary, Tensor) else (rotary[0][part], rotary[1][part])
            attended = self.sa(h[:, part], turned, keys, None if visible is None else visible[part])
            y = torch.addcmul(x[:, part], gain1, attended.float())
            normed = F.layer_norm(y, y.shape[-1:], weight, bias, _NORM_EPS)
            y = y + self.ca(normed.to(dtype), text, mask).float()
            done.append(torch.addcmul(y, gain2, self.ffn(modulate(y, scale2, shift2).to(dtype)).float()))
        return done[0] if len(done) == 1 else torch.cat(done, dim=1)
