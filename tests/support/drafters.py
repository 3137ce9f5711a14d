"""Drafters that know nothing: they exercise the loop, which must return the same tokens whatever is drafted."""

from __future__ import annotations

from typing import Any, Self

import torch

from vargen.decoding import Draft, Drafter, Noise, PassResult, TokenState, Tree, Verdict


class GuessingDrafter(Drafter):
    """Random tokens in a fixed tree; siblings differ. `observe` records what it is shown."""

    def __init__(self, parents: tuple[int, ...], vocab: int, seed: int = 0):
        self.tree, self.vocab, self.seed = Tree.from_parents(parents), vocab, seed
        self.topology = "chain" if self.tree.is_chain else "tree"
        self.verdicts: list[Verdict] = []

    @property
    def width(self) -> int:
        return len(self.tree.parents)

    def bind(self, model: Any, slots: int) -> Self:
        return self.copy(generator=torch.Generator().manual_seed(self.seed))

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        return self.guess(len(state.seeds), self.generator)  # type: ignore[attr-defined]

    def guess(self, images: int, generator: torch.Generator) -> Draft:
        T = len(self.tree.parents)
        # A random offset per parent plus the sibling's rank: different for siblings.
        rank = [sum(int(p) == int(self.tree.parents[t]) for p in self.tree.parents[:t]) for t in range(T)]
        start = torch.randint(self.vocab, (images, T), generator=generator)
        drafted = (start[:, self.tree.parents.clamp_min(0)] + torch.tensor(rank)) % self.vocab
        return Draft(drafted[:, 1:], self.tree)

    def observe(self, state: TokenState, result: PassResult) -> None:
        self.verdicts.append(result.verdict)
