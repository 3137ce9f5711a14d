"""Passes with 8-bit integer products: their arithmetic, in torch operators.

A pass over T tokens must return bit for bit what T passes over one token return, alone or in a batch, and so must every
implementation of it. So no sum here depends on its order: what is summed are integers, small enough that each partial sum is
exact, and all other operations (`+ - * /`, square root, rounding, maximum) are elementwise and rounded as in IEEE 754, without
fused multiply-adds. `exp` is a polynomial of such operations, because the vector and the scalar form of a library's function
differ in the last bit. `vargen.kernels.int8.passes` computes the same bits with fewer instructions.

Weights have a scale per output channel, inputs one per row (one per tensor would make a row depend on the others), queries,
keys and values one per token and head. The precision of attention is that of bfloat16 or better. Row by row quantization of
weights and inputs follows Dettmers et al. 2022, "LLM.int8()" (arXiv:2208.07339), without their separate outliers.

Shape suffixes: R rows (images; twice as many under guidance), T tokens of one pass, D width, H query heads, G key heads, K head
width, S cache slots, N output channels.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from vargen.kernels.int8.format import (
    EXP_RANGE,
    EXP_TERMS,
    EXP_UNITS,
    INT8_MAX,
    LN_2,
    LOG2_E,
    NORM_MAX,
    TINY,
    WEIGHT_SUM,
    score_limit,
)

_ERF_SLOPE, _ERF_TERMS = 0.3275911, (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def quantize_activations(x: Tensor, limit: int = INT8_MAX, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Quantize each row `[..., D]` with its own scale.

    Returns:
        Integers `[..., D]` from -limit to limit in `dtype`, and float32 scales `[..., 1]`.
    """
    top = x.abs().amax(-1, keepdim=True).clamp_min(TINY)
    return (x * torch.div(_constant(limit, x), top)).round_().to(dtype), top * (1 / limit)


def int8_linear(values: Tensor, scale: Tensor, weight_NK: Tensor, channel_scale_N: Tensor) -> Tensor:
    """Product of quantized rows, int8 `[..., K]`, with a quantized matrix, float32 `[..., N]`. Its sums, int32, are exact."""
    rows = values.reshape(-1, values.shape[-1])
    shape = *values.shape[:-1], len(weight_NK)
    sums = torch._int_mm(rows, weight_NK.t()) if len(rows) else rows.new_zeros(0)
    return sums.view(shape).float().mul_(scale).mul_(channel_scale_N)


def exact_exp(x: Tensor) -> Tensor:
    """exp(x) for float32 from -87 to 87, to which others are clamped; relative error 2e-7 near 0 and 4e-6 at the ends."""
    power = x.clamp(-EXP_RANGE, EXP_RANGE).mul_(LOG2_E)
    whole = power.round()
    rest = power.sub_(whole).mul_(LN_2)
    total = torch.full_like(rest, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        total.mul_(rest).add_(term)
    return total.mul_((whole.to(torch.int32).add_(127) << 23).view(torch.float32))


def exact_rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMS norm of float32 rows `[..., D]`, whose mean square is that of the rows rounded to 16 bits."""
    top = x.abs().amax(-1, keepdim=True).clamp_min(TINY)
    squares = (x * torch.div(_constant(NORM_MAX, x), top)).round_().double().square_().sum(-1, keepdim=True)
    unit = top.double() * (1 / NORM_MAX)
    mean = (squares * unit * unit).mul_(1 / x.shape[-1]).add_(eps)
    return (x * torch.div(_constant(1, mean), mean.sqrt_()).float()).mul_(weight_D)


def exact_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up for float32."""
    return torch.div(gate, exact_exp(-gate).add_(1.0)).mul_(up)


def exact_gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form for float32: x / (1 + exp(-2 y)), y = sqrt(2 / pi) (x + 0.044715 x^3)."""
    cubed = x * x * x
    return torch.div(x, exact_exp((cubed * 0.044715 + x).mul_(-2 * math.sqrt(2 / math.pi))).add_(1.0))


def exact_erf_gelu(x: Tensor) -> Tensor:
    """GELU in its form with erf for float32, to 2e-7: x (1 + erf(x / sqrt(2))) / 2.

    1 - erf is a polynomial times exp(-x^2 / 2), by Abramowitz and Stegun 7.1.26.
    """
    size = x.abs()
    t = torch.div(_constant(1.0, x), size.mul(_ERF_SLOPE * math.sqrt(0.5)).add_(1.0))
    total = torch.full_like(t, _ERF_TERMS[0])
    for term in _ERF_TERMS[1:]:
        total.mul_(t).add_(term)
    tail = total.mul_(t).mul_(exact_exp((size * size).mul_(-0.5))).mul_(0.5)  # of the normal distribution
    return torch.where(x < 0, x * tail, x - x * tail)


def rotate_pairs(x_RTHK: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate interleaved pairs of float32 `[R, T, H, K]` by `[R or 1, T, K / 2, 2]`, two products and one sum each."""
    even, odd = x_RTHK.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_sin[:, :, None].unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def attend_int8(
    q_RTHK: Tensor, k_RGKS: Tensor, k_scale_RGS: Tensor, v_RGSK: Tensor, v_scale_RGS: Tensor, bias: Tensor
) -> Tensor:
    """Attention over quantized keys and values.

    Args:
        q_RTHK: float32, after rotation.
        k_RGKS, v_RGSK: integers, in any dtype; scales float32.
        bias: float32 `[R or 1, 1, T, S]`; -inf hides a slot. Each query must see a slot.

    Returns:
        float32 `[R, T, H, K]`.
    """
    R, T, H, K = q_RTHK.shape
    G, S = k_scale_RGS.shape[1:]
    q, q_scale = quantize_activations(q_RTHK.transpose(1, 2), score_limit(K), torch.float32)
    dots = torch.bmm(q.reshape(R * G, -1, K), k_RGKS.float().reshape(R * G, K, S)).view(R, G, H // G, T, S)
    scores = dots.mul_((q_scale * K**-0.5).view(R, G, H // G, T, 1))
    scores = scores.mul_(k_scale_RGS[:, :, None, None]).add_(bias[:, :, None])
    terms = exact_exp(scores - scores.amax(-1, keepdim=True)).mul_(EXP_UNITS).round_()
    total = terms.sum(-1, keepdim=True, dtype=torch.float64)
    value_scale = v_scale_RGS[:, :, None, None]
    top = torch.where(bias[:, :, None] == -math.inf, 0.0, value_scale).amax(-1, keepdim=True).clamp_min(TINY)
    unit = torch.div(_constant(WEIGHT_SUM, total), total * top.double()).float()
    weights = terms.mul_(value_scale).mul_(unit).round_()
    sums = torch.bmm(weights.view(R * G, -1, S), v_RGSK.float().reshape(R * G, S, K)).view(R, G, H // G, T, K)
    return sums.mul_(top * (1 / WEIGHT_SUM)).view(R, H, T, K).transpose(1, 2)


def guide_rows(features_RTD: Tensor, scale: float | Tensor) -> Tensor:
    """Classifier-free guidance `[R/2, T, D]` of float32 features: u + s (c - u), one operation at a time.

    Where the scale is 1, it is c, to the bit.
    """
    conditional, unconditional = features_RTD.chunk(2)
    guided = (conditional - unconditional).mul_(scale).add_(unconditional)
    return torch.where(torch.as_tensor(scale) == 1, conditional, guided)


def quantize_weight_rows(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a float matrix to int8 with a scale per output channel; returns int8 `[N, K]` and float32 `[N]`."""
    values, scale = quantize_activations(weight_NK.detach().float())
    return values, scale[:, 0]


def regroup_weight_rows(values_NK: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Turn a matrix stored as int8 with scales `[N, groups]` into int8 `[N, K]` and float32 scales of output channels `[N]`."""
    if scale.shape[1] == 1:
        return values_NK, scale[:, 0]
    grouped = values_NK.unflatten(1, (scale.shape[1], -1))
    top = (grouped.abs().amax(-1) * scale).amax(1).clamp_min(TINY)  # |-128| does not occur: quantization is symmetric
    factor = torch.div(scale * INT8_MAX, top[:, None])  # at most 1 where the maximum is reached
    values = (grouped * factor[..., None]).round_().clamp_(-INT8_MAX, INT8_MAX)
    return values.to(torch.int8).flatten(1), top * (1 / INT8_MAX)


@lru_cache
@torch.inference_mode(False)
def _cached_constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def _constant(value: float, like: Tensor) -> Tensor:
    """A number as a tensor, because torch computes `number / tensor` as a product with the reciprocal."""
    return _cached_constant(float(value), like.dtype, like.device)
