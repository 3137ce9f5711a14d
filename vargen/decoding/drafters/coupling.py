"""Couplings: how a Jacobi window redraws the drafts that were not committed, from what the pass that judged them says.

Each returns int64 `[B, T]`: a token for what follows every fed slot, drawn from that slot's p `[B, T, V]`. All draw with
exactly p given everything at earlier positions, so p is the q to record (a relaxed rule that draws them counts what it grants);
they differ in how often the old draft survives. Those of committed positions are not used.

Shape suffixes: B images, T fed tokens of one pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vargen.decoding.acceptance import chances, redrawn
from vargen.decoding.draft import Step
from vargen.decoding.noise import Purpose

Coupling = Callable[[Step], Tensor]


def independent(step: Step) -> Tensor:
    """Fresh draws, whatever was drafted (Teng et al. 2024, SJD)."""
    return step.noise.draw(step.probs, Purpose.REDRAW)


def maximal(step: Step) -> Tensor:
    """Maximal coupling: keep the old draft d with probability min(1, p(d) / q(d)), else draw norm((p - q)+).

    The old and the new token agree with probability 1 - TV(p, q), which no coupling exceeds (SCD, section 4; the same step is
    called adaptive continuation in SJD-PAC). Slots without a valid draft are drawn from p.
    """
    p, q = chances(step.probs, step.draft)
    return redrawn(step.probs, step.draft, step.noise, step.noise.uniform(Purpose.REDRAW_ACCEPT)[:, :-1] * q < p)


def gumbel(step: Step) -> Tensor:
    """Gumbel coupling: argmax(log p + G) with the image's own noise G of the position, the same in every pass.

    The old and the new token agree with probability at least (1 - TV) / (1 + TV) (SCD, section 4). The rule `shared_noise` has
    drawn the same tokens already.
    """
    drawn = step.verdict.drawn
    return step.noise.draw(step.probs, Purpose.TOKEN) if drawn is None else drawn


def judged(step: Step) -> Tensor:
    """What the rule itself kept and drew (`Verdict.drawn`, as of `Pooled`); of rules that draw nothing, as `maximal`."""
    return maximal(step) if step.verdict.drawn is None else step.verdict.drawn


COUPLINGS: dict[str, Coupling] = {"independent": independent, "maximal": maximal, "gumbel": gumbel, "judged": judged}
