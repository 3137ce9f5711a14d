"""Steps of the token loop beside its pass as compiled functions, where `vargen.kernels.cpu_code` has loaded them.

A pass of less than a millisecond evicts what the interpreter needs from the caches, so that each small operation after it costs
several microseconds.

Shape suffixes: B images, T positions, A slots on the longest path, N tokens of the grid, V vocabulary.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vargen.decoding.next_token.draft import Draft, Verdict
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import MIN_TEMPERATURE, RowSampling, Sampling, to_probs
from vargen.kernels.cpu_code import TOKEN_STEPS
from vargen.kernels.dispatch import is_eager_cpu


class _Scratch(threading.local):
    """Arrays of a thread that the compiled sampler writes to: allocating them takes longer than sampling a row."""

    size = 0

    def reserve(self, vocab: int) -> tuple[np.ndarray, np.ndarray]:
        """float32 `[3, >= V + 32]` and int32 `[>= V + 32]`."""
        if self.size < vocab + 32:
            self.size = vocab + 32
            self.rows, self.kept = np.empty((3, self.size), np.float32), np.empty(self.size, np.int32)
        return self.rows, self.kept


_scratch = _Scratch()


def _compiled(tensor: Tensor) -> Any:
    """The module of compiled functions, if it is loaded and these steps run on a CPU; else None."""
    return TOKEN_STEPS.loaded() if is_eager_cpu(tensor) else None


def sample_from_logits(logits: Tensor, sampling: Sampling, noise: Noise) -> Tensor | None:
    """The tokens int64 `[B, T]` of `noise.sample(to_probs(logits, sampling), Purpose.TOKEN)` for guided logits `[B, T, V]`.

    Neither the probabilities nor the noise of all tokens of the vocabulary are computed. Returns None where no compiled
    function does it.
    """
    if (compiled := _compiled(logits)) is None or (keys := noise.token_keys()) is None:
        return None
    V, tokens = logits.shape[-1], np.empty(keys.shape, np.int64)
    given = np.ascontiguousarray(logits.float().numpy())
    undecided = compiled.sample_rows(given, *_row_options(sampling, len(logits), V), keys.numpy(), *_scratch.reserve(V), tokens)
    for image, slot in np.argwhere(tokens < 0) if undecided else ():  # rare: rounding could change the token
        row = slice(image, image + 1)
        single = Noise(noise.seeds[row], noise.position[row, slot : slot + 1])
        options = sampling.select_rows(torch.tensor([image]))
        tokens[image, slot] = single.sample(to_probs(logits[row, slot : slot + 1], options), Purpose.TOKEN).item()
    return torch.from_numpy(tokens)


def verify_chain(sampled: Tensor, draft: Draft) -> Verdict | None:
    """The verdict of `shared_noise` on a chain, given the tokens int64 `[B, T]` that the noise selects; None as above."""
    if (compiled := _compiled(sampled)) is None:
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
    if (compiled := _compiled(resampled)) is None or (keys := noise.seed_keys(Purpose.DRAFT)) is None:
        return None
    drafted = np.empty(noise.position.shape, np.int64)
    arrays = (resampled.numpy(), num_committed.numpy(), noise.position.numpy())
    compiled.draft_window(*map(np.ascontiguousarray, arrays), keys.view(np.int64), vocab, drafted)
    return torch.from_numpy(drafted)


def _row_options(sampling: Sampling, images: int, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Temperature, top-k and top-p of each image, as the compiled function takes them."""
    if isinstance(sampling, RowSampling):
        return _stack_options(tuple(sampling.rows), vocab)
    return _stack_options((sampling,) * images, vocab)


@lru_cache(maxsize=8)
def _stack_options(rows: tuple[Sampling, ...], vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.array([max(row.temperature, MIN_TEMPERATURE) for row in rows], np.float32),
        np.array([min(row.top_k or vocab, vocab) for row in rows], np.int64),
        np.array([row.top_p for row in rows], np.float64),
    )


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
    if (compiled := _compiled(fed)) is None:
        return None
    count, total = np.empty(len(length), np.int64), np.empty(len(length), np.int64)
    arrays = [np.ascontiguousarray(part.numpy()) for part in (fed, verdict.path, verdict.count, verdict.next_token, length)]
    compiled.commit_tokens(*arrays, num_tokens, tokens.numpy(), histogram.numpy(), count, total)
    return torch.from_numpy(count), torch.from_numpy(total)
