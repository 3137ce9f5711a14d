"""Speculative drafting: a smaller model with the same vocabulary samples a chain, which the target verifies.

Leviathan et al. 2023; Chen et al. 2023. The draft model has its own cache, which is rolled back by moving its length pointer.
This module also has the drafter of `ar`, which drafts nothing.

Shape suffixes: B slots, S draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from vargen.decoding.interfaces import Drafter, TokenModel, require_same_tokens
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.token_pass import TokenState
from vargen.decoding.tree import Draft, Output, Tree
from vargen.values import number_field, short_repr


@dataclass(frozen=True)
class Sequential(Drafter):
    """Empty draft: each pass feeds the last token and commits the next one."""

    uses_probs = False
    width = 1
    empty: Draft = field(init=False, repr=False, compare=False)  # made by `bind`

    def bind(self, model: TokenModel, slots: int) -> Self:
        return self.copy(empty=Draft.make_empty(slots, model.vocab, torch.device(model.device)))

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        return self.empty


class ChainDrafter(Drafter):
    """Base class of drafters that propose a chain: frozen dataclasses with a field `length`, the draft tokens per pass.

    Attributes:
        chain: the tree of its drafts; made by `bind`.
    """

    length: int
    chain: Tree

    @property
    def width(self) -> int:
        return self.length + 1

    def bind(self, model: TokenModel, slots: int) -> Self:
        """Return a copy with `chain`, which ends with the grid."""
        length = max(1, min(self.length, model.grid[0] * model.grid[1] - 1))
        return self.copy(length=length, chain=Tree.make_chain(length, model.device))

    def sample_chain(self, predict: Callable[[Tensor, Tensor], Tensor], state: TokenState, noise: Noise) -> Draft:
        """Sample a chain token by token, which ends where no token is predicted.

        Args:
            predict: returns q float32 `[B, V]` of the token at `position` `[B, 1]`, given all `tokens` before it. A row of
                zeros predicts none.
        """
        tokens, start = state.tokens.clone(), state.length[:, None]
        exists = torch.ones_like(start, dtype=torch.bool)
        probs: list[Tensor] = []
        valid: list[Tensor] = []
        for slot in range(self.length):
            position = start + slot
            q = predict(tokens, position)
            exists = exists & (q.sum(1, keepdim=True) > 0) & (position < state.num_tokens)
            probs.append(torch.where(exists, q, 0.0))
            valid.append(exists)
            token = noise.shift(slot).sample(probs[-1][:, None], Purpose.DRAFT)
            tokens.scatter_(1, position, torch.where(exists, token, 0))
        drafted = tokens.gather(1, start + torch.arange(self.length, device=start.device))
        return Draft(drafted, self.chain, torch.stack(probs, 1), torch.cat(valid, 1))


@dataclass(frozen=True)
class Speculative(ChainDrafter):
    """Draft a chain with a smaller model.

    Args:
        length: draft tokens per pass, at least 1; each takes one pass of the draft model.
        model: the draft model. None: `draft_model` of the target, set by pipelines with a `draft_transformer`.
        shared_noise: sample draft tokens with the shared noise, which couples them to those of the target; for the rule
            `shared_noise`. By default draft tokens have their own uniforms.

    Raises:
        ValueError: if the length is below 1. `bind` raises it if the draft model is missing or has another vocabulary or grid.
    """

    length: int = number_field(4, 1, is_integer=True)
    model: TokenModel | None = None
    shared_noise: bool = False

    # Made by `bind`: trees of the passes; and by the first `reset`: the draft model's state.
    two: Tree = field(init=False, repr=False, compare=False)
    one: Tree = field(init=False, repr=False, compare=False)
    cache: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None and not isinstance(self.model, TokenModel):
            given = short_repr(self.model)
            raise TypeError(f"model must be a TokenModel, such as pipe.decoding_model(1.0), or None, got {given}")
        object.__setattr__(self, "provides", () if self.shared_noise else ("independent-per-pass",))

    def bind(self, model: TokenModel, slots: int) -> Self:
        small, device = require_draft_model(self.model or model.draft_model, model).bind(slots), model.device
        trees = {"two": Tree.make_chain(1, device), "one": Tree.make_chain(0, device)}
        return super().bind(model, slots).copy(model=small, cache=None, **trees)

    def reset(self, state: TokenState, rows: Tensor, condition: Any, first: Output) -> None:
        assert self.model is not None
        if self.cache is None:
            self.keep(cache=self.model.allocate(condition, max(2, self.length), len(state.seeds)))
        self.model.prefill(condition, self.cache, rows)

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        """Feed the last two committed tokens, then every draft token except the last.

        Two, because the draft model has not processed the last draft token of a fully accepted chain. The rollback discards
        the draft tokens that were not committed.
        """
        model, length, device = self.model, state.length, state.length.device
        assert model is not None
        start = torch.where(length < state.num_tokens, (length - 2).clamp(min=0), 0)  # a free slot reads nothing of its cache
        model.rollback(self.cache, start)
        pair = torch.arange(2, device=device)
        root = (length - 1 - start).clamp(max=1)[:, None]  # slot of the root: 0 when only one token is committed
        logits = model.forward(state.tokens.gather(1, start[:, None] + pair), self.cache, self.two).logits
        logits = logits.gather(1, root[..., None].expand(-1, -1, logits.shape[-1]))
        model.commit(self.cache, pair.expand(len(length), 2), root[:, 0] + 1, self.two)
        purpose = Purpose.TOKEN if self.shared_noise else Purpose.DRAFT
        drafted: list[Tensor] = []
        probs: list[Tensor] = []
        for drafts in range(self.length):
            if drafts:
                logits = model.forward(drafted[-1], self.cache, self.one).logits
                model.commit(self.cache, torch.zeros_like(length)[:, None], torch.ones_like(length), self.one)
            probs.append(state.sampling.probs(logits))
            drafted.append(noise.shift(drafts).sample(probs[-1], purpose))
        valid = length[:, None] + torch.arange(self.length, device=device) < state.num_tokens
        return Draft(torch.cat(drafted, 1), self.chain, torch.cat(probs, 1), valid)


def require_draft_model(small: TokenModel | None, model: TokenModel) -> TokenModel:
    """Return the draft model for a target.

    Raises:
        ValueError: if there is none, or its vocabulary or grid differs.
    """
    if small is None:
        raise ValueError(
            "speculative decoding needs a draft model, and this pipeline has none: load one with a draft_transformer, "
            "or pass Accelerator(drafter=Speculative(model=...))"
        )
    require_same_tokens("the draft model", small, model)
    return small
