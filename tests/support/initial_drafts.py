"""An initial draft whose q differs from position to position, for tests of exactness: more demanding than the uniform one."""

from __future__ import annotations

import torch
from torch import Tensor

from vargen.decoding.next_token.drafters.initial import Context
from vargen.decoding.noise import Purpose


def mixture(context: Context) -> tuple[Tensor, Tensor]:
    """Sample from a mixture of uniform, the tokens to the left and above, and the last target distribution.

    If a component is missing (no row above, no earlier pass), its weight goes to uniform.
    """
    left = context.tokens.gather(1, context.known[:, None] - 1).expand_as(context.noise.position)
    up = context.noise.position - context.columns
    known = (up >= 0) & (up < context.known[:, None])
    above = context.tokens.gather(1, torch.where(known, up, 0))
    probs = context.uniform_probs * (0.1 + 0.25 * ~known + (0.4 if context.last_probs is None else 0.0))[..., None]
    if context.last_probs is not None:
        probs = probs + 0.4 * context.last_probs[:, None]
    probs = probs.scatter_add(2, left[..., None], torch.full_like(probs[..., :1], 0.25))
    probs = probs.scatter_add(2, above[..., None], 0.25 * known[..., None].float())
    return context.noise.sample(probs, Purpose.DRAFT), probs
