"""Whether passes are captured as CUDA graphs: where captured ones sample the tokens of eager ones."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.interfaces import TokenModel
from vargen.decoding.jacobi import Jacobi
from vargen.decoding.rules import speculative_sampling
from vargen.decoding.sampling import Sampling
from vargen.decoding.token_pass import TokenPass
from vargen.decoding.tree import Output, Tree
from vargen.kernels.graph import CUDAGraph
from vargen.kernels.host import Clock, captures_passes

logger = logging.getLogger("vargen")

PASSES = 12  # two images take more


class PairModel(TokenModel):
    """A model whose logits depend on the last token and, in its state, on the number of tokens before it."""

    vocab, grid = 64, (16, 16)

    def __init__(self, device: torch.device):
        self.device = device
        angles = torch.arange(64, device=device)[:, None] * torch.arange(1, 65, device=device)
        self.table = torch.sin(angles.float()) * 3

    def allocate(self, condition: Tensor, width: int, slots: int | None = None) -> Tensor:
        return torch.zeros(len(condition) if slots is None else slots, dtype=torch.int64, device=self.device)

    def prefill(self, condition: Tensor, state: Tensor, rows: Tensor | None = None) -> Output:
        state.index_fill_(0, torch.arange(len(state), device=self.device) if rows is None else rows, 0)
        return Output(self.table[condition][:, None])

    def forward(self, tokens: Tensor, state: Tensor, tree: Tree) -> Output:
        position = state[:, None] + tree.depth
        return Output(self.table[tokens] + torch.cos(position.float())[..., None] * self.table[0])

    def commit(self, state: Tensor, path: Tensor, count: Tensor, tree: Tree) -> None:
        state.add_(count)

    def rollback(self, state: Tensor, length: Tensor) -> None:
        state.copy_(length)


def make_graphs(device: torch.device) -> CUDAGraph | None:
    """Return what captures the passes of an engine on a device; None to run them one by one."""
    return CUDAGraph(device) if captures_passes(device) and find_capture_failure(device) is None else None


@lru_cache
def find_capture_failure(device: torch.device) -> str | None:
    """Return why captured passes do not sample the tokens of eager ones, with a warning; else None."""
    try:
        eager, captured = (sample_tokens(device, graph) for graph in (None, CUDAGraph(device)))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        failure = str(error)
    else:
        if torch.equal(eager, captured):
            return None
        failure = "captured passes sample other tokens than eager ones on this GPU; please report this"
    logger.warning("passes are run one by one instead of as a CUDA graph: %s", failure)
    return failure


@torch.no_grad()
def sample_tokens(device: torch.device, graph: Any) -> Tensor:
    """Return the tokens of two images, then of one with a third, int64 `[2, 2, N + W]`."""
    model, drafter = PairModel(device), Jacobi(4, "maximal")
    passes = TokenPass(model, drafter.bind(model, 2), speculative_sampling, 2, Clock(device, False), graph)
    conditions, seeds = torch.arange(2, device=device), torch.tensor([1, 2], device=device)
    passes.allocate(conditions)
    tokens = []
    for slots in ([0, 1], [1]):
        passes.start(slots, conditions[: len(slots)] + 5, seeds[: len(slots)], Sampling(0.9, top_k=40))
        for _ in range(PASSES):
            passes()
        tokens.append(passes.state.tokens.clone())
    return torch.stack(tokens)
