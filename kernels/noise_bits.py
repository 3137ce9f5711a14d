"""Counter-based random numbers: keys by SplitMix64 (Steele, Lea & Flood 2014), values by a 32-bit mixer.

The many values of a key come from the 32-bit mixer with Wellons' constants (lowbias32), which is several times cheaper than
64-bit mixing on a CPU. Integer arithmetic wraps identically on every device, and NumPy gives the same bits as torch.

Shape suffixes: B images, T positions, V vocabulary.
"""

from __future__ import annotations

import math
import sys
from functools import cache

import numpy as np
import torch
from torch import Tensor

from vargen.kernels.dispatch import is_eager_cpu
from vargen.kernels.host import normal_tensors


def _to_signed(value: int, bits: int = 64) -> int:
    """Interpret the low bits as a two's complement integer."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >= 1 << (bits - 1) else value


_ALL = (1 << 64) - 1
_GOLDEN = _to_signed(0x9E3779B97F4A7C15)
_MIX1 = _to_signed(0xBF58476D1CE4E5B9)
_MIX2 = _to_signed(0x94D049BB133111EB)
_GOLDEN32 = _to_signed(0x9E3779B9, 32)
_LOW1 = _to_signed(0x7FEB352D, 32)
_LOW2 = _to_signed(0x846CA68B, 32)
NUM_PURPOSES = 9  # of noise that a pass has
UNIT = 2.0**-31 * (1 - 2.0**-24)  # scales 31 bits plus a half to (0, 1); never rounds to 1


def _shift_(z: Tensor, bits: int) -> Tensor:
    """z ^ (z >>> bits). Right shifts of signed integers extend the sign, hence the mask."""
    width = 64 if z.dtype == torch.int64 else 32
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (width - bits)) - 1))


def _mix_(z: Tensor) -> Tensor:
    _shift_(z, 30).mul_(_MIX1)
    _shift_(z, 27).mul_(_MIX2)
    return _shift_(z, 31)


def add_steps(seeds: Tensor, step: int | Tensor) -> Tensor:
    """Return seeds int64 `[B]` whose noise at pass 0 is that of `seeds` at the pass `step`, a number or int64 `[]` or `[B]`."""
    return seeds + (step * _to_signed(64 * _GOLDEN) if isinstance(step, Tensor) else _to_signed(step * 64 * _GOLDEN))


def make_keys(seeds: Tensor, position: Tensor, purpose: int, step: int | Tensor = 0) -> Tensor:
    """int64 `[B, T]`, the key of one independent stream per position; `step` is a number, or int64 `[]` or `[B]`."""
    if uses_numpy(seeds):
        return _make_keys_numpy(seeds, position, purpose, step)
    return _add_positions(_mix_(add_steps(seeds, step) + _to_signed((purpose + 1) * _GOLDEN)), position)


def _make_keys_numpy(seeds: Tensor, position: Tensor, purpose: int, step: int | Tensor) -> Tensor:
    golden = np.uint64(_GOLDEN & _ALL)
    number = np.asarray(step.numpy() if isinstance(step, Tensor) else step)
    stream = (number.astype(np.uint64).reshape(-1) * np.uint64(64) + np.uint64(purpose + 1)) * golden
    key = _mix_numpy_(seeds.numpy().astype(np.uint64) + stream)
    keys = _mix_numpy_(key[:, None] + (position.numpy().astype(np.uint64) + np.uint64(1)) * golden)
    return torch.from_numpy(keys.view(np.int64))


def _add_positions(key: Tensor, position: Tensor) -> Tensor:
    """Return the keys int64 `[B, T]` of positions `[B, T]`, from what those of an image have in common, `[B]`."""
    return _mix_(key[:, None] + (position + 1) * _GOLDEN)


def lane_bits(keys: Tensor, vocab: int) -> Tensor:
    """Expand keys `[B, T]` to V random values each, int32 `[B, T, V]`."""
    lanes = _lane_offsets(vocab, keys.device)
    if uses_numpy(keys):
        return _lane_bits_numpy(keys.numpy(), lanes.numpy())
    low = keys[..., None].to(torch.int32)  # both casts wrap to the low 32 bits
    high = (keys[..., None] >> 32).to(torch.int32)
    z = _shift_(lanes + low, 16).mul_(_LOW1).bitwise_xor_(high)
    return _shift_(_shift_(z, 15).mul_(_LOW2), 16)


def _lane_bits_numpy(keys: np.ndarray, lanes: np.ndarray) -> Tensor:
    parts = np.ascontiguousarray(keys).view(np.uint32).reshape(*keys.shape, 2)
    z = lanes.view(np.uint32) + parts[..., :1]
    z ^= z >> np.uint32(16)
    z *= np.uint32(_LOW1 & 0xFFFFFFFF)
    z ^= parts[..., 1:]
    z ^= z >> np.uint32(15)
    z *= np.uint32(_LOW2 & 0xFFFFFFFF)
    z ^= z >> np.uint32(16)
    return torch.from_numpy(z.view(np.int32))


def uses_numpy(keys: Tensor) -> bool:
    """Return whether to mix with NumPy, which gives the same bits on a CPU.

    Its small operations take a fifth of the time of torch's, and it has unsigned shifts.
    """
    return sys.byteorder == "little" and is_eager_cpu(keys)


def _mix_numpy_(z: np.ndarray) -> np.ndarray:
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MIX1 & _ALL)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX2 & _ALL)
    z ^= z >> np.uint64(31)
    return z


def to_unit_(bits: Tensor) -> Tensor:
    """Convert the 31 low bits to float32 in (0, 1), with fine resolution near 0, where the smallest exponential is decided."""
    return bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).mul_(UNIT).add_(UNIT / 2)


def exponential_of_keys(keys: Tensor, vocab: int) -> Tensor:
    """Exponential(1) noise float32 `[B, T, V]` > 0, of keys int64 `[B, T]`."""
    return to_unit_(lane_bits(keys, vocab)).neg_().log1p_().neg_()


# -- random numbers -----------------------------------------------------------------------------------------------------


def uniform_of_keys(keys: Tensor) -> Tensor:
    """Uniforms float32 `[B, T]` in (0, 1), of keys int64 `[B, T]`."""
    if uses_numpy(keys):
        bits = (keys.numpy().view(np.uint64) >> np.uint64(32)) & np.uint64(0x7FFFFFFF)
        return torch.from_numpy(bits.astype(np.float32) * np.float32(UNIT) + np.float32(UNIT / 2))
    return to_unit_(keys >> 32)


def uniform64_of_keys(keys: Tensor) -> Tensor:
    """Uniforms float64 `[B, T]` in (0, 1), with 52 bits, enough to sample from any vocabulary."""
    if uses_numpy(keys):
        return torch.from_numpy(((keys.numpy().view(np.uint64) >> np.uint64(12)) + 0.5) * 2.0**-52)
    return ((keys >> 12).bitwise_and_((1 << 52) - 1).to(torch.float64) + 0.5) * 2.0**-52


def sample_exponential(seeds: Tensor, position: Tensor, vocab: int, purpose: int = 0, step: int | Tensor = 0) -> Tensor:
    """Exponential(1) noise, float32 `[B, T, V]` > 0. Its negative logarithm is standard Gumbel noise."""
    return exponential_of_keys(make_keys(seeds, position, purpose, step), vocab)


class TokenNoise:
    """What the noise of images in a run shares, so that it is not computed again.

    The keys of the shared noise (purpose 0) are computed once for all positions. On a CPU, the noise of recent positions is
    cached too, because a window requests most of them again in every pass. On other devices, a pass computes at once what the
    keys of all purposes and positions have in common.

    Args:
        seeds: int64 `[B]`.
        positions: number of positions; an upper bound for all requested positions.
    """

    def __init__(self, seeds: Tensor, positions: int):
        self._keys = make_keys(seeds, torch.arange(positions, device=seeds.device).expand(len(seeds), -1), purpose=0)
        self._pass: tuple[Tensor, Tensor] | None = None  # seeds and numbers [B] of a pass whose streams are not computed yet
        self._offsets = torch.arange(1, NUM_PURPOSES + 1, device=seeds.device)[:, None] * _GOLDEN
        self._streams = torch.zeros(NUM_PURPOSES, len(seeds), dtype=torch.int64, device=seeds.device)  # [purpose, B]
        self._ring = np.empty((len(seeds), 0, 0), np.float32)  # [B, W, V], position p at index p % W
        self._ring_position = np.empty((len(seeds), 0), np.int64)  # [B, W], the cached positions

    def replace_rows(self, rows: Tensor, seeds: Tensor) -> None:
        """Continue with other images, whose seeds are int64 `[n]`, in some rows `[n]` of the batch."""
        positions = torch.arange(self._keys.shape[1], device=seeds.device).expand(len(seeds), -1)
        self._keys.index_copy_(0, rows, make_keys(seeds, positions, purpose=0))
        if uses_numpy(rows):  # a device would be waited for
            self._ring_position[rows.numpy()] = -1

    def start_pass(self, seeds: Tensor, step: Tensor) -> None:
        """Start a pass with the number `step` int64 `[B]` of images with seeds `[B]`."""
        self._pass = seeds, step

    def pass_keys(self, position: Tensor, purpose: int) -> Tensor | None:
        """The keys of `make_keys` in the pass that was started, int64 `[B, T]`; None on a CPU."""
        if uses_numpy(position):
            return None
        if self._pass is not None:  # the first of its random numbers that the pass needs
            seeds, step = self._pass
            self._streams.copy_(_mix_(add_steps(seeds, step) + self._offsets))
            self._pass = None
        return _add_positions(self._streams[purpose], position)

    def exponential(self, position: Tensor, vocab: int) -> Tensor:
        """Same values as `sample_exponential`."""
        keys = self._keys.gather(1, position)
        if position.shape[1] == 1 or not uses_numpy(keys):
            return exponential_of_keys(keys, vocab)
        at, image = position.numpy(), np.arange(len(keys))[:, None]
        reach = int((at.max(1) - at.min(1)).max()) + 1
        if reach > self._ring.shape[1] or vocab != self._ring.shape[2]:
            self._ring = np.empty((len(at), reach, vocab), np.float32)
            self._ring_position = np.full((len(at), reach), -1)
        slot = at % self._ring.shape[1]
        missing = self._ring_position[image, slot] != at
        if missing.any():
            place = np.broadcast_to(image, at.shape)[missing], slot[missing]
            self._ring[place] = exponential_of_keys(keys[torch.from_numpy(missing)], vocab).numpy()
            self._ring_position[place] = at[missing]
        return torch.from_numpy(self._ring[image, slot])


def sample_normal(seeds: Tensor, position: int, count: int, purpose: int, step: int = 0) -> Tensor:
    """Standard normal noise, float32 `[B, count]`; a function only of seeds int64 `[B]`, position, purpose and step.

    Box-Muller transform (1958) of 31 bits each: magnitudes are at most 6.7.
    """
    places = torch.full((len(seeds), 1), position, dtype=torch.int64, device=seeds.device)
    keys = make_keys(seeds, places, purpose, step)
    half = (count + 1) // 2
    first, second = to_unit_(lane_bits(keys, 2 * half)[:, 0]).split(half, 1)
    radius, angle = first.log().mul_(-2).sqrt_(), second * (2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :count]


@cache  # captured passes read it: it is never freed
@normal_tensors()
def _lane_offsets(vocab: int, device: torch.device) -> Tensor:
    """int32 `[V]`, widely spaced; never modified in place."""
    return torch.arange(1, vocab + 1, dtype=torch.int32, device=device).mul_(_GOLDEN32)
