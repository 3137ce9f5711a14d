"""Acceptance rules for a drafted scale. All its tokens are verified at once; they are independent given the coarser scales.

If a rule changes a scale, it completes the scale exactly in the same pass; only later drafted scales are discarded.

Shape suffixes: B images, n tokens of a scale, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vargen.decoding.next_token.acceptance.exact import residual_weights
from vargen.decoding.noise import Noise, Purpose, coins, uniform
from vargen.kernels.categorical import categorical

ScaleJudge = Callable[[Tensor, Tensor, Tensor, Noise], tuple[Tensor, Tensor]]
_MOST_TRIES = 2**17  # then the last sample is used: a bias of at most 1 / (e 2^17) = 3e-6, too small to matter in float32


@dataclass(frozen=True)
class ScaleRule:
    """A function that verifies a drafted scale.

    Attributes:
        judge: takes target probabilities p and draft probabilities q `[B, n, V]`, draft tokens int64 `[B, n]`, and noise at
            their positions; returns tokens int64 `[B, n]`, and whether the draft is unchanged, bool `[B]`.
        exact: whether the tokens are distributed as p.
        drafts: the noise that the draft must be sampled with: its own, or the shared noise.
    """

    judge: ScaleJudge
    exact: bool
    drafts: Purpose = Purpose.DRAFT

    @property
    def __name__(self) -> str:
        return self.judge.__name__

    def __call__(self, p: Tensor, q: Tensor, draft: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        return self.judge(p, q, draft, noise)


def scale_rule(*, exact: bool, drafts: Purpose = Purpose.DRAFT) -> Callable[[ScaleJudge], ScaleRule]:
    """Decorate a function as a `ScaleRule`."""
    return lambda judge: ScaleRule(judge, exact, drafts)


@scale_rule(exact=True)
def token_wise(p: Tensor, q: Tensor, draft: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Speculative sampling per token: keep a token with probability min(1, p / q), otherwise sample from norm((p - q)+).

    Leviathan et al. 2023, theorem 1, for n independent tokens. The probability that a scale is unchanged is the product of 1 -
    TV(p, q) over its tokens, which decreases fast with n.
    """
    at = draft[..., None]
    accepted = noise.uniform(Purpose.ACCEPT) * q.gather(2, at)[..., 0] < p.gather(2, at)[..., 0]
    redrawn = noise.draw(residual_weights(p, q), Purpose.RESIDUAL)
    return torch.where(accepted, draft, redrawn), accepted.all(1)


@scale_rule(exact=True)
def joint(p: Tensor, q: Tensor, draft: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Maximal coupling of whole scales: keep all tokens with probability min(1, P / Q), the products of p and q over the scale.

    Otherwise the scale is sampled from the residual norm((P - Q)+) by rejection sampling: sample r from P, accept it with
    probability max(0, 1 - Q(r) / P(r)). The probability that a scale is unchanged is 1 - TV(P, Q), the maximum for any exact
    rule.
    """
    likely, drafted = _log_prob(p, draft), _log_prob(q, draft)
    first = noise.position[:, :1]
    accepted = uniform(noise.seeds, first, Purpose.ACCEPT, noise.step)[:, 0].log() + drafted < likely
    tokens, open_ = draft, ~accepted
    for step in range(_MOST_TRIES):
        if not open_.any():
            break
        tried = categorical(p, coins(noise.seeds, noise.position, Purpose.RESIDUAL, step))
        tokens = torch.where(open_[:, None], tried, tokens)
        refused = (_log_prob(q, tried) - _log_prob(p, tried)).exp()  # Q / P
        open_ = open_ & (uniform(noise.seeds, first, Purpose.REDRAW_ACCEPT, step)[:, 0] >= 1 - refused)
    return tokens, accepted


@scale_rule(exact=True, drafts=Purpose.TOKEN)
def shared_noise_scales(p: Tensor, q: Tensor, draft: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Shared noise: use the tokens that the shared noise selects from p, so the image is identical to the one without drafts.

    The draft is sampled from q with the same noise, which couples it to the tokens sampled from p.
    """
    tokens = noise.draw(p, Purpose.TOKEN)
    return tokens, (tokens == draft).all(1)


def _log_prob(probs: Tensor, tokens: Tensor) -> Tensor:
    """Joint log-probability of all tokens, float64 `[B]`."""
    return probs.gather(2, tokens[..., None])[..., 0].double().log().sum(1)
