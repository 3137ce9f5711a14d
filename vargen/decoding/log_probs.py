"""Log-probabilities of generated tokens, whatever method generated them.

Shape suffixes: B images, N tokens of the grid, T tokens fed in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vargen.compat import without_autocast
from vargen.decoding.interfaces import TokenModel
from vargen.decoding.sampling import Sampling, to_probs
from vargen.decoding.tree import Tree


@torch.no_grad()
@without_autocast
def compute_log_probs(
    model: TokenModel, condition: Any, tokens: Tensor, sampling: Sampling | None = None, *, width: int = 64
) -> tuple[Tensor, Tensor]:
    """Compute the log-probabilities of tokens, as policy-gradient training needs them, in passes over `width` known tokens.

    They are those of the target, and so of every exact method.

    Args:
        model, condition: as in `decode`; B rows.
        tokens: int64 `[B, N]`.
        sampling: temperature and filters. Default: the unfiltered softmax.
        width: number of tokens per pass, at least 1.

    Returns:
        Two tensors float32 `[B, N]`: under the sampling distribution, after guidance, temperature and filters (-inf for a token
        that the filters remove), and under the softmax of the guided logits.
    """
    sampling = Sampling() if sampling is None else sampling
    N = model.grid[0] * model.grid[1]
    if tokens.dim() != 2 or tokens.shape[1] != N:
        raise ValueError(f"tokens must be [B, {N}], got {list(tokens.shape)}")
    width = max(1, min(width, N))
    state, out = model.start(condition, width)
    logits, device = [out.logits], tokens.device
    for start in range(0, N - 1, width):
        fed = tokens[:, start : min(start + width, N - 1)]
        T = fed.shape[1]
        chain = Tree.make_chain(T - 1, device)
        logits.append(model.forward(fed, state, chain).logits)
        model.commit(
            state, torch.arange(T, device=device).expand(len(fed), T), torch.full((len(fed),), T, device=device), chain
        )
    whole = torch.cat(logits, 1)
    sampled = to_probs(whole, sampling).log().gather(2, tokens[..., None])[..., 0]
    plain = whole.float().log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    return sampled, plain
