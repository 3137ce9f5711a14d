"""Counter-based noise: a function of (image seed, position, purpose, pass), not a stream consumed in order.

A row of a batch therefore gets the same samples as the image alone, and a draft token shares its noise with the same position
when it is sampled later. See `vargen.kernels.noise_bits` for the numbers.

The pass number may be a device scalar, which a captured pass increments itself; the noise is identical.

Shape suffixes: B images, T positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vargen.kernels.dispatch import is_eager_cpu, supports_rows
from vargen.kernels.noise_bits import (
    add_steps,
    exponential_of_keys,
    make_keys,
    sample_exponential,
    sample_uniform,
    sample_uniform64,
    uses_numpy,
)
from vargen.kernels.row_ops import sample_categorical
from vargen.kernels.token_steps import NoiseKey


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


FOLD = 1 << 32  # position offset of `Noise.fold_in`, larger than any grid


def derive_seeds(seeds: Tensor, purpose: Purpose) -> Tensor:
    """int64 `[B]`: seeds of other images, whose noise is independent of the noise of these."""
    return make_keys(seeds, torch.zeros(len(seeds), 1, dtype=torch.int64, device=seeds.device), purpose)[:, 0]


class TokenNoise:
    """The shared noise of images (`Purpose.TOKEN`) at all positions of a run, so that no pass recomputes it.

    Keys are computed once for all positions. On a CPU, the noise of recent positions is cached too, because a window requests
    most of them again in every pass.

    Args:
        seeds: int64 `[B]`.
        positions: number of positions; an upper bound for all requested positions.
    """

    def __init__(self, seeds: Tensor, positions: int):
        self._keys = make_keys(seeds, torch.arange(positions, device=seeds.device).expand(len(seeds), -1), Purpose.TOKEN)
        self._ring = np.empty((len(seeds), 0, 0), np.float32)  # [B, W, V], position p at index p % W
        self._ring_position = np.empty((len(seeds), 0), np.int64)  # [B, W], the cached positions

    def replace_rows(self, rows: Tensor, seeds: Tensor) -> None:
        """Continue with other images, whose seeds are int64 `[n]`, in some rows `[n]` of the batch."""
        positions = torch.arange(self._keys.shape[1], device=seeds.device).expand(len(seeds), -1)
        self._keys.index_copy_(0, rows, make_keys(seeds, positions, Purpose.TOKEN))
        if uses_numpy(rows):  # a device would be waited for
            self._ring_position[rows.numpy()] = -1

    def exponential(self, position: Tensor, vocab: int) -> Tensor:
        """Same values as `sample_exponential`."""
        keys = self._keys.gather(1, position)
        if position.shape[1] == 1 or not uses_numpy(keys):
            return exponential_of_keys(keys, vocab)
        at, image = position.numpy(), np.arange(len(keys))[:, None]
        reach = int((at.max(1) - at.min(1)).max()) + 1
        if reach > self._ring.shape[1] or vocab != self._ring.shape[2]:
            self._ring, self._ring_position = np.empty((len(at), reach, vocab), np.float32), np.full((len(at), reach), -1)
        slot = at % self._ring.shape[1]
        missing = self._ring_position[image, slot] != at
        if missing.any():
            place = np.broadcast_to(image, at.shape)[missing], slot[missing]
            self._ring[place] = exponential_of_keys(keys[torch.from_numpy(missing)], vocab).numpy()
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
        step: pass number; an int64 tensor if the device counts passes, with identical results: `[]`, or `[B]` if images of a
            batch did not start together (`vargen.decoding.engine`).
        token_noise: cached shared noise of the images; None recomputes it.
        needed: bool, broadcasts to `[B, T]`; samples elsewhere have no effect on what is generated. Used only where outcomes
            are enumerated (`vargen.evaluation.enumeration`). None: all are needed.
        is_keyed: whether it is the function of seeds, positions, purposes and passes that compiled code computes (`make_keys`).
    """

    seeds: Tensor
    position: Tensor
    step: int | Tensor = 0
    token_noise: TokenNoise | None = None
    needed: Tensor | None = None
    is_keyed: ClassVar[bool] = True

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

    def shift(self, offset: int | Tensor) -> Noise:
        """Return the noise of the positions `offset` after these, which broadcasts to `[B, T]`."""
        return replace(self, position=self.position + offset)

    def fold_in(self, number: int | Tensor) -> Noise:
        """Return independent noise for one of several samples at a position; number 0 is this noise. Not for `Purpose.TOKEN`.

        Args:
            number: at least 0, or an int64 tensor that broadcasts to the positions.
        """
        return self.shift(number * FOLD)

    @property
    def key(self) -> tuple[Tensor, Tensor, int | Tensor]:
        """Seeds, positions and pass number for kernels, which take one number for all images. Not for `Purpose.TOKEN`."""
        if isinstance(self.step, Tensor) and self.step.dim():
            return add_steps(self.seeds, self.step), self.position, 0
        return self.seeds, self.position, self.step

    def keys(self, purpose: Purpose) -> NoiseKey | None:
        """What compiled code computes the same noise from; None if this is other noise."""
        return (self.seeds, self.position, self.step, int(purpose)) if self.is_keyed else None

    def where(self, needed: Tensor) -> Noise:
        """Return this noise, for a caller that uses samples only where `needed` is True."""
        return replace(self, needed=needed)

    def select_slot(self, slot: Tensor) -> Noise:
        """Select the noise of one slot `[B]` per image: T = 1."""
        needed = None if self.needed is None else self.needed.expand_as(self.position).gather(1, slot[:, None])
        return replace(self, position=self.position.gather(1, slot[:, None]), needed=needed)
