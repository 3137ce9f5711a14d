"""Turn a function into an acceptance rule."""

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
    """An `AcceptanceRule` given by a single function that needs nothing from the model."""

    judge: Judge
    exact: bool
    topologies: tuple[str, ...]
    needs: tuple[str, ...] = ()  # what it requires of the drafter's sampling; see `OfferingDrafter`

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
    """Decorate a function as an `AcceptanceRule`.

    Args:
        exact: whether the output is distributed as the target.
        topologies: which drafts it can verify, of `"chain"` and `"tree"`.
        needs: what it requires of how drafts are sampled; see `OfferingDrafter`.
    """
    return lambda judge: FunctionRule(judge, exact, topologies, needs)
