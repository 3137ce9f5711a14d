"""Counter-based noise: a function of (image seed, position, purpose, pass), never a stream that is consumed in order.

So a row of a batch draws what the image alone would draw, and a drafted token and the same token drawn later share their noise.
Keys are mixed by SplitMix64 (Steele, Lea & Flood 2014), the many draws of a key by the 32-bit mixer with Wellons' constants
(lowbias32), which is several times cheaper than 64-bit mixing on a CPU. Integer arithmetic wraps alike on every device.

The number of a pass may be a scalar on the device, which a captured pass counts up itself; the coins are the same.

Shape suffixes: B images, T positions, V vocabulary.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from vargen.kernels.categorical import categorical
from vargen.kernels.dispatch import is_eager_cpu, supports_rows
from vargen.modes import normal_tensors


class Purpose(IntEnum):
    """What a draw is for; draws of different purposes are independent."""

    TOKEN = 0  # the image's own noise: the same in every pass
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3
    REDRAW_ACCEPT = 4
    REDRAW = 5
    CHOICE = 6
    LOW_RES = 7  # of the low-resolution picture beside it
    LATENT = 8  # of a block of video: step 0 is what it starts from, step k what is added again before its step k


def _to_signed(value: int, bits: int = 64) -> int:
    """The two's complement integer of the low bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >= 1 << (bits - 1) else value


_ALL = (1 << 64) - 1
_GOLDEN = _to_signed(0x9E3779B97F4A7C15)
_MIX1 = _to_signed(0xBF58476D1CE4E5B9)
_MIX2 = _to_signed(0x94D049BB133111EB)
_GOLDEN32 = _to_signed(0x9E3779B9, 32)
_LOW1 = _to_signed(0x7FEB352D, 32)
_LOW2 = _to_signed(0x846CA68B, 32)
_BRANCH = 1 << 32  # positions apart: more than any grid has
_UNIT = 2.0**-31 * (1 - 2.0**-24)  # times 31 bits plus a half: in (0, 1), never 1 after rounding


def _shift_(z: Tensor, bits: int) -> Tensor:
    """z ^ (z >>> bits); shifts of signed integers carry the sign, hence the mask."""
    width = 64 if z.dtype == torch.int64 else 32
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (width - bits)) - 1))


def _mix_(z: Tensor) -> Tensor:
    _shift_(z, 30).mul_(_MIX1)
    _shift_(z, 27).mul_(_MIX2)
    return _shift_(z, 31)


def _make_keys(seeds: Tensor, position: Tensor, purpose: int, step: int | Tensor = 0) -> Tensor:
    """int64 `[B, T]`, one independent stream each."""
    if isinstance(step, Tensor):  # the same number, wrapped by the device
        key = _mix_(seeds + (step * 64 + (int(purpose) + 1)) * _GOLDEN)
    else:
        stream = _to_signed(_GOLDEN * (int(purpose) + 1 + 64 * step))
        if _use_numpy(seeds):
            return _keys_numpy(seeds.numpy(), position.numpy(), stream)
        key = _mix_(seeds + stream)
    return _mix_(key[:, None] + (position + 1) * _GOLDEN)


def _keys_numpy(seeds: np.ndarray, position: np.ndarray, stream: int) -> Tensor:
    key = _mix_numpy_(seeds.astype(np.uint64) + np.uint64(stream & _ALL))
    keys = _mix_numpy_(key[:, None] + (position.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN & _ALL))
    return torch.from_numpy(keys.view(np.int64))


def _lane_bits(keys: Tensor, vocab: int) -> Tensor:
    """int32 `[B, T, V]` of keys `[B, T]`: V draws each."""
    lanes = _lane_offsets(vocab, keys.device)
    if _use_numpy(keys):
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


def _use_numpy(keys: Tensor) -> bool:
    """On a CPU NumPy mixes the same bits: its small operations cost a fifth of torch's, and it has unsigned shifts."""
    return sys.byteorder == "little" and is_eager_cpu(keys)


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


def derived(seeds: Tensor, purpose: Purpose) -> Tensor:
    """int64 `[B]`: seeds of other pictures, whose noise is independent of that of these."""
    return _make_keys(seeds, torch.zeros(len(seeds), 1, dtype=torch.int64, device=seeds.device), purpose)[:, 0]


def uniform(seeds: Tensor, position: Tensor, purpose: Purpose, step: int | Tensor = 0) -> Tensor:
    """float32 `[B, T]` in (0, 1), of seeds int64 `[B]` and positions int64 `[B, T]`."""
    keys = _make_keys(seeds, position, purpose, step)
    if _use_numpy(keys):
        bits = (keys.numpy().view(np.uint64) >> np.uint64(32)) & np.uint64(0x7FFFFFFF)
        return torch.from_numpy(bits.astype(np.float32) * np.float32(_UNIT) + np.float32(_UNIT / 2))
    return _unit_(keys >> 32)


def coins(seeds: Tensor, position: Tensor, purpose: Purpose, step: int | Tensor = 0) -> Tensor:
    """float64 `[B, T]` in (0, 1), of 52 bits: fine enough to choose among any number of tokens."""
    keys = _make_keys(seeds, position, purpose, step)
    if _use_numpy(keys):
        return torch.from_numpy(((keys.numpy().view(np.uint64) >> np.uint64(12)) + 0.5) * 2.0**-52)
    return ((keys >> 12).bitwise_and_((1 << 52) - 1).to(torch.float64) + 0.5) * 2.0**-52


def exponential(
    seeds: Tensor, position: Tensor, vocab: int, purpose: Purpose = Purpose.TOKEN, step: int | Tensor = 0
) -> Tensor:
    """Exponential(1) noise, float32 `[B, T, V]` > 0; its negative logarithm is standard Gumbel noise."""
    return _exponential(_make_keys(seeds, position, purpose, step), vocab)


def gaussian(seeds: Tensor, block: int, count: int, step: int = 0) -> Tensor:
    """Standard normal noise, float32 `[B, count]`, of seeds int64 `[B]`: a function of seed, block of a video and step alone.

    By the transform of Box and Muller (1958), from 31 bits each: at most 6.7 in size.
    """
    position = torch.full((len(seeds), 1), block, dtype=torch.int64, device=seeds.device)
    keys = _make_keys(seeds, position, Purpose.LATENT, step)
    half = (count + 1) // 2
    first, second = _unit_(_lane_bits(keys, 2 * half)[:, 0]).split(half, 1)
    radius, angle = first.log().mul_(-2).sqrt_(), second * (2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :count]


def _exponential(keys: Tensor, vocab: int) -> Tensor:
    return _unit_(_lane_bits(keys, vocab)).neg_().log1p_().neg_()


@lru_cache(maxsize=8)
@normal_tensors()
def _lane_offsets(vocab: int, device: torch.device) -> Tensor:
    """int32 `[V]`, far apart; never changed in place."""
    return torch.arange(1, vocab + 1, dtype=torch.int32, device=device).mul_(_GOLDEN32)


class TokenNoise:
    """The noise that belongs to images, that of `Purpose.TOKEN`, at the positions of a run: no pass makes it again.

    Keys are made once for all positions. On a CPU, the noise of the last positions is kept as well: a window of drafts asks for
    most of them in every pass.

    Args:
        seeds: int64 `[B]`.
        positions: how many; all that are asked for are below.
    """

    def __init__(self, seeds: Tensor, positions: int):
        self._make_keys = _make_keys(seeds, torch.arange(positions, device=seeds.device).expand(len(seeds), -1), Purpose.TOKEN)
        self._kept = np.empty((len(seeds), 0, 0), np.float32)  # [B, W, V], a position's at its remainder by W
        self._position = np.empty((len(seeds), 0), np.int64)  # [B, W], whose noise each is

    def exponential(self, position: Tensor, vocab: int) -> Tensor:
        """What the function `exponential` gives."""
        keys = self._make_keys.gather(1, position)
        if position.shape[1] == 1 or not _use_numpy(keys):
            return _exponential(keys, vocab)
        at, image = position.numpy(), np.arange(len(keys))[:, None]
        reach = int((at.max(1) - at.min(1)).max()) + 1
        if reach > self._kept.shape[1] or vocab != self._kept.shape[2]:
            self._kept, self._position = np.empty((len(at), reach, vocab), np.float32), np.full((len(at), reach), -1)
        slot = at % self._kept.shape[1]
        missing = self._position[image, slot] != at
        if missing.any():
            place = np.broadcast_to(image, at.shape)[missing], slot[missing]
            self._kept[place] = _exponential(keys[torch.from_numpy(missing)], vocab).numpy()
            self._position[place] = at[missing]
        return torch.from_numpy(self._kept[image, slot])


def race(probs: Tensor, seeds: Tensor, position: Tensor, purpose: Purpose = Purpose.TOKEN, step: int | Tensor = 0) -> Tensor:
    """Draw int64 `[B, T]` tokens from probabilities `[B, T, V]`: argmax of p / E, which is the Gumbel argmax of log p + G.

    Probabilities need not sum to 1. A token of probability 0 is never drawn. NaN gives a meaningless index: guard the logits.
    """
    if supports_rows(probs):
        from vargen.kernels import sampler

        return sampler.race(probs, sampler.Coins(seeds, position, int(purpose), step))
    return _argmax_ratio(probs, exponential(seeds, position, probs.shape[-1], purpose, step))


def _argmax_ratio(probs: Tensor, noise: Tensor) -> Tensor:
    ratio = probs / noise
    if is_eager_cpu(ratio):  # NumPy's takes a tenth of the time of torch's
        return torch.from_numpy(ratio.detach().numpy().argmax(-1))
    return ratio.argmax(-1)


@dataclass(frozen=True)
class Noise:
    """The coins of one pass.

    Every pass has its own, but for `Purpose.TOKEN`, which belongs to the image: what it draws at a position depends on the
    probabilities there and on nothing that was drafted.

    Attributes:
        seeds: int64 `[B]`.
        position: int64 `[B, T]`, grid position of the token that follows each fed slot.
        step: number of the pass; an int64 scalar where the device counts passes, which gives the same coins.
        own: the images' own noise, where it is kept from pass to pass; None makes it anew.
    """

    seeds: Tensor
    position: Tensor
    step: int | Tensor = 0
    own: TokenNoise | None = None

    def exponential(self, vocab: int, purpose: Purpose) -> Tensor:
        """float32 `[B, T, V]` > 0; a token's probability over it is what a race is won by."""
        if purpose == Purpose.TOKEN and self.own is not None:
            return self.own.exponential(self.position, vocab)
        return exponential(self.seeds, self.position, vocab, purpose, 0 if purpose == Purpose.TOKEN else self.step)

    def uniform(self, purpose: Purpose) -> Tensor:
        """float32 `[B, T]` in (0, 1)."""
        return uniform(self.seeds, self.position, purpose, 0 if purpose == Purpose.TOKEN else self.step)

    def coins(self, purpose: Purpose) -> Tensor:
        """float64 `[B, T]` in (0, 1), for `categorical`."""
        return coins(self.seeds, self.position, purpose, 0 if purpose == Purpose.TOKEN else self.step)

    def draw(self, probs: Tensor, purpose: Purpose) -> Tensor:
        """int64 `[B, T]`, drawn from probabilities `[B, T, V]`, which need not sum to 1.

        Only the image's own noise is raced, so that like probabilities draw like tokens in every pass; others take one coin.
        """
        if purpose == Purpose.TOKEN:
            if supports_rows(probs):
                return race(probs, self.seeds, self.position)
            return _argmax_ratio(probs, self.exponential(probs.shape[-1], purpose))
        return categorical(probs, self.coins(purpose))

    def branch(self, number: int | Tensor) -> Noise:
        """Noise of its own for each of several draws at one position; 0 is this noise. Not for `Purpose.TOKEN`.

        Args:
            number: 0 or more, or int64 that broadcasts to the positions.
        """
        return replace(self, position=self.position + number * _BRANCH)

    def at(self, slot: Tensor) -> Noise:
        """The noise of one slot `[B]` of each image: T = 1."""
        return replace(self, position=self.position.gather(1, slot[:, None]))
