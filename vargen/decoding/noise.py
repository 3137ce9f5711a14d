"""Counter-based noise: a function of (image seed, position, purpose), never a stream that is consumed in order.

So a row of a batch draws what the image alone would draw, and a drafted token and the same token drawn later share their noise.
The generator is SplitMix64 (Steele, Lea & Flood 2014) keyed per position; integer arithmetic wraps alike on every device.

Shape suffixes: B images, T positions, V vocabulary.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class Purpose(IntEnum):
    """What a draw is for; draws of different purposes are independent."""

    TOKEN = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def _signed(value: int) -> int:
    """The int64 of the low 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def _shift_(z: Tensor, bits: int) -> Tensor:
    """z ^ (z >>> bits); int64 shifts carry the sign, hence the mask."""
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _mix_(z: Tensor) -> Tensor:
    _shift_(z, 30).mul_(_MIX1)
    _shift_(z, 27).mul_(_MIX2)
    return _shift_(z, 31)


def _keys(seeds: Tensor, position: Tensor, purpose: int) -> Tensor:
    """int64 `[B, T]`, one independent stream each."""
    key = _mix_(seeds + _signed(_GOLDEN * (int(purpose) + 1)))
    return _mix_(key[:, None] + (position + 1) * _GOLDEN)


def _uniform_(bits: Tensor) -> Tensor:
    """32 high bits to float32 in (0, 1]: fine near 0, where the smallest exponential wins a race."""
    return (bits >> 32).bitwise_and_(0xFFFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-32)


def uniform(seeds: Tensor, position: Tensor, purpose: Purpose) -> Tensor:
    """float32 `[B, T]` in (0, 1], of seeds int64 `[B]` and positions int64 `[B, T]`."""
    return _uniform_(_keys(seeds, position, purpose))


def exponential(seeds: Tensor, position: Tensor, vocab: int, purpose: Purpose = Purpose.TOKEN) -> Tensor:
    """Exponential(1) noise, float32 `[B, T, V]` > 0; its negative logarithm is standard Gumbel noise."""
    lanes = torch.arange(1, vocab + 1, device=seeds.device).mul_(_GOLDEN)
    bits = _mix_(_keys(seeds, position, purpose)[..., None] + lanes)
    return _uniform_(bits).neg_().log1p_().neg_()


def race(law: Tensor, seeds: Tensor, position: Tensor, purpose: Purpose = Purpose.TOKEN) -> Tensor:
    """Draw int64 `[B, T]` tokens from laws `[B, T, V]`: argmax of p / E, which is the Gumbel argmax of log p + G.

    A token of probability 0 is never drawn. NaN laws give a meaningless index: guard the logits.
    """
    return (law / exponential(seeds, position, law.shape[-1], purpose)).argmax(-1)
