"""Typical acceptance: always accept draft tokens whose probability is above a threshold that depends on the entropy.

Shape suffixes: B slots, S draft tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vargen.decoding.relaxed_rules import RelaxedRule
from vargen.decoding.rules import gather_prob
from vargen.values import number_field


@dataclass(frozen=True)
class TypicalRule(RelaxedRule):
    """Relaxed rule: always accept a draft token x with p(x) > min(epsilon, alpha exp(-H)), H being the entropy of p in nats.

    Typical acceptance (Cai et al. 2024, Medusa, section 2.3.1). Other draft tokens get the exact test, where Medusa rejects
    them: rejecting more than the exact rule adds bias for no gain. Image models have high entropy, so the second bound
    dominates: at 6 nats, tokens with p = 0.0007 are typical. Defaults are those of Medusa's helper function, with alpha about
    the square root of epsilon; its `generate` passes the two swapped.

    Args:
        epsilon: in (0, 1].
        alpha: above 0; the paper uses about the square root of epsilon.
        budget, tightening: see `RelaxedRule`.
    """

    epsilon: float = number_field(0.09, 0, 1, open_below=True)
    alpha: float = number_field(0.3, 0, open_below=True)

    def accept_prob(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
        return (gather_prob(p, tokens) > (self.alpha * (-entropy).exp()).clamp(max=self.epsilon)).to(p.dtype)
