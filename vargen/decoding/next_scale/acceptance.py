"""Rules that judge a drafted scale: all its tokens at once, each independent of the others given the coarser scales.

A scale that a rule changes is still finished by it, exactly, in the same pass; only what was drafted behind it is void.

Shape suffixes: B images, n tokens of a scale, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vargen.decoding.next_token.acceptance.exact import residual
from vargen.decoding.noise import Noise, Purpose, coins, uniform
from vargen.kernels.categorical import categorical

ScaleJudge = Callable[[Tensor, Tensor, Tensor, Noise], tuple[Tensor, Tensor]]
_MOST_TRIES = 2**17  # then the last one stands: a bias of at most 1 / (e 2^17) = 3e-6, below what float32 tells apart


@dataclass(frozen=True)
class ScaleRule:
    """A function that judges a drafted scale.

    Attributes:
        judge: of target probabilities p and draft probabilities q `[B, n, V]`, drafted tokens int64 `[B, n]`, and noise at
            their positions; returns the tokens int64 `[B, n]`, and whether they are the drafted ones, bool `[B]`.
        exact: whether the tokens follow p.
        drafts: what the drafts must have been drawn with: coins of their own, or the image's own noise.
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
    """Make a function a `ScaleRule`."""
    return lambda judge: ScaleRule(judge, exact, drafts)


@scale_rule(exact=True)
def token_wise(p: Tensor, q: Tensor, draft: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Speculative sampling of each token by itself: keep it with min(1, p / q), else draw it from norm((p - q)+).

    Leviathan et al. 2023, theorem 1, for n independent tokens. A scale comes through unchanged with the product of the tokens'
    1 - TV(p, q), which falls fast with n.
    """
    at = draft[..., None]
    accepted = noise.uniform(Purpose.ACCEPT) * q.gather(2, at)[..., 0] < p.gather(2, at)[..., 0]
    redrawn = noise.draw(residual(p, q), Purpose.RESIDUAL)
    return torch.where(accepted, draft, redrawn), accepted.all(1)


@scale_rule(exact=True)
def joint(p: Tensor, q: Tensor, draft: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Maximal coupling of whole scales: keep all tokens with min(1, P / Q), P and Q their products over the scale.

    Otherwise the scale is drawn from the residual norm((P - Q)+) by rejection: draw r from P, keep it with
    max(0, 1 - Q(r) / P(r)). A scale comes through unchanged with 1 - TV(P, Q), the most that any exact rule allows.
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
    """Shared noise: the tokens are those that the image's own noise draws from p, so the picture is that without drafts.

    The drafts are drawn from q with the same noise, which couples them to what p draws.
    """
    tokens = noise.draw(p, Purpose.TOKEN)
    return tokens, (tokens == draft).all(1)


def _log_prob(probs: Tensor, tokens: Tensor) -> Tensor:
    """Of all tokens together, float64 `[B]`."""
    return probs.gather(2, tokens[..., None])[..., 0].double().log().sum(1)
