"""Counter-based noise: a function of (image seed, position, purpose, pass), never a stream that is consumed in order.

So a row of a batch draws what the image alone would draw, and a drafted token and the same token drawn later share their noise.
Keys are mixed by SplitMix64 (Steele, Lea & Flood 2014), the many draws of a key by the 32-bit mixer with Wellons' constants
(lowbias32), which is several times cheaper than 64-bit mixing on a CPU. Integer arithmetic wraps alike on every device.

Shape suffixes: B images, T positions, V vocabulary.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from vargen.kernels.categorical import categorical
from vargen.kernels.dispatch import eager_on_cpu, ordinary_tensors


class Purpose(IntEnum):
    """What a draw is for; draws of different purposes are independent."""

    TOKEN = 0  # the image's own noise: the same in every pass
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3
    REDRAW_ACCEPT = 4
    REDRAW = 5
    CHOICE = 6


def _signed(value: int, bits: int = 64) -> int:
    """The two's complement integer of the low bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >= 1 << (bits - 1) else value


_ALL = (1 << 64) - 1
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)
_GOLDEN32 = _signed(0x9E3779B9, 32)
_LOW1 = _signed(0x7FEB352D, 32)
_LOW2 = _signed(0x846CA68B, 32)
_UNIT = 2.0**-31 * (1 - 2.0**-24)  # times 31 bits plus a half: in (0, 1), never 1 after rounding


def _shift_(z: Tensor, bits: int) -> Tensor:
    """z ^ (z >>> bits); shifts of signed integers carry the sign, hence the mask."""
    width = 64 if z.dtype == torch.int64 else 32
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (width - bits)) - 1))


def _mix_(z: Tensor) -> Tensor:
    _shift_(z, 30).mul_(_MIX1)
    _shift_(z, 27).mul_(_MIX2)
    return _shift_(z, 31)


def _keys(seeds: Tensor, position: Tensor, purpose: int, step: int = 0) -> Tensor:
    """int64 `[B, T]`, one independent stream each."""
    stream = _signed(_GOLDEN * (int(purpose) + 1 + 64 * step))
    if _in_numpy(seeds):
        return _keys_numpy(seeds.numpy(), position.numpy(), stream)
    key = _mix_(seeds + stream)
    return _mix_(key[:, None] + (position + 1) * _GOLDEN)


def _keys_numpy(seeds: np.ndarray, position: np.ndarray, stream: int) -> Tensor:
    key = _mix_numpy_(seeds.astype(np.uint64) + np.uint64(stream & _ALL))
    keys = _mix_numpy_(key[:, None] + (position.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN & _ALL))
    return torch.from_numpy(keys.view(np.int64))


def _lane_bits(keys: Tensor, vocab: int) -> Tensor:
    """int32 `[B, T, V]` of keys `[B, T]`: V draws each."""
    lanes = _lanes(vocab, keys.device)
    if _in_numpy(keys):
        return _lane_bits_numpy(keys.numpy(), lanes.numpy())
    low, high = keys[..., None].to(torch.int32), (keys[..., None] >> 32).to(torch.int32)  # both wrap to their low 32 bits
    z = _shift_(lanes + low, 16).mul_(_LOW1).bitwise_xor_(high)
    return _shift_(_shift_(z, 15).mul_(_LOW2), 16)


def _lane_bits_numpy(keys: np.ndarray, lanes: np.ndarray) -> Tensor:
    halves = np.ascontiguousarray(keys).view(np.uint32).reshape(*keys.shape, 2)
    z = lanes.view(np.uint32) + halves[..., :1]
    z ^= z >> np.uint32(16)
    z *= np.uint32(_LOW1 & 0xFFFFFFFF)
    z ^= halves[..., 1:]
    z ^= z >> np.uint32(15)
    z *= np.uint32(_LOW2 & 0xFFFFFFFF)
    z ^= z >> np.uint32(16)
    return torch.from_numpy(z.view(np.int32))


def _in_numpy(keys: Tensor) -> bool:
    """On a CPU NumPy mixes the same bits: its small operations cost a fifth of torch's, and it has unsigned shifts."""
    return sys.byteorder == "little" and eager_on_cpu(keys)


def _mix_numpy_(z: np.ndarray) -> np.ndarray:
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MIX1 & _ALL)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX2 & _ALL)
    z ^= z >> np.uint64(31)
    return z


def _unit_(bits: Tensor) -> Tensor:
    """31 low bits to float32 in (0, 1): fine near 0, where the smallest exponential wins a race."""
    return bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).mul_(_UNIT).add_(_UNIT / 2)


def uniform(seeds: Tensor, position: Tensor, purpose: Purpose, step: int = 0) -> Tensor:
    """float32 `[B, T]` in (0, 1), of seeds int64 `[B]` and positions int64 `[B, T]`."""
    keys = _keys(seeds, position, purpose, step)
    if _in_numpy(keys):
        bits = (keys.numpy().view(np.uint64) >> np.uint64(32)) & np.uint64(0x7FFFFFFF)
        return torch.from_numpy(bits.astype(np.float32) * np.float32(_UNIT) + np.float32(_UNIT / 2))
    return _unit_(keys >> 32)


def coins(seeds: Tensor, position: Tensor, purpose: Purpose, step: int = 0) -> Tensor:
    """float64 `[B, T]` in (0, 1), of 52 bits: fine enough to choose among any number of tokens."""
    keys = _keys(seeds, position, purpose, step)
    if _in_numpy(keys):
        return torch.from_numpy(((keys.numpy().view(np.uint64) >> np.uint64(12)) + 0.5) * 2.0**-52)
    return ((keys >> 12).bitwise_and_((1 << 52) - 1).to(torch.float64) + 0.5) * 2.0**-52


def exponential(seeds: Tensor, position: Tensor, vocab: int, purpose: Purpose = Purpose.TOKEN, step: int = 0) -> Tensor:
    """Exponential(1) noise, float32 `[B, T, V]` > 0; its negative logarithm is standard Gumbel noise."""
    bits = _lane_bits(_keys(seeds, position, purpose, step), vocab)
    return _unit_(bits).neg_().log1p_().neg_()


@lru_cache(maxsize=8)
@ordinary_tensors()
def _lanes(vocab: int, device: torch.device) -> Tensor:
    """int32 `[V]`, far apart; never changed in place."""
    return torch.arange(1, vocab + 1, dtype=torch.int32, device=device).mul_(_GOLDEN32)


def race(
    probs: Tensor, seeds: Tensor, position: Tensor, purpose: Purpose = Purpose.TOKEN, step: int = 0
) -> Tensor:
    """Draw int64 `[B, T]` tokens from probabilities `[B, T, V]`: argmax of p / E, which is the Gumbel argmax of log p + G.

    Probabilities need not sum to 1. A token of probability 0 is never drawn. NaN gives a meaningless index: guard the logits.
    """
    return (probs / exponential(seeds, position, probs.shape[-1], purpose, step)).argmax(-1)


@dataclass(frozen=True)
class Noise:
    """The coins of one pass.

    Every pass has its own, but for `Purpose.TOKEN`, which belongs to the image: what it draws at a position depends on the
    probabilities there and on nothing that was drafted.

    Attributes:
        seeds: int64 `[B]`.
        position: int64 `[B, T]`, grid position of the token that follows each fed slot.
        step: number of the pass.
    """

    seeds: Tensor
    position: Tensor
    step: int = 0

    def uniform(self, purpose: Purpose) -> Tensor:
        """float32 `[B, T]` in (0, 1)."""
        return uniform(self.seeds, self.position, purpose, 0 if purpose == Purpose.TOKEN else self.step)

    def draw(self, probs: Tensor, purpose: Purpose) -> Tensor:
        """int64 `[B, T]`, drawn from probabilities `[B, T, V]`, which need not sum to 1.

        Only the image's own noise is raced, so that like probabilities draw like tokens in every pass; others take one coin.
        """
        if purpose == Purpose.TOKEN:
            return race(probs, self.seeds, self.position)
        return categorical(probs, coins(self.seeds, self.position, purpose, self.step))

    def at(self, slot: Tensor) -> Noise:
        """The noise of one slot `[B]` of each image: T = 1."""
        return Noise(self.seeds, self.position.gather(1, slot[:, None]), self.step)
