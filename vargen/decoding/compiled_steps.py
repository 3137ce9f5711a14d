"""Steps of a pass beside the network as compiled functions, where `vargen.kernels.cpu_code` has loaded them.

A pass of less than a millisecond evicts what the interpreter needs from the caches, so that each small operation after it costs
several microseconds.

Shape suffixes: B slots, T positions, A slots on the longest path, N tokens of the grid, V vocabulary.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import MIN_TEMPERATURE, Sampling, SlotSampling, to_probs
from vargen.decoding.tree import Verdict
from vargen.kernels.cpu_code import TOKEN_STEPS
from vargen.kernels.dispatch import is_eager_cpu


class _Scratch(threading.local):
    """Arrays of a thread that the compiled sampler takes: making them takes longer than sampling a row."""

    size = 0

    def reserve(self, vocab: int) -> tuple[np.ndarray, np.ndarray]:
        """float32 `[3, >= V + 32]` and int32 `[>= V + 32]`."""
        if self.size < vocab + 32:
            self.size = vocab + 32
            self.rows, self.kept = np.empty((3, self.size), np.float32), np.empty(self.size, np.int32)
        return self.rows, self.kept


_scratch = _Scratch()
_TOKEN = int(Purpose.TOKEN)
_NO_DRAFT, _NO_COUNT = np.zeros((0, 0), np.int64), np.zeros(0, np.int64)


class SampledRows(NamedTuple):
    """Sampled tokens.

    Attributes:
        tokens: int64 `[B, T]`.
        sums: float32 `[B, T]`, finite where all logits of a row are.
        outcome: of a draft: the number of accepted slots with the root, and the token after them, int64 `[B]`. None without a
            draft, and if rounding could have changed a token.
    """

    tokens: Tensor
    sums: Tensor
    outcome: tuple[Tensor, Tensor] | None


def compiled_steps(tensor: Tensor) -> Any:
    """The module of compiled functions, if it is loaded and these steps run on a CPU; else None."""
    return TOKEN_STEPS.loaded() if is_eager_cpu(tensor) else None


def sample_from_logits(
    logits: Tensor, sampling: SlotSampling, noise: Noise, drafted: Tensor | None = None
) -> SampledRows | None:
    """Sample the tokens of `noise.sample(sampling.probs(logits), Purpose.TOKEN)` from guided logits `[B, T, V]`.

    Neither the probabilities nor the noise of all tokens of the vocabulary are computed. Returns None where no compiled
    function does it.

    Args:
        drafted: int64 `[B, T - 1]`, the draft tokens of a chain, which are accepted where they equal the sampled ones.
    """
    if (compiled := compiled_steps(logits)) is None or not noise.is_keyed:
        return None
    B, T, V = logits.shape
    seeds, position = np.ascontiguousarray(noise.seeds.numpy()), np.ascontiguousarray(noise.position.numpy())
    tokens, sums = np.empty((B, T), np.int64), np.zeros((B, T), np.float32)  # rows that are decided are finite
    chain = _NO_DRAFT if drafted is None else np.ascontiguousarray(drafted.numpy())
    count, following = (_NO_COUNT, _NO_COUNT) if drafted is None else np.empty((2, B), np.int64)
    undecided = compiled.sample_rows(
        np.ascontiguousarray(logits.float().numpy()), *_stack_options(sampling.rows, V), _TOKEN, seeds, position,
        *_scratch.reserve(V), chain, tokens, count, following,
    )  # fmt: skip
    for image, slot in np.argwhere(tokens < 0) if undecided else ():  # rare: rounding could change the token
        row = slice(image, image + 1)
        single = Noise(noise.seeds[row], noise.position[row, slot : slot + 1])
        sums[image, slot] = logits[image, slot].sum(dtype=torch.float32).item()
        probs = to_probs(logits[row, slot : slot + 1], sampling.rows[image])
        tokens[image, slot] = single.sample(probs, Purpose.TOKEN).item()
    known = drafted is not None and not undecided
    outcome = (torch.from_numpy(count), torch.from_numpy(following)) if known else None
    return SampledRows(torch.from_numpy(tokens), torch.from_numpy(sums), outcome)


def draft_window(
    drafted: Tensor, drafted_end: Tensor, noise: Noise, slots: int, num_tokens: int, vocab: int
) -> tuple[Tensor, Tensor] | None:
    """Draft the next tokens of a Jacobi window: those of the last pass, and after these tokens of the uniform distribution.

    Args:
        drafted: int64 `[B, >= N + slots]`, draft tokens by position, which are known up to position `drafted_end` `[B]`.
        noise: of the first draft token: `[B, 1]`.
        slots: number S of draft tokens.
        num_tokens: N.

    Returns:
        The draft tokens int64 `[B, S]`, and bool `[B, S]`, which of them are on the grid; None where no compiled function does
        it.
    """
    if (compiled := compiled_steps(drafted)) is None or not noise.is_keyed:
        return None
    shape = len(drafted), slots
    tokens, valid = np.empty(shape, np.int64), np.empty(shape, np.bool_)
    steps = noise.step.numpy().reshape(-1) if isinstance(noise.step, Tensor) else np.array([noise.step])
    arrays = (np.ascontiguousarray(part.numpy()) for part in (drafted_end, noise.position, noise.seeds))
    compiled.draft_window(drafted.numpy(), *arrays, steps, int(Purpose.DRAFT), num_tokens, vocab, tokens, valid)
    return torch.from_numpy(tokens), torch.from_numpy(valid)


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


def commit_tokens(fed: Tensor, verdict: Verdict, length: Tensor, num_tokens: int, tokens: Tensor) -> Tensor | None:
    """Write the tokens after the accepted slots of a pass to `tokens` int64 `[B, >= N + A]`, in place.

    Args:
        fed: int64 `[B, T]`.
        length: int64 `[B]`, number of tokens before.
        num_tokens: N.

    Returns:
        The number of tokens committed, int64 `[B]`; None where no compiled function does it.
    """
    if (compiled := compiled_steps(fed)) is None:
        return None
    count = np.empty(len(length), np.int64)
    arrays = [np.ascontiguousarray(part.numpy()) for part in (fed, verdict.path, verdict.count, verdict.next_token, length)]
    compiled.commit_tokens(*arrays, num_tokens, tokens.numpy(), count)
    return torch.from_numpy(count)


@lru_cache(maxsize=8)
def _stack_options(rows: tuple[Sampling, ...], vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.array([max(row.temperature, MIN_TEMPERATURE) for row in rows], np.float32),
        np.array([min(row.top_k or vocab, vocab) for row in rows], np.int64),
        np.array([row.top_p for row in rows], np.float64),
    )
