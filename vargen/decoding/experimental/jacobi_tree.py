"""Second candidates: a Jacobi window with several candidates where the first is likely to be rejected (SJD-PAC 2026).

All slots of one depth share the candidates of that position, because the previous pass has one distribution for it. Once a path
is accepted, the window continues with the output of the pass along that path.

Shape suffixes: B slots, T tokens fed in one pass, L positions after the root, K candidates per position.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from vargen.decoding.interfaces import Drafter, TokenModel
from vargen.decoding.jacobi import Jacobi
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.token_pass import TokenState
from vargen.decoding.tree import Draft, Output, PassResult, Tree
from vargen.decoding.tree_drafters import exclude_earlier_siblings
from vargen.values import number_field, validate_fields


@dataclass(frozen=True)
class JacobiTree(Drafter):
    """Draft a tree from the output of the previous pass: `children` candidates at the first `depth` positions, then a chain.

    Args:
        nodes: number of draft tokens per pass.
        depth, children: of the complete tree below the root; a chain after its first leaf fills up the nodes.
        coupling: for the first candidates, see `Jacobi`. With `"gumbel"` the others are the next largest values of log q + G,
            with the shared noise G, for the rule `shared_noise`. Otherwise they are sampled without replacement, with their own
            uniforms.

    Raises:
        ValueError: if a value is out of range. `bind` raises it if the tree does not fit the grid or the vocabulary.
    """

    topology = "tree"

    nodes: int = number_field(23, 1, 255, is_integer=True)
    depth: int = number_field(2, 1, 8, is_integer=True)
    children: int = number_field(2, 1, 8, is_integer=True)
    coupling: Literal["independent", "maximal", "gumbel"] = "maximal"

    # Made by `bind`: the window, and tensors int64: depth (from 0) and rank of each draft token, the draft tokens along first
    # children, and by slot [T, L + 1] the slots whose outputs predict each position if it is the last accepted one.
    jacobi: Jacobi = field(init=False, repr=False, compare=False)
    tree: Tree = field(init=False, repr=False, compare=False)
    place: tuple[Tensor, Tensor] = field(init=False, repr=False, compare=False)
    first: Tensor = field(init=False, repr=False, compare=False)
    continuation: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        validate_fields(self)
        Jacobi(2, self.coupling)
        inner = _count_complete(self.children, self.depth)
        if self.nodes < inner:
            raise ValueError(
                f"nodes must be at least {inner} for {self.children} children to depth {self.depth}, got {self.nodes}"
            )

    @property
    def width(self) -> int:
        return self.nodes + 1

    def _parents(self) -> list[int]:
        parents = [-1, *(slot // self.children for slot in range(_count_complete(self.children, self.depth)))]
        leaf = len(parents) - self.children**self.depth  # the first of the deepest slots
        return [*parents, *(slot - 1 if slot > len(parents) else leaf for slot in range(len(parents), self.width))]

    def fit_to_grid(self, tokens: int, vocab: int | None = None) -> Self:
        depth, children = min(self.depth, tokens - 1), min(self.children, vocab or self.children)
        chain = min(self.nodes - _count_complete(self.children, self.depth), tokens - 1 - depth)
        return replace(self, nodes=_count_complete(children, depth) + chain, depth=depth, children=children)

    def bind(self, model: TokenModel, slots: int) -> Self:
        N, parents = model.grid[0] * model.grid[1], self._parents()
        shape = Tree.from_parents(tuple(parents))
        if shape.max_path > N or self.children > model.vocab:
            raise ValueError(f"nodes, depth and children must fit {N} tokens of {model.vocab}, got {self}")
        depth, child = shape.depth.tolist(), shape.children[:, 0].tolist()
        first = [0]
        while child[first[-1]]:
            first.append(child[first[-1]])
        rows = []
        for slot in range(self.width):
            row, at = list(first), slot
            for step in range(depth[slot], len(first)):
                row[step] = at
                at = child[at] or first[min(step + 1, len(first) - 1)]
            rows.append(row)
        tree, device = Tree.from_parents(tuple(parents), model.device), model.device
        jacobi = Jacobi(len(first), self.coupling).copy(uses_probs=True).bind(model, slots)
        return self.copy(
            jacobi=jacobi,
            tree=tree,
            place=(tree.depth[1:] - 1, tree.sibling_rank[1:]),
            first=torch.tensor(first[1:], device=device) - 1,
            continuation=torch.tensor(rows, device=device),
        )

    def reset(self, state: TokenState, rows: Tensor, condition: Any, first: Output) -> None:
        self.jacobi.reset(state, rows, condition, first)

    def propose(self, state: TokenState, noise: Noise, width: int) -> Draft:
        chain = self.jacobi.propose(state, noise, len(self.first) + 1)
        assert chain.probs is not None and chain.valid is not None
        (depth, rank), D = self.place, self.depth
        noise = noise.shift(torch.arange(D, device=depth.device))
        tokens = chain.tokens[..., None]
        others = chain.probs[:, :D].scatter(2, tokens[:, :D], 0.0)
        purpose = Purpose.TOKEN if self.coupling == "gumbel" else Purpose.CHOICE
        further, value = noise.sample_without_replacement(others, self.children - 1, purpose)
        below = (0, 0, 0, tokens.shape[1] - D)
        candidates = torch.cat([tokens, pad(further, below)], -1)
        exists = torch.cat([torch.ones_like(tokens, dtype=torch.bool), pad(value > 0, below)], -1)
        drafted, probs = candidates[:, depth, rank], chain.probs[:, depth]
        earlier = torch.arange(self.children, device=depth.device) < rank[:, None]
        excluded = exclude_earlier_siblings(probs, drafted, candidates[:, depth], earlier)
        probs = torch.where(rank[:, None] > 0, excluded, probs)
        return Draft(drafted, self.tree, probs, exists[:, depth, rank] & chain.valid[:, depth])

    def observe(self, state: TokenState, result: PassResult) -> None:
        """Pass a chain to the window: for each depth, the slot that predicts it, and the first candidates."""
        verdict, draft, first = result.verdict, result.draft, self.first
        last = verdict.path.gather(1, verdict.count[:, None] - 1)[:, 0]
        slots = self.continuation[last]  # [B, L + 1]
        assert draft.probs is not None and draft.valid is not None
        tree = self.jacobi.chain(len(first), first.device)
        chain = Draft(draft.tokens[:, first], tree, draft.probs[:, first], draft.valid[:, first])
        position = result.noise.position[:, :1] + torch.arange(len(first) + 1, device=first.device)
        sampled = None if verdict.sampled is None else verdict.sampled.gather(1, slots)
        image = torch.arange(len(slots), device=slots.device)[:, None]
        seen = replace(result, draft=chain, probs=result.probs[image, slots], verdict=replace(verdict, sampled=sampled))
        self.jacobi.observe(state, replace(seen, noise=replace(result.noise, position=position)))


def _count_complete(children: int, depth: int) -> int:
    """Number of slots of a complete tree, without the root."""
    return sum(children**level for level in range(1, depth + 1))
