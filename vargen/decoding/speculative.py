"""Speculative drafting: a smaller model of the same vocabulary draws a chain that the target then judges.

Leviathan et al. 2023; Chen et al. 2023. The small model keeps a cache of its own, rolled back by moving its pointer.

Shape suffixes: B images, S drafts, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.cost import pass_costs
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import law
from vargen.decoding.types import Draft, Sampling, TokenModel, Tree, Verdict


@dataclass
class _State:
    model: TokenModel
    held: Any
    sampling: Sampling
    seeds: Tensor
    total: int


@dataclass(frozen=True)
class Speculative:
    """Drafts from a smaller model.

    Args:
        length: drafted tokens a pass, 1 or more; each takes a pass of the small model.
        model: the small model. None: the target's own `draft_model`, as a pipeline with a `draft_transformer` has it.
        shared_noise: draw drafts with the image's own noise, which couples them to what the target draws with it: for the rule
            `same_noise`. Otherwise the drafts have coins of their own.

    Raises:
        ValueError: for a length below 1; by `start` if there is no small model, or one of another vocabulary or grid.
    """

    length: int = 4
    model: TokenModel | None = None
    shared_noise: bool = False
    topology: str = field(default="chain", init=False)

    def __post_init__(self) -> None:
        if isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 1:
            raise ValueError(f"length, the drafted tokens of a pass, must be a whole number of at least 1, got {self.length!r}")

    @property
    def widest(self) -> int:
        return self.length + 1

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling) -> _State:
        small = self.model or getattr(model, "draft_model", None)
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
        held, _ = small.prefill(condition, max(2, self.length))
        return _State(small, held, sampling, seeds, model.grid[0] * model.grid[1])

    def cost(self, model: TokenModel, condition: Any, images: int) -> float:
        """Seconds of the small model's passes behind one draft, measured."""
        small = self.model or model.draft_model  # type: ignore[attr-defined]
        costs = pass_costs(small, condition, images, [1, 2])
        return costs[2] + (self.length - 1) * costs[1]

    def propose(self, state: _State, tokens: Tensor, length: Tensor, step: int) -> Draft:
        """Feeds the last two committed tokens, because the small model has not seen the last draft of a fully accepted chain;
        then each draft but the last."""
        model, held, device = state.model, state.held, tokens.device
        start = (length - 2).clamp(min=0)
        model.rollback(held, start)
        pair = tokens.gather(1, start[:, None] + torch.arange(2, device=device))
        root = (length - 1 - start)[:, None]  # slot of the root: 0 when only one token is committed
        two, one = Tree.of_chain(1, device), Tree.of_chain(0, device)
        logits = model.forward(pair, held, two)
        logits = logits.gather(1, root[..., None].expand(-1, -1, logits.shape[-1]))
        model.commit(held, torch.arange(2, device=device).expand(len(tokens), 2), root[:, 0] + 1, two)
        purpose = Purpose.TOKEN if self.shared_noise else Purpose.DRAFT
        drafted: list[Tensor] = []
        laws: list[Tensor] = []
        position = length[:, None]
        for drafts in range(self.length):
            if drafts:
                logits = model.forward(drafted[-1], held, one)
                model.commit(held, torch.zeros_like(length)[:, None], torch.ones_like(length), one)
            laws.append(law(logits, state.sampling))
            drafted.append(Noise(state.seeds, position + drafts, step).race(laws[-1], purpose))
        slots = torch.arange(self.length, device=device)
        valid = length[:, None] + slots < state.total
        return Draft(torch.cat(drafted, 1), Tree.of_chain(self.length, device), torch.cat(laws, 1), valid)

    def learn(self, state: _State, draft: Draft, law: Tensor, verdict: Verdict, noise: Noise) -> None:
        """Nothing to learn: the next proposal rolls the small model back to what was committed."""
