"""Counter-based noise: a function of (image seed, position, purpose, pass), not a stream consumed in order.

A row of a batch therefore gets the same samples as the image alone, and a draft token shares its noise with the same position
when it is sampled later. Keys are mixed with SplitMix64 (Steele, Lea & Flood 2014). The many values of a key come from the
32-bit mixer with Wellons' constants (lowbias32), which is several times cheaper than 64-bit mixing on a CPU. Integer arithmetic
wraps identically on every device.

The pass number may be a device scalar, which a captured pass increments itself; the noise is identical.

Shape suffixes: B images, T positions, V vocabulary.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from vargen.device import normal_tensors
from vargen.kernels.dispatch import is_eager_cpu, supports_rows
from vargen.kernels.row_ops import sample_categorical


class Purpose(IntEnum):
    """What a random number is used for. Numbers for different purposes are independent."""

    TOKEN = 0  # shared noise: the same in every pass
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3
    RESAMPLE_ACCEPT = 4
    RESAMPLE = 5
    CHOICE = 6
    LOW_RES = 7  # generation of the low-resolution image
    LATENT = 8  # video latents: step 0 is the initial noise, step k is added again before denoising step k


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
FOLD = 1 << 32  # position offset of `Noise.fold_in`, larger than any grid
_MAX_ATTEMPTS = 1 << 17
_UNIT = 2.0**-31 * (1 - 2.0**-24)  # scales 31 bits plus a half to (0, 1); never rounds to 1


def _shift_(z: Tensor, bits: int) -> Tensor:
    """z ^ (z >>> bits). Right shifts of signed integers extend the sign, hence the mask."""
    width = 64 if z.dtype == torch.int64 else 32
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (width - bits)) - 1))


def _mix_(z: Tensor) -> Tensor:
    _shift_(z, 30).mul_(_MIX1)
    _shift_(z, 27).mul_(_MIX2)
    return _shift_(z, 31)


def _make_keys(seeds: Tensor, position: Tensor, purpose: int, step: int | Tensor = 0) -> Tensor:
    """int64 `[B, T]`, the key of one independent stream per position."""
    if isinstance(step, Tensor):  # same value; wraps on the device
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
    """Expand keys `[B, T]` to V random values each, int32 `[B, T, V]`."""
    lanes = _lane_offsets(vocab, keys.device)
    if _use_numpy(keys):
        return _lane_bits_numpy(keys.numpy(), lanes.numpy())
    low, high = keys[..., None].to(torch.int32), (keys[..., None] >> 32).to(torch.int32)  # both casts wrap to the low 32 bits
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


def _use_numpy(keys: Tensor) -> bool:
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


def _unit_(bits: Tensor) -> Tensor:
    """Convert the 31 low bits to float32 in (0, 1), with fine resolution near 0, where the smallest exponential is decided."""
    return bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).mul_(_UNIT).add_(_UNIT / 2)


def derive_seeds(seeds: Tensor, purpose: Purpose) -> Tensor:
    """int64 `[B]`: seeds of other images, whose noise is independent of the noise of these."""
    return _make_keys(seeds, torch.zeros(len(seeds), 1, dtype=torch.int64, device=seeds.device), purpose)[:, 0]


def sample_uniform(seeds: Tensor, position: Tensor, purpose: Purpose, step: int | Tensor = 0) -> Tensor:
    """Uniforms float32 `[B, T]` in (0, 1), for seeds int64 `[B]` and positions int64 `[B, T]`."""
    keys = _make_keys(seeds, position, purpose, step)
    if _use_numpy(keys):
        bits = (keys.numpy().view(np.uint64) >> np.uint64(32)) & np.uint64(0x7FFFFFFF)
        return torch.from_numpy(bits.astype(np.float32) * np.float32(_UNIT) + np.float32(_UNIT / 2))
    return _unit_(keys >> 32)


def sample_uniform64(seeds: Tensor, position: Tensor, purpose: Purpose, step: int | Tensor = 0) -> Tensor:
    """Uniforms float64 `[B, T]` in (0, 1), with 52 bits, enough to sample from any vocabulary."""
    keys = _make_keys(seeds, position, purpose, step)
    if _use_numpy(keys):
        return torch.from_numpy(((keys.numpy().view(np.uint64) >> np.uint64(12)) + 0.5) * 2.0**-52)
    return ((keys >> 12).bitwise_and_((1 << 52) - 1).to(torch.float64) + 0.5) * 2.0**-52


def sample_exponential(
    seeds: Tensor, position: Tensor, vocab: int, purpose: Purpose = Purpose.TOKEN, step: int | Tensor = 0
) -> Tensor:
    """Exponential(1) noise, float32 `[B, T, V]` > 0. Its negative logarithm is standard Gumbel noise."""
    return _exponential(_make_keys(seeds, position, purpose, step), vocab)


def sample_normal(seeds: Tensor, block: int, count: int, step: int = 0) -> Tensor:
    """Standard normal noise, float32 `[B, count]`; a function only of seed (int64 `[B]`), video block and step.

    Box-Muller transform (1958) of 31 bits each: magnitudes are at most 6.7.
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
    """int32 `[V]`, widely spaced; never modified in place."""
    return torch.arange(1, vocab + 1, dtype=torch.int32, device=device).mul_(_GOLDEN32)


class TokenNoise:
    """The shared noise of images (`Purpose.TOKEN`) at all positions of a run, so that no pass recomputes it.

    Keys are computed once for all positions. On a CPU, the noise of recent positions is cached too, because a window requests
    most of them again in every pass.

    Args:
        seeds: int64 `[B]`.
        positions: number of positions; an upper bound for all requested positions.
    """

    def __init__(self, seeds: Tensor, positions: int):
        self._keys = _make_keys(seeds, torch.arange(positions, device=seeds.device).expand(len(seeds), -1), Purpose.TOKEN)
        self._ring = np.empty((len(seeds), 0, 0), np.float32)  # [B, W, V], position p at index p % W
        self._ring_position = np.empty((len(seeds), 0), np.int64)  # [B, W], the cached positions

    def exponential(self, position: Tensor, vocab: int) -> Tensor:
        """Same values as `sample_exponential`."""
        keys = self._keys.gather(1, position)
        if position.shape[1] == 1 or not _use_numpy(keys):
            return _exponential(keys, vocab)
        at, image = position.numpy(), np.arange(len(keys))[:, None]
        reach = int((at.max(1) - at.min(1)).max()) + 1
        if reach > self._ring.shape[1] or vocab != self._ring.shape[2]:
            self._ring, self._ring_position = np.empty((len(at), reach, vocab), np.float32), np.full((len(at), reach), -1)
        slot = at % self._ring.shape[1]
        missing = self._ring_position[image, slot] != at
        if missing.any():
            place = np.broadcast_to(image, at.shape)[missing], slot[missing]
            self._ring[place] = _exponential(keys[torch.from_numpy(missing)], vocab).numpy()
            self._ring_position[place] = at[missing]
        return torch.from_numpy(self._ring[image, slot])


def sample_gumbel_max(
    probs: Tensor, seeds: Tensor, position: Tensor, purpose: Purpose = Purpose.TOKEN, step: int | Tensor = 0
) -> Tensor:
    """Gumbel-max sampling: tokens int64 `[B, T]` from probabilities `[B, T, V]`, as argmax of p / E (the argmax of log p + G).

    Probabilities need not sum to 1. A token with probability 0 is never sampled. NaN yields an undefined index; check the
    logits.
    """
    if supports_rows(probs):
        from vargen.kernels import sampler

        return sampler.sample_gumbel_max(probs, sampler.NoiseStream(seeds, position, int(purpose), step))
    return _argmax_ratio(probs, sample_exponential(seeds, position, probs.shape[-1], purpose, step))


def _argmax_ratio(probs: Tensor, noise: Tensor) -> Tensor:
    ratio = probs / noise
    if is_eager_cpu(ratio):  # NumPy's argmax takes a tenth of the time of torch's
        return torch.from_numpy(ratio.detach().numpy().argmax(-1))
    return ratio.argmax(-1)


@dataclass(frozen=True)
class Noise:
    """The random numbers of one pass.

    Every pass has its own, except for `Purpose.TOKEN`, the shared noise, which belongs to the image: the token it selects at a
    position depends only on the probabilities there, not on any draft.

    Attributes:
        seeds: int64 `[B]`.
        position: int64 `[B, T]`, grid position of the token after each fed slot.
        step: pass number; an int64 scalar tensor if the device counts passes, with identical results.
        token_noise: cached shared noise of the images; None recomputes it.
        needed: bool, broadcasts to `[B, T]`; samples elsewhere have no effect on what is generated. Used only where outcomes
            are enumerated (`vargen.evaluation.enumeration`). None: all are needed.
    """

    seeds: Tensor
    position: Tensor
    step: int | Tensor = 0
    token_noise: TokenNoise | None = None
    needed: Tensor | None = None

    def exponential(self, vocab: int, purpose: Purpose) -> Tensor:
        """Exponential noise, float32 `[B, T, V]` > 0, for Gumbel-max sampling."""
        if purpose == Purpose.TOKEN and self.token_noise is not None:
            return self.token_noise.exponential(self.position, vocab)
        return sample_exponential(self.seeds, self.position, vocab, purpose, 0 if purpose == Purpose.TOKEN else self.step)

    def uniform(self, purpose: Purpose) -> Tensor:
        """Uniforms, float32 `[B, T]` in (0, 1)."""
        return sample_uniform(self.seeds, self.position, purpose, 0 if purpose == Purpose.TOKEN else self.step)

    def uniform64(self, purpose: Purpose) -> Tensor:
        """Uniforms, float64 `[B, T]` in (0, 1), for `sample_categorical`."""
        return sample_uniform64(self.seeds, self.position, purpose, 0 if purpose == Purpose.TOKEN else self.step)

    def sample(self, probs: Tensor, purpose: Purpose) -> Tensor:
        """Sample tokens int64 `[B, T]` from probabilities `[B, T, V]`, which need not sum to 1.

        Shared noise uses Gumbel-max, so that similar probabilities select the same token in every pass. Other purposes use
        inverse-CDF sampling with one uniform per token.
        """
        if purpose == Purpose.TOKEN:
            if supports_rows(probs):
                return sample_gumbel_max(probs, self.seeds, self.position)
            return _argmax_ratio(probs, self.exponential(probs.shape[-1], purpose))
        return sample_categorical(probs, self.uniform64(purpose))

    def sample_evenly(self, vocab: int, purpose: Purpose) -> Tensor:
        """Sample tokens int64 `[B, T]` from the uniform distribution over `vocab` tokens."""
        return (self.uniform(purpose) * vocab).long().clamp_(max=vocab - 1)

    def sample_without_replacement(self, probs: Tensor, count: int, purpose: Purpose) -> tuple[Tensor, Tensor]:
        """Sample `count` different tokens at each position, one after the other.

        The tokens with the largest values of log p + Gumbel noise, in descending order (Kool et al. 2019).

        Args:
            probs: `[B, T, V]`; need not sum to 1.

        Returns:
            Tokens int64 `[B, T, count]`, and the float values p / E that define their order, which are 0 where no token with
            positive probability is left.
        """
        value, token = (probs / self.exponential(probs.shape[-1], purpose)).topk(count, dim=-1)
        return token, value

    def sample_by_rejection(self, probs: Tensor, accept_prob: Callable[[Tensor], Tensor], needed: Tensor) -> Tensor:
        """Sample all T tokens jointly from a distribution proportional to p(r) a(r): sample r from p until it is accepted.

        Args:
            probs: `[B, T, V]`, p of each token; the tokens of r are independent under p.
            accept_prob: a, float64 `[B]` for tokens int64 `[B, T]`.
            needed: bool `[B]`; the tokens of other images are undefined.

        Returns:
            int64 `[B, T]`. After 2^17 attempts the last sample is used: a bias of at most 1 / (e 2^17) = 3e-6.
        """
        first, missing = self.position[:, :1], needed
        tokens = torch.zeros_like(self.position)
        for attempt in range(_MAX_ATTEMPTS):
            if not missing.any():
                break
            sampled = sample_categorical(probs, sample_uniform64(self.seeds, self.position, Purpose.RESIDUAL, attempt))
            tokens = torch.where(missing[:, None], sampled, tokens)
            uniforms = sample_uniform(self.seeds, first, Purpose.RESAMPLE_ACCEPT, attempt)[:, 0]
            missing = missing & (uniforms >= accept_prob(sampled))
        return tokens

    def shift(self, offset: int | Tensor) -> Noise:
        """Return the noise of the positions `offset` after these, which broadcasts to `[B, T]`."""
        return replace(self, position=self.position + offset)

    def fold_in(self, number: int | Tensor) -> Noise:
        """Return independent noise for one of several samples at a position; number 0 is this noise. Not for `Purpose.TOKEN`.

        Args:
            number: at least 0, or an int64 tensor that broadcasts to the positions.
        """
        return self.shift(number * FOLD)

    def where(self, needed: Tensor) -> Noise:
        """Return this noise, for a caller that uses samples only where `needed` is True."""
        return replace(self, needed=needed)

    def select_slot(self, slot: Tensor) -> Noise:
        """Select the noise of one slot `[B]` per image: T = 1."""
        needed = None if self.needed is None else self.needed.expand_as(self.position).gather(1, slot[:, None])
        return replace(self, position=self.position.gather(1, slot[:, None]), needed=needed)
