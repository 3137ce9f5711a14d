"""Medusa drafting: trained heads predict several tokens ahead from one feature of the target (Cai et al. 2024, arXiv:2401.10774).

The feature is that by which the root was drawn, so a pass leaves all that the next draft needs.

Shape suffixes: B images, R rows of the target (B times its guidance halves), S drafts, h heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.draft import Draft, Output, Step, Tree
from vargen.decoding.drafters.features import Features, trained
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.protocols import FeatureHeads, TokenModel
from vargen.decoding.sampling import Sampling, to_probs
from vargen.values import shown, whole


@dataclass
class _State:
    model: FeatureHeads
    features: Features
    sampling: Sampling
    seeds: Tensor
    total: int


@dataclass(frozen=True)
class MedusaChain:
    """A chain of drafts, one of each head.

    Args:
        length: drafted tokens a pass, at most the number of heads. None: one of each head.
        model: the trained heads. None: the target's own, as a pipeline has them behind `load_drafter`.
        shared_noise: as of `EagleChain`.

    Raises:
        ValueError: for a length below 1; by `bind` for one above the number of heads, or if there are no trained heads, or of
            another vocabulary or grid.
    """

    length: int = 3
    model: FeatureHeads | None = None
    shared_noise: bool = False
    topology: str = field(default="chain", init=False)

    def __post_init__(self) -> None:
        if self.model is not None and (isinstance(self.model, type) or not isinstance(self.model, FeatureHeads)):
            raise TypeError(f"model must be FeatureHeads, such as pipe.token_model(1.0).medusa, or None, got {shown(self.model)}")
        if not isinstance(self.shared_noise, bool):
            raise TypeError(f"shared_noise must be True or False, got {shown(self.shared_noise)}")
        length = whole(self.length, 1)
        if length is None:
            raise ValueError(f"length, the drafted tokens of a pass, must be a whole number of at least 1, got {shown(self.length)}")
        object.__setattr__(self, "length", length)

    @property
    def max_fed(self) -> int:
        return self.length + 1

    def bind(self, model: TokenModel) -> MedusaChain:
        heads = trained("medusa", self.model, model)
        if self.length > heads.heads:
            raise ValueError(f"length must be from 1 to the drafter's {heads.heads} heads, got {shown(self.length)}")
        self.check_grid(model.grid[0] * model.grid[1])
        return self

    def check_grid(self, tokens: int) -> None:
        """Raise ValueError unless a chain fits behind the first of so many tokens."""
        if self.length >= tokens:
            raise ValueError(f"length must be from 1 to {tokens - 1}, one less than the grid's tokens, got {shown(self.length)}")

    def fitted(self, tokens: int) -> MedusaChain:
        """The drafter with a chain that fits behind the first of so many tokens."""
        return replace(self, length=min(self.length, tokens - 1))

    def resized(self, window: int | str) -> MedusaChain:
        """This drafter: a chain has no window."""
        return self

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> _State:
        heads = trained("medusa", self.model, model)
        return _State(heads, Features.first(first, len(seeds)), sampling, seeds, model.grid[0] * model.grid[1])

    def propose(self, state: _State, tokens: Tensor, length: Tensor, step: int) -> Draft:
        root = length - 1
        logits = state.model.forward(tokens.gather(1, root[:, None])[:, 0], state.features.last(), root)[:, : self.length]
        probs = to_probs(logits, state.sampling)
        position = length[:, None] + torch.arange(self.length, device=tokens.device)
        purpose = Purpose.TOKEN if self.shared_noise else Purpose.DRAFT
        drafted = Noise(state.seeds, position, step).draw(probs, purpose)
        return Draft(drafted, Tree.of_chain(self.length, tokens.device), probs, position < state.total)

    def observe(self, state: _State, step: Step) -> None:
        state.features.observe(step)
