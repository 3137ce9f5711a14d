"""Acceptance rules that are a single function, by a decorator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from vargen.decoding.interfaces import AcceptanceRule, VerifyTokens
from vargen.decoding.noise import Noise
from vargen.decoding.tree import Draft, Verdict

VerifyFunction = Callable[[Tensor, Draft, Noise, Tensor], Verdict]


@dataclass(frozen=True)
class FunctionRule(AcceptanceRule):
    """An `AcceptanceRule` given by a single function that needs nothing from the model."""

    function: VerifyFunction
    exact: bool
    topologies: tuple[str, ...] = ("chain",)
    requires: tuple[str, ...] = ()
    sequential_tokens: bool = field(default=False, init=False)  # not part of the method's spec, which names the function
    leaves_first: bool = field(default=False, init=False)
    verify_tokens: VerifyTokens | None = field(default=None, init=False, repr=False)

    @property
    def __name__(self) -> str:
        return self.function.__name__

    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
        return self.function(probs, draft, noise, relaxation)


def acceptance_rule(
    *,
    exact: bool,
    topologies: tuple[str, ...] = ("chain",),
    requires: tuple[str, ...] = (),
    sequential_tokens: bool = False,
    leaves_first: bool = False,
    verify_tokens: VerifyTokens | None = None,
) -> Callable[[VerifyFunction], FunctionRule]:
    """Decorate a function as an `AcceptanceRule`; see there for the arguments."""

    def decorate(function: VerifyFunction) -> FunctionRule:
        rule = FunctionRule(function, exact, topologies, requires)
        object.__setattr__(rule, "sequential_tokens", sequential_tokens)
        object.__setattr__(rule, "leaves_first", leaves_first)
        object.__setattr__(rule, "verify_tokens", verify_tokens)
        return rule

    return decorate
