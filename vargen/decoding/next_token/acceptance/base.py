"""Turn a function into an acceptance rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from vargen.decoding.next_token.draft import Draft, Verdict
from vargen.decoding.next_token.protocols import AcceptanceRule
from vargen.decoding.noise import Noise

VerifyFunction = Callable[[Tensor, Draft, Noise, Tensor], Verdict]


@dataclass(frozen=True)
class FunctionRule(AcceptanceRule):
    """An `AcceptanceRule` given by a single function that needs nothing from the model."""

    function: VerifyFunction
    exact: bool
    topologies: tuple[str, ...] = ("chain",)
    requires: tuple[str, ...] = ()

    @property
    def __name__(self) -> str:
        return self.function.__name__

    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
        return self.function(probs, draft, noise, relaxation)


def acceptance_rule(
    *, exact: bool, topologies: tuple[str, ...] = ("chain",), requires: tuple[str, ...] = ()
) -> Callable[[VerifyFunction], FunctionRule]:
    """Decorate a function as an `AcceptanceRule`; see there for the arguments."""
    return lambda function: FunctionRule(function, exact, topologies, requires)
