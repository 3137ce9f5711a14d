"""Token recycling: draft from what the target predicted earlier after the same token.

Shape suffixes: B images, T tokens fed in one pass, K candidates kept, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.next_token.draft import Draft, Output, Step, Tree
from vargen.decoding.next_token.protocols import TokenModel
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import Sampling
from vargen.values import parse_int, short_repr


@dataclass
class _State:
    """State of B images.

    `candidates` int64 and `weights` float32, both `[B, V, K]`: the most probable tokens that the target last predicted after
    each token, with weights of 0 for tokens not seen yet. `fed` `[B, T]`: tokens fed in the current pass.
    """

    seeds: Tensor
    total: int
    candidates: Tensor
    weights: Tensor
    fed: Tensor


@dataclass(frozen=True)
class Recycle:
    """Draft from the target's latest distribution after the same token (Luo et al. 2024, token recycling).

    Every pass predicts what follows each fed token, including rejected draft tokens. The `kept` most probable candidates are
    stored per token, within the image. When the token occurs again, a draft token is sampled from them, and another one after
    that. The paper takes the most probable candidates and builds a tree; sampling with recorded probabilities is accepted more
    often where no token is likely, as in images. There is no draft after a token that has not occurred in the image.

    Args:
        drafts: draft tokens per pass, at least 1.
        kept: candidates stored per token, at least 1.

    Raises:
        ValueError: if a value is out of range. `bind` raises it if the chain does not fit the grid.
    """

    drafts: int = 3
    kept: int = 64
    topology: str = field(default="chain", init=False)

    def __post_init__(self) -> None:
        for name in ("drafts", "kept"):
            number = parse_int(getattr(self, name), 1)
            if number is None:
                raise ValueError(f"{name} must be a whole number of at least 1, got {short_repr(getattr(self, name))}")
            object.__setattr__(self, name, number)

    @property
    def max_fed(self) -> int:
        return self.drafts + 1

    def bind(self, model: TokenModel) -> Recycle:
        """Return this drafter.

        Raises:
            ValueError: if the chain does not fit after the first token of the grid.
        """
        self.check_grid(model.grid[0] * model.grid[1])
        return self

    def check_grid(self, tokens: int) -> None:
        """Raise ValueError unless the chain fits after the first token of a grid of `tokens` tokens."""
        if self.drafts >= tokens:
            raise ValueError(f"drafts must be from 1 to {tokens - 1}, one less than the grid's tokens, got {self.drafts}")

    def fitted(self, tokens: int) -> Recycle:
        """Return the drafter with a chain that fits after the first token of a grid of `tokens` tokens."""
        return replace(self, drafts=min(self.drafts, tokens - 1))

    def resized(self, window: int | str) -> Recycle:
        """Return this drafter unchanged: numbers apply to windows, and a chain has none."""
        return self

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> _State:
        rows, columns = model.grid
        shape = (len(seeds), model.vocab, min(self.kept, model.vocab))
        candidates = torch.zeros(shape, dtype=torch.int64, device=seeds.device)
        return _State(seeds, rows * columns, candidates, torch.zeros(shape, device=seeds.device), seeds[:, None])

    def propose(self, state: _State, tokens: Tensor, length: Tensor, step: int | Tensor) -> Draft:
        image = torch.arange(len(tokens), device=tokens.device)
        fed, probs = [tokens.gather(1, length[:, None] - 1)[:, 0]], []
        known = torch.ones_like(length, dtype=torch.bool)
        valid = []
        for slot in range(self.drafts):
            weights = state.weights[image, fed[-1]]  # [B, K]
            known = known & (weights.sum(1) > 0) & (length + slot < state.total)
            q = torch.zeros(len(tokens), state.weights.shape[1], device=tokens.device)
            q.scatter_add_(1, state.candidates[image, fed[-1]], weights)
            noise = Noise(state.seeds, (length + slot)[:, None], step)
            fed.append(torch.where(known, noise.draw(q[:, None], Purpose.DRAFT)[:, 0], 0))
            probs.append(q)
            valid.append(known)
        state.fed = torch.stack(fed, 1)
        return Draft(state.fed[:, 1:], Tree.of_chain(self.drafts, tokens.device), torch.stack(probs, 1), torch.stack(valid, 1))

    def observe(self, state: _State, step: Step) -> _State:
        """Store the target's most probable tokens after each fed token.

        If a token was fed twice, the slot nearer to the root counts.
        """
        image = torch.arange(len(state.fed), device=state.fed.device)
        weights, candidates = step.probs.topk(state.weights.shape[2], dim=2)
        weights = weights / weights.sum(2, keepdim=True)
        seen = step.noise.position < state.total
        if step.draft.valid is not None:
            seen = seen & torch.nn.functional.pad(step.draft.valid, (1, 0), value=True)
        for slot in reversed(range(state.fed.shape[1])):
            token, own = state.fed[:, slot], seen[:, slot, None]
            state.weights[image, token] = torch.where(own, weights[:, slot], state.weights[image, token])
            state.candidates[image, token] = torch.where(own, candidates[:, slot], state.candidates[image, token])
        return state
