"""Speculative drafting: a smaller model of the same vocabulary draws a chain that the target then judges.

Leviathan et al. 2023; Chen et al. 2023. The small model keeps a cache of its own, rolled back by moving its pointer.

Shape suffixes: B images, S drafts, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from vargen.decoding.by_cost import ByCost, Geometric
from vargen.decoding.cost import pass_costs
from vargen.decoding.draft import Draft, Output, Step, Tree
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.protocols import TokenModel
from vargen.decoding.sampling import Sampling, to_probs
from vargen.values import shown, whole

_LONGEST = 8  # drafts of an automatic chain


def _drafting(small: dict[int, float], drafts: int) -> float:
    """Seconds of the small model's passes behind a chain: one over two tokens (see `propose`), then one a draft."""
    return small[2] + (drafts - 1) * small[1] if drafts else 0.0


@dataclass
class _State:
    model: TokenModel
    held: Any
    sampling: Sampling
    seeds: Tensor
    total: int
    length: int
    choice: ByCost | None


@dataclass(frozen=True)
class Speculative:
    """Drafts from a smaller model.

    Args:
        length: drafted tokens a pass, 1 or more; each takes a pass of the small model. Or `"auto"`: up to 8, whatever draws
            most tokens a second by the measured cost of both models' passes and recent acceptance, and none from where
            drafting does not pay. That follows a clock and the batch, as the window `Auto` does: the
            distribution is the same, but a picture repeats only with the rule `shared_noise`. On a GPU the length is settled
            before the first pass.
        model: the small model. None: the target's own `draft_model`, as a pipeline with a `draft_transformer` has it.
        shared_noise: draw drafts with the image's own noise, which couples them to what the target draws with it: for the rule
            `shared_noise`. Otherwise the drafts have coins of their own.

    Raises:
        ValueError: for a length below 1; by `bind` for one that the grid does not hold, if there is no small model, or one of
            another vocabulary or grid.
    """

    length: int | Literal["auto"] = 4
    model: TokenModel | None = None
    shared_noise: bool = False
    topology: str = field(default="chain", init=False)

    def __post_init__(self) -> None:
        if self.model is not None and (isinstance(self.model, type) or not isinstance(self.model, TokenModel)):
            raise TypeError(f"model must be a TokenModel, such as pipe.token_model(1.0), or None, got {shown(self.model)}")
        if not isinstance(self.shared_noise, bool):
            raise TypeError(f"shared_noise must be True or False, got {shown(self.shared_noise)}")
        if isinstance(self.length, str) and self.length == "auto":
            return
        length = whole(self.length, 1)
        if length is None:
            given = shown(self.length)
            raise ValueError(
                f"length, the drafted tokens of a pass, must be a whole number of at least 1, or 'auto', got {given}"
            )
        object.__setattr__(self, "length", length)

    @property
    def longest(self) -> int:
        return _LONGEST if isinstance(self.length, str) else self.length

    @property
    def max_fed(self) -> int:
        return self.longest + 1

    @property
    def offers(self) -> tuple[str, ...]:
        """See `OfferingDrafter`."""
        return () if self.shared_noise else ("fresh",)

    def small_model(self, model: TokenModel) -> TokenModel:
        """The small model that drafts for `model`.

        Raises:
            ValueError: if there is none, or it has another vocabulary or grid.
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

    def bind(self, model: TokenModel) -> Speculative:
        """This drafter.

        Raises:
            ValueError: if there is no small model that fits, or the chain does not fit behind the first token of the grid.
        """
        self.small_model(model)
        self.check_grid(model.grid[0] * model.grid[1])
        return self

    def check_grid(self, tokens: int) -> None:
        """Raise ValueError unless a chain fits behind the first of so many tokens."""
        if not isinstance(self.length, str) and self.length >= tokens:
            given = shown(self.length)
            raise ValueError(f"length must be from 1 to {tokens - 1}, one less than the grid's tokens, got {given}")

    def fitted(self, tokens: int) -> Speculative:
        """The drafter with a chain that fits behind the first of so many tokens."""
        return replace(self, length=tokens - 1) if not isinstance(self.length, str) and self.length >= tokens else self

    def resized(self, window: int | str) -> Speculative:
        """`"auto"` sets the length; numbers are for windows, and a chain has none."""
        return replace(self, length="auto") if window == "auto" else self

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> _State:
        small, choice, length = self.small_model(model), None, self.longest
        if isinstance(self.length, str):
            images = len(seeds)
            costs = pass_costs(model, condition, images, range(1, _LONGEST + 2))
            drafting = pass_costs(small, condition, images, [1, 2])
            steps = {fed: seconds + _drafting(drafting, fed - 1) for fed, seconds in costs.items()}
            choice = ByCost(steps, Geometric())
            length = choice.next() - 1
        held, _ = small.prefill(condition, max(2, self.longest))
        return _State(small, held, sampling, seeds, model.grid[0] * model.grid[1], length, choice)

    def cost(self, model: TokenModel, condition: Any, images: int, drafts: int) -> float:
        """Seconds of the small model's passes behind a chain of `drafts`, measured."""
        return _drafting(pass_costs(self.small_model(model), condition, images, [1, 2]), drafts)

    def propose(self, state: _State, tokens: Tensor, length: Tensor, step: int | Tensor) -> Draft:
        """Feeds the last two committed tokens, because the small model has not seen the last draft of a fully accepted chain;
        then each draft but the last."""
        model, held, device = state.model, state.held, tokens.device
        if state.length == 0:
            return Draft.empty(len(tokens), model.vocab, device)
        start = (length - 2).clamp(min=0)
        model.rollback(held, start)
        pair = tokens.gather(1, start[:, None] + torch.arange(2, device=device))
        root = (length - 1 - start)[:, None]  # slot of the root: 0 when only one token is committed
        two, one = Tree.of_chain(1, device), Tree.of_chain(0, device)
        logits = model.forward(pair, held, two).logits
        logits = logits.gather(1, root[..., None].expand(-1, -1, logits.shape[-1]))
        model.commit(held, torch.arange(2, device=device).expand(len(tokens), 2), root[:, 0] + 1, two)
        purpose = Purpose.TOKEN if self.shared_noise else Purpose.DRAFT
        drafted: list[Tensor] = []
        probs: list[Tensor] = []
        position = length[:, None]
        for drafts in range(state.length):
            if drafts:
                logits = model.forward(drafted[-1], held, one).logits
                model.commit(held, torch.zeros_like(length)[:, None], torch.ones_like(length), one)
            probs.append(to_probs(logits, state.sampling))
            drafted.append(Noise(state.seeds, position + drafts, step).draw(probs[-1], purpose))
        slots = torch.arange(state.length, device=device)
        valid = length[:, None] + slots < state.total
        return Draft(torch.cat(drafted, 1), Tree.of_chain(state.length, device), torch.cat(probs, 1), valid)

    def observe(self, state: _State, step: Step) -> None:
        """Of the drafts nothing: the next proposal rolls the small model back to what was committed."""
        if state.choice and step.count.device.type == "cpu":
            state.choice.observe(step.verdict.count, step.noise.position[:, 0] < state.total)
            state.length = state.choice.next() - 1
