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
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.tree import Verdict


def draft_window(
    resampled: Tensor, num_committed: Tensor, noise: Noise, slots: int, num_tokens: int, vocab: int
) -> tuple[Tensor, Tensor] | None:
    """Shift the committed tokens out of a Jacobi window, and draft new positions uniformly.

    Args:
        resampled, num_committed: int64 `[B, T]` and `[B]`, of the last pass.
        noise: of the first draft token: `[B, 1]`.
        slots: number S of draft tokens.
        num_tokens: N.

    Returns:
        The draft tokens int64 `[B, S]`, and bool `[B, S]`, which of them are on the grid; None where no compiled function does
        it.
    """
    if (compiled := compiled_steps(resampled)) is None or not noise.is_keyed:
        return None
    shape = len(resampled), slots
    drafted, valid = np.empty(shape, np.int64), np.empty(shape, np.bool_)
    steps = noise.step.numpy().reshape(-1) if isinstance(noise.step, Tensor) else np.array([noise.step])
    arrays = (np.ascontiguousarray(part.numpy()) for part in (resampled, num_committed, noise.position, noise.seeds))
    compiled.draft_window(*arrays, steps, int(Purpose.DRAFT), num_tokens, vocab, drafted, valid)
    return torch.from_numpy(drafted), torch.from_numpy(valid)


def feed_tokens(tokens: Tensor, length: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor] | None:
    """Put the last committed token of each image and its draft, a chain, side by side.

    Args:
        tokens: int64 `[B, >= N]`, valid up to `length` `[B]`.
        drafted: int64 `[B, T - 1]`.

    Returns:
        int64 `[B, T]`, and the positions `[B, T]` of the tokens after these; None where no compiled function does it.
    """
    if (compiled := compiled_steps(tokens)) is None:
        return None
    shape = len(drafted), drafted.shape[1] + 1
    made = np.empty(shape, np.int64), np.empty(shape, np.int64)
    arrays = (np.ascontiguousarray(part.numpy()) for part in (length, drafted))
    compiled.feed_tokens(tokens.numpy(), *arrays, *made)
    inputs, position = map(torch.from_numpy, made)
    return inputs, position


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
