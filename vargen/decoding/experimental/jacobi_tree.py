"""Second candidates: a Jacobi window with several candidates where the first is likely to be rejected (SJD-PAC 2026).

All slots of one depth share the candidates of that position, because the previous pass has one distribution for it. Once a path
is accepted, the window continues with the output of the pass along that path.

Shape suffixes: B slots, T tokens fed in one pass, L positions after the root, K candidates per position.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from vargen.decoding.experimental.small_model_tree import complete_tree
from vargen.decoding.interfaces import Drafter, TokenModel
from vargen.decoding.jacobi import Jacobi
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.token_pass import TokenState
from vargen.decoding.tree import Draft, Output, PassResult, Tree
from vargen.decoding.tree_drafters import exclude_earlier_siblings
from vargen.values import number_field


@dataclass(frozen=True)
class JacobiTree(Drafter):
    """Draft a tree from the output of the previous pass: `children` candidates at the first `depth` positions, then a chain.

    Args:
        nodes: number of draft tokens per pass.
        depth, children: of the complete tree below the root; a chain after its first leaf fills up the nodes.
        coupling: for the first candidates, see `Jacobi`. With `"gumbel"` the others are the next largest values of log q + G,
            with the shared noise G, for the rule `shared_noise`. Otherwise they are sampled without replacement.
    """

    topology = "tree"
    nodes: int = number_field(23, 1, 255, is_integer=True)
    depth: int = number_field(2, 1, 8, is_integer=True)
    children: int = number_field(2, 1, 8, is_integer=True)
    coupling: Literal["independent", "maximal", "gumbel"] = "maximal"

    # Made by `bind`; `continuation` int64 [T, L + 1]: the slots that predict the window if a slot is the last accepted one.
    jacobi: Jacobi = field(init=False, repr=False, compare=False)
    tree: Tree = field(init=False, repr=False, compare=False)
    continuation: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        Jacobi(2, self.coupling)
        if self.nodes < (least := self.num_branching):
            raise ValueError(f"nodes must be at least the {least} of the complete tree, got {self.nodes}")

    @property
    def width(self) -> int:
        return self.nodes + 1

    @property
    def num_branching(self) -> int:
        """Number of draft tokens at the positions that have several candidates."""
        return sum(self.children**level for level in range(1, self.depth + 1))

    def bind(self, model: TokenModel, slots: int) -> Self:
        longest = max(1, model.grid[0] * model.grid[1] - 1)
        small = replace(self, depth=min(self.depth, longest), children=min(self.children, model.vocab))
        chain = min(self.nodes - self.num_branching, longest - small.depth)
        fitted = replace(small, nodes=small.num_branching + chain)
        parents = complete_tree((fitted.children,) * fitted.depth)
        leaf, end = len(parents) - fitted.children**fitted.depth, len(parents)
        parents = (*parents, leaf, *range(end, fitted.nodes))[: fitted.width]
        tree = Tree.from_parents(parents)  # on the host, which reads it
        chains: dict[int, list[int]] = {0: []}  # by slot: itself and the slots after it along first children
        for slot, child in reversed([*enumerate(tree.children[:, 0].tolist())]):
            chains[slot] = [slot, *chains[child]]
        first = chains[0]
        rows = [first[:d] + chains[s] + first[d + len(chains[s]) :] for s, d in enumerate(tree.depth.tolist())]
        jacobi = Jacobi(max(2, len(first)), self.coupling).copy(uses_probs=True).bind(model, slots)
        return fitted.copy(
            jacobi=jacobi, tree=Tree.from_parents(parents, model.device), continuation=torch.tensor(rows, device=model.device)
        )

    def reset(self, state: TokenState, rows: Tensor, condition: Any, first: Output) -> None:
        self.jacobi.reset(state, rows, condition, first)

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        chain: Any = self.jacobi.propose(state, noise, self.jacobi.width)
        D, depth, rank = self.depth, self.tree.depth[1:] - 1, self.tree.sibling_rank[1:]
        others = chain.probs[:, :D].scatter(2, chain.tokens[:, :D, None], 0.0)
        purpose = Purpose.TOKEN if self.coupling == "gumbel" else Purpose.CHOICE
        noise = noise.shift(torch.arange(D, device=depth.device))
        further, value = noise.sample_without_replacement(others, self.children - 1, purpose)
        place = (1, 0, 0, chain.tokens.shape[1] - D)  # after the first candidate, at the first D of L positions
        candidates, exists = pad(further, place), pad(value > 0, place, value=True)
        candidates[..., 0] = chain.tokens
        drafted, q = candidates[:, depth, rank], chain.probs[:, depth]
        rest = exclude_earlier_siblings(q, drafted, drafted[:, None], self.tree.earlier_siblings[1:, 1:])
        probs = torch.where(rank[:, None] > 0, rest, q)
        return Draft(drafted, self.tree, probs, exists[:, depth, rank] & chain.valid[:, depth])

    def observe(self, state: TokenState, result: PassResult) -> None:
        """Pass a chain to the window: for each depth, the slot that predicts it, and the first candidates."""
        verdict, draft = result.verdict, cast(Any, result.draft)
        slots = self.continuation[verdict.path.gather(1, verdict.count[:, None] - 1)[:, 0]]  # [B, L + 1]
        image, first = torch.arange(len(slots), device=slots.device)[:, None], self.continuation[0]
        tokens, probs, valid = (each[:, first[1:] - 1] for each in (draft.tokens, draft.probs, draft.valid))
        chain = Draft(tokens, self.jacobi.chain(tokens.shape[1], tokens.device), probs, valid)
        noise = replace(result.noise, position=result.noise.position[:, first])
        sampled = None if verdict.sampled is None else verdict.sampled.gather(1, slots)
        verdict = replace(verdict, sampled=sampled)
        self.jacobi.observe(state, replace(result, draft=chain, probs=result.probs[image, slots], noise=noise, verdict=verdict))
