"""Speculative drafting: a smaller model with the same vocabulary samples a chain, which the target verifies.

Leviathan et al. 2023; Chen et al. 2023. The draft model has its own cache, which is rolled back by moving its length pointer.

Shape suffixes: B images, S draft tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from vargen.decoding.interfaces import TokenModel
from vargen.decoding.next_token.drafters.base import ChainDrafter
from vargen.decoding.next_token.graphs import register_state
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import Sampling, to_probs
from vargen.decoding.tree import Draft, Output, Tree
from vargen.values import parse_float, parse_int, short_repr


@register_state
@dataclass
class DraftModelState:
    cache: Any
    sampling: Sampling
    num_tokens: int


@dataclass(frozen=True)
class Speculative(ChainDrafter):
    """Draft a chain with a smaller model.

    Args:
        length: draft tokens per pass, at least 1; each takes one pass of the draft model.
        model: the draft model. None: `draft_model` of the target, set by pipelines with a `draft_transformer`.
        shared_noise: sample draft tokens with the shared noise, which couples them to those of the target; for the rule
            `shared_noise`. By default draft tokens have their own uniforms.

    Raises:
        ValueError: if the length is below 1. `bind` raises it if the chain does not fit the grid, or the draft model is missing
            or has another vocabulary or grid.
    """

    length: int = 4
    model: TokenModel | None = None
    shared_noise: bool = False

    def __post_init__(self) -> None:
        if self.model is not None and (isinstance(self.model, type) or not isinstance(self.model, TokenModel)):
            given = short_repr(self.model)
            raise TypeError(f"model must be a TokenModel, such as pipe.decoding_model(1.0), or None, got {given}")
        if not isinstance(self.shared_noise, bool):
            raise TypeError(f"shared_noise must be True or False, got {short_repr(self.shared_noise)}")
        length = parse_int(self.length, 1)
        if length is None:
            raise ValueError(f"length must be a whole number of at least 1, got {short_repr(self.length)}")
        object.__setattr__(self, "length", length)

    @property
    def provides(self) -> tuple[str, ...]:
        return () if self.shared_noise else ("independent-per-pass",)

    def require_draft_model(self, model: TokenModel) -> TokenModel:
        """Return the draft model for `model`.

        Raises:
            ValueError: if there is none, or its vocabulary or grid differs.
        """
        small = self.model or model.draft_model
        if small is None:
            raise ValueError(
                "speculative decoding needs a draft model, and this pipeline has none: load one with a draft_transformer, "
                "or pass Accelerator(drafter=Speculative(model=...))"
            )
        if (small.vocab, small.grid) != (model.vocab, model.grid):
            raise ValueError(
                f"the draft model must share the target's vocabulary and grid, {model.vocab} tokens on {model.grid}, "
                f"got {small.vocab} on {small.grid}"
            )
        return small

    def bind(self, model: TokenModel) -> Self:
        """Return the drafter with its draft model.

        Raises:
            ValueError: if there is no matching draft model, or the chain does not fit after the first token of the grid.
        """
        draft_model, bound = self.require_draft_model(model), replace(super().bind(model))
        object.__setattr__(bound, "model", draft_model)
        return bound

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> DraftModelState:
        draft_model = self.model
        assert draft_model is not None
        cache, _ = draft_model.prefill(condition, max(2, self.length))
        return DraftModelState(cache, sampling, model.grid[0] * model.grid[1])

    def propose(self, state: DraftModelState, tokens: Tensor, length: Tensor, noise: Noise) -> Draft:
        """Feed the last two committed tokens, then every draft token except the last.

        Two, because the draft model has not processed the last draft token of a fully accepted chain. The rollback discards
        the draft tokens that were not committed.
        """
        model, cache, device = self.model, state.cache, tokens.device
        assert model is not None
        start = (length - 2).clamp(min=0)
        model.rollback(cache, start)
        pair = tokens.gather(1, start[:, None] + torch.arange(2, device=device))
        root = (length - 1 - start)[:, None]  # slot of the root: 0 when only one token is committed
        two, one = Tree.make_chain(1, device), Tree.make_chain(0, device)
        logits = model.forward(pair, cache, two).logits
        logits = logits.gather(1, root[..., None].expand(-1, -1, logits.shape[-1]))
        model.commit(cache, torch.arange(2, device=device).expand(len(tokens), 2), root[:, 0] + 1, two)
        purpose = Purpose.TOKEN if self.shared_noise else Purpose.DRAFT
        drafted: list[Tensor] = []
        probs: list[Tensor] = []
        for drafts in range(self.length):
            if drafts:
                logits = model.forward(drafted[-1], cache, one).logits
                model.commit(cache, torch.zeros_like(length)[:, None], torch.ones_like(length), one)
            probs.append(to_probs(logits, state.sampling))
            drafted.append(noise.shift(drafts).sample(probs[-1], purpose))
        slots = torch.arange(self.length, device=device)
        valid = length[:, None] + slots < state.num_tokens
        return Draft(torch.cat(drafted, 1), Tree.make_chain(self.length, device), torch.cat(probs, 1), valid)


@dataclass(frozen=True)
class LayerSkip(Speculative):
    """Draft a chain with the target itself, skipping some of its layers (Zhang et al. 2023, Draft & Verify).

    The reduced network is a draft model that needs no training and no memory for weights; it has its own cache.

    Args:
        length, shared_noise: see `Speculative`.
        skip: fraction of layers to skip, between 0 and 1 exclusive, spread evenly while keeping the first two and the last,
            which matter most. Alternatively explicit layer indices from 0, `(3, 5, 6)` or `"3+5+6"`.

    Raises:
        ValueError: if the fraction or the indices are invalid. `bind` raises it if the model cannot skip layers, or lacks
            these.
    """

    model: TokenModel | None = field(default=None, init=False, repr=False)
    skip: float | str | tuple[int, ...] = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        share = parse_float(self.skip)
        if share is None:
            parts = self.skip.split("+") if isinstance(self.skip, str) else self.skip
            found = [_layer(part) for part in parts] if isinstance(parts, list | tuple) else []
            if not found or None in found or len(set(found)) < len(found):
                given = short_repr(self.skip)
                raise ValueError(f"skip must be a fraction of the layers, or layers, each once, as in '3+5+6', got {given}")
            object.__setattr__(self, "skip", tuple(found))
            return
        if not 0 < share < 1:
            raise ValueError(f"skip, a fraction of the layers, must be above 0 and below 1, got {short_repr(self.skip)}")
        object.__setattr__(self, "skip", share)

    def select_layers(self, count: int) -> tuple[int, ...]:
        """Return the indices of the skipped layers out of `count`."""
        if isinstance(self.skip, tuple):
            return self.skip
        assert isinstance(self.skip, float)
        first, last = min(2, count - 2), count - 2
        num_skipped = max(1, min(round(self.skip * count), last - first + 1))
        return tuple(torch.linspace(last, first, num_skipped, dtype=torch.float32).round().int().sort().values.tolist())

    def require_draft_model(self, model: TokenModel) -> TokenModel:
        """Return the target without the skipped layers.

        Raises:
            ValueError: if it cannot skip layers, or lacks these.
        """
        if model.num_layers < 3:
            raise ValueError(f"skip needs a model with at least three layers that can be skipped, got {model.num_layers}")
        return model.skip_layers(self.select_layers(model.num_layers))


def _layer(given: Any) -> int | None:
    return int(given) if isinstance(given, str) and given.isdecimal() and len(given) < 9 else parse_int(given, 0)
