"""Steps of the token loop beside its pass as compiled functions, where `vargen.kernels.cpu_code` has loaded them.

A pass of less than a millisecond evicts what the interpreter needs from the caches, so that each small operation after it costs
several microseconds.

Shape suffixes: B images, T positions, A slots on the longest path, N tokens of the grid.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vargen.decoding.compiled_sampling import compiled_steps
from vargen.decoding.next_token.draft import Draft, Verdict
from vargen.decoding.noise import Noise, Purpose


def verify_chain(sampled: Tensor, draft: Draft) -> Verdict | None:
    """The verdict of `shared_noise` on a chain, given the tokens int64 `[B, T]` that the noise selects.

    Returns None where no compiled function does it.
    """
    if (compiled := compiled_steps(sampled)) is None:
        return None
    count, next_token = np.empty(len(sampled), np.int64), np.empty(len(sampled), np.int64)
    compiled.verify_chain(np.ascontiguousarray(sampled.numpy()), np.ascontiguousarray(draft.tokens.numpy()), count, next_token)
    path = draft.tree.depth.expand_as(sampled)
    return Verdict(path, torch.from_numpy(count), torch.from_numpy(next_token), sampled=sampled)


def draft_window(resampled: Tensor, num_committed: Tensor, noise: Noise, vocab: int) -> Tensor | None:
    """Shift the committed tokens out of a Jacobi window, and draft new positions uniformly; None as above.

    Args:
        resampled, num_committed: int64 `[B, T]` and `[B]`, of the last pass.
        noise: of the S draft tokens.

    Returns:
        int64 `[B, S]`.
    """
    if (compiled := compiled_steps(resampled)) is None or (keys := noise.seed_keys(Purpose.DRAFT)) is None:
        return None
    drafted = np.empty(noise.position.shape, np.int64)
    arrays = (resampled.numpy(), num_committed.numpy(), noise.position.numpy())
    compiled.draft_window(*map(np.ascontiguousarray, arrays), keys.view(np.int64), vocab, drafted)
    return torch.from_numpy(drafted)


def commit_tokens(
    fed: Tensor, verdict: Verdict, length: Tensor, num_tokens: int, tokens: Tensor, histogram: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Write the committed tokens of a pass to `tokens`, and count them in `histogram`, as `ImageState.commit` does.

    Args:
        fed: int64 `[B, T]`.
        length: int64 `[B]`, number of tokens before.
        num_tokens: N.

    Returns:
        The number of tokens committed and the new length, int64 `[B]`; None where no compiled function does it.
    """
    if (compiled := compiled_steps(fed)) is None:
        return None
    count, total = np.empty(len(length), np.int64), np.empty(len(length), np.int64)
    arrays = [np.ascontiguousarray(part.numpy()) for part in (fed, verdict.path, verdict.count, verdict.next_token, length)]
    compiled.commit_tokens(*arrays, num_tokens, tokens.numpy(), histogram.numpy(), count, total)
    return torch.from_numpy(count), torch.from_numpy(total)
