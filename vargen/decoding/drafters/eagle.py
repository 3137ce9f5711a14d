"""EAGLE drafting: a trained layer continues the target's features token by token (Li et al. 2024, arXiv:2401.15077).

It runs once over the tokens that the last pass committed, with the target's own features, and once for each further level of the
draft, with its own.

Shape suffixes: B images, R rows of the target (B times its guidance halves), A slots of an accepted path, S drafts, D width,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.draft import Draft, Output, Step, Tree
from vargen.decoding.drafters.features import Features, at_slot, trained
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.protocols import FeatureModel, TokenModel
from vargen.decoding.sampling import Sampling, to_probs
from vargen.values import shown, whole


@dataclass
class _State:
    model: FeatureModel
    held: Any
    features: Features
    sampling: Sampling
    seeds: Tensor
    total: int


@dataclass(frozen=True)
class EagleChain:
    """A chain of drafts.

    Args:
        length: drafted tokens a pass, 1 or more; each takes a pass of the trained layer.
        model: the trained drafter. None: the target's own, as a pipeline has it behind `load_drafter`.
        shared_noise: draw drafts with the image's own noise, which couples them to what the target draws with it: for the rule
            `shared_noise`. Otherwise the drafts have coins of their own.

    Raises:
        ValueError: for a length below 1; by `bind` for one that the grid does not hold, if there is no trained drafter, or one
            of another vocabulary or grid.
    """

    length: int = 4
    model: FeatureModel | None = None
    shared_noise: bool = False
    topology: str = field(default="chain", init=False)

    def __post_init__(self) -> None:
        if self.model is not None and (isinstance(self.model, type) or not isinstance(self.model, FeatureModel)):
            raise TypeError(f"model must be a FeatureModel, such as pipe.token_model(1.0).eagle, or None, got {shown(self.model)}")
        if not isinstance(self.shared_noise, bool):
            raise TypeError(f"shared_noise must be True or False, got {shown(self.shared_noise)}")
        length = whole(self.length, 1)
        if length is None:
            raise ValueError(f"length, the drafted tokens of a pass, must be a whole number of at least 1, got {shown(self.length)}")
        object.__setattr__(self, "length", length)

    @property
    def max_fed(self) -> int:
        return self.length + 1

    def bind(self, model: TokenModel) -> EagleChain:
        trained("eagle", self.model, model)
        self.check_grid(model.grid[0] * model.grid[1])
        return self

    def check_grid(self, tokens: int) -> None:
        """Raise ValueError unless a chain fits behind the first of so many tokens."""
        if self.length >= tokens:
            raise ValueError(f"length must be from 1 to {tokens - 1}, one less than the grid's tokens, got {shown(self.length)}")

    def fitted(self, tokens: int) -> EagleChain:
        """The drafter with a chain that fits behind the first of so many tokens."""
        return replace(self, length=min(self.length, tokens - 1))

    def resized(self, window: int | str) -> EagleChain:
        """This drafter: a chain has no window."""
        return self

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> _State:
        drafter = trained("eagle", self.model, model)
        held = drafter.start(len(seeds), self.max_fed)
        return _State(drafter, held, Features.first(first, len(seeds)), sampling, seeds, model.grid[0] * model.grid[1])

    def propose(self, state: _State, tokens: Tensor, length: Tensor, step: int) -> Draft:
        model, held, device = state.model, state.held, tokens.device
        purpose = Purpose.TOKEN if self.shared_noise else Purpose.DRAFT
        out = continued(model, held, state.features, tokens, length)
        drafted: list[Tensor] = []
        probs: list[Tensor] = []
        for drafts in range(self.length):
            if drafts:
                out = model.forward(drafted[-1], _features(out), held, Tree.of_chain(drafts, device))
            probs.append(to_probs(out.logits, state.sampling))
            drafted.append(Noise(state.seeds, length[:, None] + drafts, step).draw(probs[-1], purpose))
        model.commit(held, state.features.count.clamp(max=1))
        valid = length[:, None] + torch.arange(self.length, device=device) < state.total
        return Draft(torch.cat(drafted, 1), Tree.of_chain(self.length, device), torch.cat(probs, 1), valid)

    def observe(self, state: _State, step: Step) -> None:
        state.features.observe(step)


def continued(model: FeatureModel, held: Any, features: Features, tokens: Tensor, length: Tensor) -> Output:
    """Feed the newest tokens with the target's features, and keep all but the root, at which a draft begins.

    Returns:
        Logits `[B, 1, V]` and features `[R, 1, D]` of what follows the root.
    """
    A, device = features.held.shape[1], tokens.device
    place = (length - features.count)[:, None] + torch.arange(A, device=device)
    newest = tokens.gather(1, place.clamp(max=tokens.shape[1] - 1))
    out = model.forward(newest, features.held, held, Tree.of_chain(A - 1, device))
    last = (features.count - 1).clamp(min=0)  # a finished image has none
    model.commit(held, last)
    return Output(at_slot(out.logits, last), at_slot(_features(out), last))


def _features(output: Output) -> Tensor:
    assert output.features is not None  # a FeatureModel's always has them
    return output.features
