"""Drafters that know nothing: they exercise the loop, which must return the same tokens whatever is drafted."""

from __future__ import annotations

import torch
from torch import Tensor

from vargen.decoding import Draft, Drafter, Noise, Tree


class GuessingDrafter(Drafter):
    """Random tokens in a fixed tree; siblings differ. `observe` records what it is shown."""

    def __init__(self, parents: tuple[int, ...], vocab: int, seed: int = 0):
        self.tree = Tree.from_parents(parents)
        self.topology = "chain" if self.tree.is_chain else "tree"
        self.vocab = vocab
        self.seed = seed
        self.verdicts: list = []

    @property
    def max_width(self) -> int:
        return len(self.tree.parents)

    def start(self, model, condition, seeds: Tensor, sampling, first) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def propose(self, state: torch.Generator, tokens: Tensor, length: Tensor, noise: Noise | None) -> Draft:
        B, T = len(tokens), len(self.tree.parents)
        # A random offset per parent plus the sibling's rank: different for siblings.
        rank = [sum(int(p) == int(self.tree.parents[t]) for p in self.tree.parents[:t]) for t in range(T)]
        start = torch.randint(self.vocab, (B, T), generator=state)
        drafted = (start[:, self.tree.parents.clamp_min(0)] + torch.tensor(rank)) % self.vocab
        return Draft(drafted[:, 1:], self.tree)

    def observe(self, state, step):
        self.verdicts.append(step.verdict)
        return state
