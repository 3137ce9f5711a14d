"""Layers of a causal video transformer, with Wan2.1's parameter names.

Source: Wan Team 2025, "Wan" (arXiv:2503.20314); Huang et al. 2025, "Self Forcing" (arXiv:2506.08009) for the cached form.

Shape suffixes: B rows, F frames, N tokens of a frame, T = F * N, H heads, K head width, D width, P rows of text.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vargen.models.attention import attend
from vargen.models.causal_video.cache import LayerCache, LayerTextCache

_ROPE_BASE = 10000.0
_EPS = 1e-6


def split_rotary_dims(head_dim: int) -> tuple[int, int, int]:
    """Split the head width into rotary dimensions of time, height and width: 44, 42 and 42 for a width of 128."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


@lru_cache(maxsize=8)
def build_rotary_3d(
    head_dim: int, start: int, frames: int, rows: int, columns: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rotary cosines and sines, float32 `[T, 1, K / 2]`, of frames from `start` on. Positions are absolute and unbounded."""
    with torch.inference_mode(False):  # otherwise a table built during generation could not be used in training
        turns = []
        grid = torch.meshgrid(
            torch.arange(start, start + frames, dtype=torch.float64),
            torch.arange(rows, dtype=torch.float64),
            torch.arange(columns, dtype=torch.float64),
            indexing="ij",
        )
        for place, width in zip(grid, split_rotary_dims(head_dim), strict=True):
            rates = _ROPE_BASE ** -(torch.arange(0, width, 2, dtype=torch.float64) / max(width, 1))
            turns.append(place.flatten()[:, None] * rates)
        angles = torch.cat(turns, 1)[:, None]
        return angles.cos().float().to(device), angles.sin().float().to(device)


def apply_rotary(x_BTHK: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate neighboring pairs of numbers by the angles of `build_rotary_3d`."""
    cos, sin = table
    a, b = x_BTHK.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).type_as(x_BTHK)


class WanRMSNorm(nn.Module):
    """RMS norm over all heads jointly."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), _EPS).type_as(x)


class WanAttention(nn.Module):
    """Attention projections, with norms over the full width of queries and keys."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = WanRMSNorm(dim), WanRMSNorm(dim)

    def split(self, x_BTD: Tensor) -> Tensor:
        """Split the width into heads: `[B, T, H, K]`."""
        return x_BTD.unflatten(-1, (self.heads, -1))

    def project_out(self, x_BHTK: Tensor) -> Tensor:
        """Merge the heads and project to `[B, T, D]`."""
        return self.o(x_BHTK.transpose(1, 2).flatten(2))


Plan = list[tuple[slice, list[slice]]]


def plan_attention(seen: Tensor, tokens: int) -> Plan:
    """Convert an attention mask of frames to slices: for each run of frames with equal rows, its tokens and the visible tokens.

    A mask over all pairs of tokens would take two to four times the arithmetic, and would rule out fused attention.

    Args:
        seen: bool `[F, G]`, whether the frame of a row attends to the frame of a column.
        tokens: per frame.
    """
    plan: Plan = []
    rows = seen.tolist()
    first = 0
    for row in range(1, len(rows) + 1):
        if row < len(rows) and rows[row] == rows[first]:
            continue
        runs: list[slice] = []
        for column, visible in enumerate(rows[first]):
            if visible and runs and runs[-1].stop == column * tokens:
                runs[-1] = slice(runs[-1].start, (column + 1) * tokens)
            elif visible:
                runs.append(slice(column * tokens, (column + 1) * tokens))
        plan.append((slice(first * tokens, row * tokens), runs))
        first = row
    return plan


def attend_with_plan(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, plan: Plan | None) -> Tensor:
    """Attention `[B, H, T, K]` by a plan; without one, all tokens are visible."""
    if plan is None:
        return attend(q_BHTK, k_BHSK, v_BHSK, None)
    parts = []
    for rows, runs in plan:
        k, v = (x[:, :, runs[0]] if len(runs) == 1 else torch.cat([x[:, :, run] for run in runs], 2) for x in (k_BHSK, v_BHSK))
        parts.append(attend(q_BHTK[:, :, rows], k, v, None))
    return torch.cat(parts, 2)


class SelfAttention(WanAttention):
    """Attention of the tokens of a pass to themselves and, with a cache, to earlier frames; rotary positions in three axes."""

    def forward(self, x_BTD: Tensor, table: tuple[Tensor, Tensor], plan: Plan | None, cache: LayerCache | None) -> Tensor:
        q, k, v = self.split(self.norm_q(self.q(x_BTD))), self.split(self.norm_k(self.k(x_BTD))), self.split(self.v(x_BTD))
        q, k, v = apply_rotary(q, table).transpose(1, 2), apply_rotary(k, table).transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.write(k, v)
        return self.project_out(attend_with_plan(q, k, v, plan))


class CrossAttention(WanAttention):
    """Attention to the rows of a prompt, whose keys and values are computed once; see `TextCache`."""

    def project_kv(self, text_BPD: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values `[B, H, P, K]` of a prompt."""
        k, v = self.split(self.norm_k(self.k(text_BPD))), self.split(self.v(text_BPD))
        return k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, x_BTD: Tensor, text: LayerTextCache) -> Tensor:
        k, v, bias = text
        q = self.split(self.norm_q(self.q(x_BTD))).transpose(1, 2)
        bias = None if bias is None else bias.type_as(q)
        return self.project_out(attend(q, k.type_as(q), v.type_as(q), bias))


class CausalVideoBlock(nn.Module):
    """Self-attention, cross-attention and feed-forward. Self-attention and feed-forward are modulated per frame."""

    def __init__(self, dim: int, ffn_dim: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=_EPS, elementwise_affine=False)
        self.self_attn = SelfAttention(dim, heads)
        self.norm3 = nn.LayerNorm(dim, eps=_EPS)
        self.cross_attn = CrossAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=_EPS, elementwise_affine=False)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(ffn_dim, dim))
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def forward(
        self,
        x_BTD: Tensor,
        steps_BF6D: Tensor,
        text: LayerTextCache,
        table: tuple[Tensor, Tensor],
        plan: Plan | None,
        cache: LayerCache | None,
    ) -> Tensor:
        """Run on tokens, with the modulation of the frames' timesteps, and attention by a plan of `plan_attention`."""
        frames = steps_BF6D.shape[1]
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.modulation + steps_BF6D).type_as(x_BTD).unsqueeze(3).unbind(2)
        attended = self.self_attn(modulate_frames(self.norm1(x_BTD), shift1, scale1), table, plan, cache)
        x = apply_gate(x_BTD, attended, gate1, frames)
        x = x + self.cross_attn(self.norm3(x), text).type_as(x)
        return apply_gate(x, self.ffn(modulate_frames(self.norm2(x), shift2, scale2)), gate2, frames)


def modulate_frames(x_BTD: Tensor, shift_BF1D: Tensor, scale_BF1D: Tensor) -> Tensor:
    """x (1 + scale) + shift, with scale and shift per frame."""
    by_frame = x_BTD.unflatten(1, (scale_BF1D.shape[1], -1))
    return torch.addcmul(shift_BF1D, by_frame.type_as(shift_BF1D), 1 + scale_BF1D).flatten(1, 2)


def apply_gate(x_BTD: Tensor, update_BTD: Tensor, gate_BF1D: Tensor, frames: int) -> Tensor:
    """x + gate * update, with a gate per frame."""
    of_frames = (1, (frames, -1))
    return torch.addcmul(x_BTD.unflatten(*of_frames), update_BTD.type_as(x_BTD).unflatten(*of_frames), gate_BF1D).flatten(1, 2)


class ModulatedHead(nn.Module):
    """Final norm, modulated per frame, and projection to patches."""

    def __init__(self, dim: int, out: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=_EPS, elementwise_affine=False)
        self.head = nn.Linear(dim, out)
        self.modulation = nn.Parameter(torch.randn(1, 2, dim) / dim**0.5)

    def forward(self, x_BTD: Tensor, step_BFD: Tensor) -> Tensor:
        shift, scale = (self.modulation + step_BFD[:, :, None]).type_as(x_BTD).unsqueeze(3).unbind(2)
        return self.head(modulate_frames(self.norm(x_BTD), shift, scale))


def timestep_embedding(positions: Tensor, width: int) -> Tensor:
    """Sinusoidal embedding of positions `[...]`: cosines, then sines, in float64, returned as float32 `[..., width]`."""
    half = width // 2
    rates = _ROPE_BASE ** -(torch.arange(half, dtype=torch.float64, device=positions.device) / half)
    angles = positions.double()[..., None] * rates
    return torch.cat([angles.cos(), angles.sin()], -1).float()
