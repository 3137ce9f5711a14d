"""Ratio scaling: the exact rule with p / q made larger.

Shape suffixes: B images, S drafts, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vargen.decoding.acceptance.exact import probability
from vargen.decoding.acceptance.relaxation import Relaxed
from vargen.values import real, shown


@dataclass(frozen=True)
class Ratio(Relaxed):
    """Relaxed: accept a draft x while u < ratio p(x) / q(x), draw norm((p - q)+) at a refusal.

    The plainest relaxed rule, which every other one has to beat at equal relaxation: it grants most to drafts that the target
    finds likely, and asks nothing else. With `tightening` it is the rule of Cool-SD, whose ratio falls with the depth, here
    towards 1 and not below: a ratio below 1 would refuse more than the exact rule, which biases the output for nothing.

    Args:
        ratio: 1 (exact) or more.
        budget, tightening: see `Relaxed`.

    Raises:
        ValueError: for values outside these ranges.
    """

    ratio: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        ratio = real(self.ratio)
        if ratio is None or ratio < 1:
            raise ValueError(f"ratio must be at least 1, which is exact, got {shown(self.ratio)}")
        object.__setattr__(self, "ratio", ratio)

    def wanted(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        return self.ratio * probability(p, tokens) / probability(q, tokens).clamp_min(1e-30)
