"""Tail policies: how a Jacobi window redraws what it has not committed, from the laws that the last pass returned.

Each returns int64 `[B, T]`: a token for what follows every fed slot, drawn from that slot's law p `[B, T, V]`. All three have
exactly p as their law given everything at earlier positions, so p is the q to store; they differ in how often the old draft
survives. Those of committed positions are not used.

Shape suffixes: B images, T fed tokens of one pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vargen.decoding.acceptance import chances, drafted_law
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.types import Draft

Tail = Callable[[Tensor, Draft, Noise], Tensor]


def independent(law: Tensor, draft: Draft, noise: Noise) -> Tensor:
    """Fresh draws, whatever was drafted (Teng et al. 2024, SJD)."""
    return noise.draw(law, Purpose.TAIL)


def maximal(law: Tensor, draft: Draft, noise: Noise) -> Tensor:
    """Maximal coupling: keep the old draft d with probability min(1, p(d) / q(d)), else draw norm((p - q)+).

    The old and the new token agree with probability 1 - TV(p, q), which no coupling exceeds (SCD, section 4; the same step is
    called adaptive continuation in SJD-PAC). Slots without a valid draft are drawn from p.
    """
    p, q = chances(law, draft)
    keeps = noise.uniform(Purpose.TAIL_ACCEPT)[:, :-1] * q < p
    valid = torch.ones_like(keeps) if draft.valid is None else draft.valid
    left = law.clone()  # (p - q)+ where there was a draft, p elsewhere; in place, because these are wide
    left[:, :-1].addcmul_(drafted_law(law, draft), valid[..., None].to(law.dtype), value=-1).clamp_(min=0)
    empty = left[:, :-1].sum(-1) <= 0  # p equals q up to rounding: the draft stands
    redrawn = noise.draw(left, Purpose.TAIL)
    redrawn[:, :-1] = torch.where(keeps & valid | empty, draft.tokens, redrawn[:, :-1])
    return redrawn


def gumbel(law: Tensor, draft: Draft, noise: Noise) -> Tensor:
    """Gumbel coupling: argmax(log p + G) with the image's own noise G of the position, the same in every pass.

    The old and the new token agree with probability at least (1 - TV) / (1 + TV) (SCD, section 4).
    """
    return noise.tokens(law)


TAILS: dict[str, Tail] = {"independent": independent, "maximal": maximal, "gumbel": gumbel}
