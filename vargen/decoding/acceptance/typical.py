"""Typical acceptance: a draft stands where the target finds it likely enough for its entropy there.

Shape suffixes: B images, S drafts, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vargen.decoding.acceptance.exact import probability
from vargen.decoding.acceptance.relaxation import Relaxed
from vargen.values import real, shown


@dataclass(frozen=True)
class Typical(Relaxed):
    """Relaxed: accept a draft x surely where p(x) > min(epsilon, alpha exp(-H)), H the entropy of p in nats.

    Typical acceptance (Cai et al. 2024, Medusa, section 2.3.1). Other drafts are judged exactly, where Medusa refuses them:
    refusing more than p / q asks biases the output for nothing. Image models are uncertain, so the second bound rules: at an
    entropy of 6 nats, tokens of 0.0007 are typical. The defaults are those of Medusa's helper, alpha about the square root of
    epsilon; its `generate` passes the two exchanged.

    Args:
        epsilon: in (0, 1].
        alpha: above 0; the paper takes about the square root of epsilon.
        budget, tightening: see `Relaxed`.

    Raises:
        ValueError: for values outside these ranges.
    """

    epsilon: float = 0.09
    alpha: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        epsilon, alpha = real(self.epsilon), real(self.alpha)
        if epsilon is None or not 0 < epsilon <= 1:
            raise ValueError(f"epsilon must be in (0, 1], got {shown(self.epsilon)}")
        if alpha is None or alpha <= 0:
            raise ValueError(f"alpha must be above 0, got {shown(self.alpha)}")
        object.__setattr__(self, "epsilon", epsilon)
        object.__setattr__(self, "alpha", alpha)

    def wanted(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
        return (probability(p, tokens) > (self.alpha * (-entropy).exp()).clamp(max=self.epsilon)).to(p.dtype)
