"""A function as an acceptance rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from vargen.decoding.next_token.draft import Draft, Verdict
from vargen.decoding.next_token.protocols import TokenModel
from vargen.decoding.noise import Noise

Judge = Callable[[Tensor, Draft, Noise, Tensor], Verdict]


@dataclass(frozen=True)
class FunctionRule:
    """An `AcceptanceRule` that is one function, and needs to know nothing of a model."""

    judge: Judge
    exact: bool
    topologies: tuple[str, ...]
    needs: tuple[str, ...] = ()  # of how drafts are drawn; see `OfferingDrafter`

    @property
    def __name__(self) -> str:
        return self.judge.__name__

    def bind(self, model: TokenModel) -> FunctionRule:
        return self

    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
        return self.judge(probs, draft, noise, relaxation)


def acceptance_rule(
    *, exact: bool, topologies: tuple[str, ...] = ("chain",), needs: tuple[str, ...] = ()
) -> Callable[[Judge], FunctionRule]:
    """Make a function an `AcceptanceRule`: does it keep the target's probabilities, what can it judge, and what does it need of
    how drafts are drawn (see `OfferingDrafter`)?"""
    return lambda judge: FunctionRule(judge, exact, topologies, needs)
