"""Counter-based noise: a function of (image seed, position, purpose, pass), not a stream consumed in order.

A row of a batch therefore gets the same samples as the image alone, and a draft token shares its noise with the same position
when it is sampled later. See `vargen.kernels.noise_bits` for the numbers.

The pass number may be a device scalar, which a captured pass increments itself; the noise is identical.

Shape suffixes: B images, T positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from vargen.kernels import ops
from vargen.kernels.noise_bits import TokenNoise, add_steps, exponential_of_keys, make_keys, uniform64_of_keys, uniform_of_keys
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
        token_noise: what the noise of the images and of this pass shares; None computes it.
        needed: bool, broadcasts to `[B, T]`; samples elsewhere have no effect on what is generated. Used only where outcomes
            are enumerated (`vargen.verify.enumeration`). None: all are needed.
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
        return exponential_of_keys(self._make_keys(purpose), vocab)

    def uniform(self, purpose: Purpose) -> Tensor:
        """Uniforms, float32 `[B, T]` in (0, 1)."""
        return uniform_of_keys(self._make_keys(purpose))

    def uniform64(self, purpose: Purpose) -> Tensor:
        """Uniforms, float64 `[B, T]` in (0, 1), for `sample_categorical`."""
        return uniform64_of_keys(self._make_keys(purpose))

    def _make_keys(self, purpose: Purpose) -> Tensor:
        if purpose == Purpose.TOKEN:
            return make_keys(self.seeds, self.position, purpose)
        kept = None if self.token_noise is None else self.token_noise.pass_keys(self.position, purpose)
        return make_keys(self.seeds, self.position, purpose, self.step) if kept is None else kept

    def sample(self, probs: Tensor, purpose: Purpose) -> Tensor:
        """Sample tokens int64 `[B, T]` from probabilities `[B, T, V]`, which need not sum to 1.

        Shared noise uses Gumbel-max, so that similar probabilities select the same token in every pass. Other purposes use
        inverse-CDF sampling with one uniform per token.
        """
        if purpose == Purpose.TOKEN:
            noise = partial(self.exponential, probs.shape[-1], purpose)
            return ops.sample_gumbel_max(probs, self.seeds, self.position, noise)
        return ops.sample_categorical(probs, self.uniform64(purpose))

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
    def key(self) -> tuple[Tensor, Tensor]:
        """Seeds `[B]` whose noise of pass 0 is that of this pass, and positions, for kernels. Not for `Purpose.TOKEN`."""
        return add_steps(self.seeds, self.step), self.position

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
