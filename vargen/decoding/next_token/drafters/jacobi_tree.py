"""Jacobi drafting of trees: several candidates at the positions where the first one is likely to be rejected.

The first candidates form a window as in `Jacobi`; second and third candidates come from the same stale probabilities. All slots
of one depth share the candidates of that position, because the previous pass has one distribution for it (SJD-PAC 2026,
proactive drafting). Once a path is accepted, the window continues with the output of the pass along that path.

Shape suffixes: B images, T tokens fed in one pass, L positions after the root, K candidates per position, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from vargen.decoding.interfaces import TokenModel
from vargen.decoding.next_token.drafters.base import TreeDrafter
from vargen.decoding.next_token.drafters.initial import InitialDraft
from vargen.decoding.next_token.drafters.jacobi import Coupling, Jacobi, JacobiState
from vargen.decoding.next_token.trees.children import exclude_earlier_siblings
from vargen.decoding.next_token.trees.shapes import DynamicTree, StaticTree, parse_shape
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import Sampling
from vargen.decoding.tree import Draft, Output, Step, Tree
from vargen.device import normal_tensors


class _WindowPlan(NamedTuple):
    """Index tables of a tree shape, on the device.

    Attributes:
        tree: the shape.
        depth, rank: int64 `[T - 1]`, of each draft token; depth counts from 0.
        later_siblings: int64, the draft tokens that have earlier siblings.
        first_children: int64 `[L]`, the slot of the first candidate of each position, along the path of first children.
        continuation_slots: int64 `[T, L + 1]`, for each last accepted slot: the slot whose output predicts each depth. It
            follows first children, and continues along those of the root where these end.
        num_branching: number of leading positions that may have more than one candidate.
    """

    tree: Tree
    depth: Tensor
    rank: Tensor
    later_siblings: Tensor
    first_children: Tensor
    continuation_slots: Tensor
    num_branching: int


@lru_cache(maxsize=16)
@normal_tensors()
def _plan_window(parents: tuple[int, ...], device: torch.device) -> _WindowPlan:
    shape = Tree.from_parents(parents)
    depth, rank, children = shape.depth.tolist(), shape.sibling_rank.tolist(), shape.children[:, 0].tolist()
    first = [0]
    while children[first[-1]]:
        first.append(children[first[-1]])
    continuation_slots = []
    for slot in range(len(parents)):
        row, at = list(first), slot
        for step in range(depth[slot], len(first)):
            row[step] = at
            at = children[at] or first[min(step + 1, len(first) - 1)]
        continuation_slots.append(row)
    num_branching = max((depth[slot] for slot in range(1, len(parents)) if rank[slot] > 0), default=0)
    tree = Tree.from_parents(parents, device)
    reached, table = (torch.tensor(rows, dtype=torch.int64, device=device) for rows in (first[1:], continuation_slots))
    later_siblings = (shape.sibling_rank[1:] > 0).nonzero()[:, 0].to(device)
    return _WindowPlan(tree, tree.depth[1:] - 1, tree.sibling_rank[1:], later_siblings, reached, table, num_branching)


@dataclass(frozen=True)
class JacobiTree(TreeDrafter):
    """Draft a tree from the output of the previous pass, with several candidates wherever the shape has siblings.

    Args:
        shape: a `StaticTree`, also given by name or by its parents, whose path of first children reaches its full depth; this
            path is the window.
        coupling, initial: for the first candidates, see `Jacobi`. With `"gumbel"` the other candidates are the next largest
            values of log q + G, with the shared noise G, for the rule `shared_noise`. Otherwise they are sampled without
            replacement, with their own uniforms.

    Raises:
        ValueError: if the shape is not of this form, or a name is unknown. `bind` raises it if the tree does not fit the grid,
            or a slot has more children than there are tokens.
    """

    shape: StaticTree | str | tuple[int, ...]
    coupling: Literal["independent", "maximal", "gumbel"] | Coupling = "maximal"
    initial: Literal["uniform"] | InitialDraft = "uniform"
    jacobi: Jacobi = field(init=False, repr=False, compare=False)  # drafts the first candidates; `bind` binds it, too

    def __post_init__(self) -> None:
        tree = self.tree_shape
        reached = len(_plan_window(tree.parents_tuple, torch.device("cpu")).first_children)
        if reached != tree.depth:
            raise ValueError(
                f"first children of a JacobiTree must reach its depth of {tree.depth}, got a shape where they end at {reached}"
            )
        object.__setattr__(self, "jacobi", Jacobi(2, self.coupling, self.initial))

    @property
    def tree_shape(self) -> StaticTree:
        tree = parse_shape(self.shape)
        if isinstance(tree, DynamicTree):
            raise TypeError("shape of a JacobiTree must be a StaticTree, got a DynamicTree")
        return tree

    @property
    def join_blocker(self) -> str | None:
        return self.jacobi.join_blocker

    def bind(self, model: TokenModel) -> Self:
        bound = replace(super().bind(model))
        object.__setattr__(bound, "jacobi", self.jacobi.bind(model))
        return bound

    def start(self, model: TokenModel, condition: Any, seeds: Tensor, sampling: Sampling, first: Output) -> JacobiState:
        return self.jacobi.start(model, condition, seeds, sampling, first)

    def propose(self, state: JacobiState, tokens: Tensor, length: Tensor, noise: Noise) -> Draft:
        plan = _plan_window(self.tree_shape.parents_tuple, tokens.device)
        chain = self.jacobi.propose_window(state, len(plan.first_children) + 1, tokens, length, noise)
        assert chain.probs is not None and chain.valid is not None
        candidates, exists = self._candidates(
            chain, noise.shift(torch.arange(plan.num_branching, device=tokens.device)), plan
        )  # padded to the same number at every position
        drafted, valid = candidates[:, plan.depth, plan.rank], exists[:, plan.depth, plan.rank]
        probs = chain.probs[:, plan.depth]
        if len(plan.later_siblings):
            rows = plan.later_siblings
            earlier = torch.arange(candidates.shape[-1], device=rows.device) < plan.rank[rows, None]
            siblings = candidates[:, plan.depth[rows]]
            probs = probs.index_copy_(1, rows, exclude_earlier_siblings(probs[:, rows], drafted[:, rows], siblings, earlier))
        return Draft(drafted, plan.tree, probs, valid & chain.valid[:, plan.depth])

    def _candidates(self, chain: Draft, noise: Noise, plan: _WindowPlan) -> tuple[Tensor, Tensor]:
        """Return the candidates of each position, `[B, L, K]`, that of the window first, and which of them exist."""
        assert chain.probs is not None
        tokens, K, num_branching = chain.tokens[..., None], plan.tree.max_children, plan.num_branching
        if K == 1:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        purpose = Purpose.TOKEN if self.coupling == "gumbel" else Purpose.CHOICE
        others = chain.probs[:, :num_branching].scatter(2, tokens[:, :num_branching], 0.0)
        further, value = noise.sample_without_replacement(others, K - 1, purpose)
        pad = (0, 0, 0, tokens.shape[1] - num_branching)
        further, value = torch.nn.functional.pad(further, pad), torch.nn.functional.pad(value, pad)
        return torch.cat([tokens, further], -1), torch.cat([torch.ones_like(tokens, dtype=torch.bool), value > 0], -1)

    def observe(self, state: JacobiState, step: Step) -> JacobiState:
        """Pass a chain to the window: for each depth, the slot that predicts it, and the first candidates."""
        verdict, draft = step.verdict, step.draft
        plan = _plan_window(self.tree_shape.parents_tuple, step.probs.device)
        image = torch.arange(len(step.probs), device=step.probs.device)[:, None]
        last = verdict.path.gather(1, verdict.count[:, None] - 1)[:, 0]
        slots = plan.continuation_slots[last]  # [B, L + 1]
        L, first = len(plan.first_children), plan.first_children - 1
        assert draft.probs is not None and draft.valid is not None
        chain = Draft(draft.tokens[:, first], Tree.make_chain(L, first.device), draft.probs[:, first], draft.valid[:, first])
        position = step.noise.position[:, :1] + torch.arange(L + 1, device=first.device)
        sampled = None if verdict.sampled is None else verdict.sampled.gather(1, slots)
        seen = replace(
            step,
            draft=chain,
            probs=step.probs[image, slots],
            features=None,
            verdict=replace(verdict, sampled=sampled),
            noise=replace(step.noise, position=position),
        )
        return self.jacobi.observe(state, seen)
