"""An initial draft whose q differs from position to position, for tests of exactness: more demanding than the uniform one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vargen.decoding import Jacobi, Noise, TokenState
from vargen.decoding.noise import Purpose


@dataclass(frozen=True)
class MixtureJacobi(Jacobi):
    """Samples from a mixture of uniform, the tokens to the left and above, and the last target distribution.

    If a component is missing (no row above, no earlier pass), its weight goes to uniform.
    """

    def draft_new(self, state: TokenState, noise: Noise) -> tuple[Tensor, Tensor]:
        tokens, known, position = self.known_tokens(state), self.drafted_end[:, None], noise.position
        last = state.num_tokens - 1
        left = tokens.gather(1, (known - 1).clamp(max=last)).expand_as(position)
        up = position - state.columns
        has_above = (up >= 0) & (up < known)
        above = tokens.gather(1, torch.where(has_above, up, 0).clamp(max=last))
        has_last = torch.zeros_like(known, dtype=torch.bool) if self.probs is None else known > 1
        weight = 0.1 + 0.25 * ~has_above + 0.4 * ~has_last
        probs = torch.full((1, 1, state.vocab), 1.0 / state.vocab) * weight[..., None]
        if self.probs is not None:
            image = torch.arange(len(known))
            newest = self.probs[image, (known[:, 0] - 1) % self.width]
            probs = probs + 0.4 * (has_last * newest)[:, None]
        probs = probs.scatter_add(2, left[..., None], torch.full_like(probs[..., :1], 0.25))
        probs = probs.scatter_add(2, above[..., None], 0.25 * has_above[..., None].float())
        return noise.sample(probs, Purpose.DRAFT), probs
