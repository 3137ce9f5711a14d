"""Routing by the latents of a draft, without decoding and scoring: the interface of routers, and their policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from vargen.decoding.video.policies import Policy, PolicyState, validate_share


class DraftView(NamedTuple):
    """Input of a router for one draft.

    Attributes:
        number: index of the block, above 0.
        latents: the draft, float `[1, F, C, Y, X]`.
        previous: the finished block before it. first: the one at the start of the video.
    """

    number: int
    latents: Tensor
    previous: Tensor
    first: Tensor


class DraftRouter(Protocol):
    """Ranks a draft: the share, in [0, 1], of drafts from which the target would gain less."""

    def __call__(self, view: DraftView) -> float: ...


@dataclass(frozen=True)
class LearnedRouting(Policy):
    """Accept a draft that a router ranks among the `share` of drafts from which the target would gain least.

    The score of a draft is 1 minus its rank.
    """

    share: float = 0.7
    needs_router = True

    def __post_init__(self) -> None:
        validate_share(self.share, "share")

    def start(self, seed: int) -> PolicyState:
        return PolicyState(1 - self.share)
