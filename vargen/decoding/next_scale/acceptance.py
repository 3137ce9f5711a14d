"""Acceptance rules for a drafted scale. All its tokens are verified at once; they are independent given the coarser scales.

If a rule changes a scale, it completes the scale exactly in the same pass; only later drafted scales are discarded.

Shape suffixes: B images, n tokens of a scale, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vargen.decoding.noise import Noise, Purpose

VerifyScaleFunction = Callable[[Tensor, Tensor, Tensor, Noise], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ScaleRule:
    """A function that verifies a drafted scale.

    Attributes:
        verify: takes target probabilities p and draft probabilities q `[B, n, V]`, draft tokens int64 `[B, n]`, and noise at
            their positions; returns tokens int64 `[B, n]`, and whether the draft is unchanged, bool `[B]`.
        exact: whether the tokens are distributed as p.
        draft_noise: the noise that the draft must be sampled with: its own, or the shared noise.
    """

    verify: VerifyScaleFunction
    exact: bool
    draft_noise: Purpose = Purpose.DRAFT

    @property
    def __name__(self) -> str:
        return self.verify.__name__

    def __call__(self, p: Tensor, q: Tensor, draft: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        return self.verify(p, q, draft, noise)


def scale_rule(*, exact: bool, draft_noise: Purpose = Purpose.DRAFT) -> Callable[[VerifyScaleFunction], ScaleRule]:
    """Decorate a function as a `ScaleRule`."""
    return lambda verify: ScaleRule(verify, exact, draft_noise)


@scale_rule(exact=True)
def joint_coupling(p: Tensor, q: Tensor, draft: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Maximal coupling of whole scales: keep all tokens with probability min(1, P / Q), the products of p and q over the scale.

    Otherwise the scale is sampled from the residual norm((P - Q)+) by rejection sampling: sample r from P, accept it with
    probability max(0, 1 - Q(r) / P(r)). The probability that a scale is unchanged is 1 - TV(P, Q), the maximum for any exact
    rule.
    """
    log_p, log_q = _sum_log_probs(p, draft), _sum_log_probs(q, draft)
    first = noise.select_slot(torch.zeros(len(p), dtype=torch.int64, device=p.device))
    accepted = first.uniform(Purpose.ACCEPT)[:, 0] < (log_p - log_q).exp()

    def residual_accept_prob(tokens: Tensor) -> Tensor:
        return 1 - (_sum_log_probs(q, tokens) - _sum_log_probs(p, tokens)).exp()  # 1 - Q / P

    resampled = noise.sample_by_rejection(p, residual_accept_prob, ~accepted)
    return torch.where(accepted[:, None], draft, resampled), accepted


@scale_rule(exact=True, draft_noise=Purpose.TOKEN)
def shared_noise(p: Tensor, q: Tensor, draft: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Use the tokens that the shared noise selects from p, so the image is identical to the one without drafts.

    The draft is sampled from q with the same noise, which couples it to the tokens sampled from p.
    """
    tokens = noise.sample(p, Purpose.TOKEN)
    return tokens, (tokens == draft).all(1)


def _sum_log_probs(probs: Tensor, tokens: Tensor) -> Tensor:
    """Joint log-probability of all tokens, float64 `[B]`."""
    return probs.gather(2, tokens[..., None])[..., 0].double().log().sum(1)
