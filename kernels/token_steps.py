"""Steps of a pass beside the network, as compiled functions where `vargen.kernels.int8.load` has loaded them.

A pass of less than a millisecond evicts what the interpreter needs from the caches, so that each small operation after it costs
several microseconds.

Shape suffixes: B slots, T positions, A slots on the longest path, N tokens of the grid, V vocabulary.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vargen.kernels import ops
from vargen.kernels.dispatch import is_eager_cpu
from vargen.kernels.int8.load import CompiledCode
from vargen.kernels.noise_bits import sample_exponential

# Of the noise: seeds int64 [B], positions int64 [B, T], number of the pass, purpose.
NoiseKey = tuple[Tensor, Tensor, int | Tensor, int]


@dataclass(frozen=True)
class SampledRows:
    """Sampled tokens."""

    tokens: Tensor  # int64 [B, T]
    sums: Tensor  # float32 [B, T], finite where all logits of a row are
    count: Tensor  # of a draft: accepted slots with the root, int64 [B]; valid, as the next, if no token is undecided
    next_token: Tensor  # the token after them, int64 [B]
    undecided: int  # number of tokens that rounding could change, which torch sampled


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
_NO_DRAFT, _NO_COUNT = np.zeros((0, 0), np.int64), np.zeros(0, np.int64)


def compiled_steps(tensor: Tensor) -> Any:
    """The module of compiled functions, if it is loaded and these steps run on a CPU; else None."""
    return CompiledCode.steps if is_eager_cpu(tensor) else None


def _arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [np.ascontiguousarray(each.numpy()) for each in tensors]


def sample_rows(
    logits: Tensor, options: tuple[Tensor, Tensor, Tensor], noise: NoiseKey | None, drafted: Tensor | None
) -> SampledRows | None:
    """Sample tokens by Gumbel-max from guided logits `[B, T, V]`, and verify the draft tokens of a chain.

    Neither the probabilities nor the noise of all tokens of the vocabulary are computed.

    Args:
        options: temperature, top-k and top-p of each image, as `ops.probs_by_image` takes them; none has min-p.
        drafted: int64 `[B, T - 1]`, accepted where they equal the sampled ones; None: none.
    """
    if noise is None or (compiled := compiled_steps(logits)) is None:
        return None
    B, T, V = logits.shape
    seeds, position, _, purpose = noise
    tokens = np.empty((B, T), np.int64)
    sums = np.zeros((B, T), np.float32)  # rows that are decided are finite
    chain = _NO_DRAFT if drafted is None else np.ascontiguousarray(drafted.numpy())
    count, following = (_NO_COUNT, _NO_COUNT) if drafted is None else np.empty((2, B), np.int64)
    inputs = _arrays(logits.float(), *(each.view(-1) for each in options))
    undecided = compiled.sample_rows(
        *inputs, purpose, *_arrays(seeds, position), *_scratch.reserve(V), chain, tokens, count, following
    )
    outcome = torch.from_numpy(count), torch.from_numpy(following)
    found = SampledRows(torch.from_numpy(tokens), torch.from_numpy(sums), *outcome, int(undecided))
    for image, slot in (found.tokens < 0).nonzero().tolist() if found.undecided else ():  # rare: torch decides
        at = slice(image, image + 1), slice(slot, slot + 1)
        row, one = logits[at], (seeds[at[0]], position[at])
        temperature, top_k, top_p = (each[at[0]] for each in options)
        probs = ops.probs_by_image(row, temperature, top_k, top_p, None, True)
        found.sums[image, slot] = row.sum(dtype=torch.float32)
        found.tokens[image, slot] = ops.sample_gumbel_max(probs, *one, partial(sample_exponential, *one, V, purpose))[0, 0]
    return found


def draft_window(
    drafted: Tensor, drafted_end: Tensor, noise: NoiseKey | None, slots: int, num_tokens: int, vocab: int
) -> tuple[Tensor, Tensor] | None:
    """Draft the next tokens of a Jacobi window: those of the last pass, and after these tokens of the uniform distribution.

    Args:
        drafted: int64 `[B, >= N + slots]`, draft tokens by position, which are known up to position `drafted_end` `[B]`.
        noise: of the first draft token: T = 1.
        slots: number S of draft tokens.
        num_tokens: N.

    Returns:
        The draft tokens int64 `[B, S]`, and bool `[B, S]`, which of them are on the grid.
    """
    if noise is None or (compiled := compiled_steps(drafted)) is None:
        return None
    seeds, position, step, purpose = noise
    shape = len(drafted), slots
    tokens, valid = np.empty(shape, np.int64), np.empty(shape, np.bool_)
    steps = step.numpy().reshape(-1) if isinstance(step, Tensor) else np.array([step])
    arrays = _arrays(drafted_end, position, seeds)
    compiled.draft_window(drafted.numpy(), *arrays, steps, purpose, num_tokens, vocab, tokens, valid)
    return torch.from_numpy(tokens), torch.from_numpy(valid)


def feed_tokens(tokens: Tensor, length: Tensor, drafted: Tensor, depth: Tensor | None) -> tuple[Tensor, Tensor]:
    """Put the last committed token of each image before its draft; returns int64 `[B, T]`, and the positions after these.

    Args:
        tokens: int64 `[B, >= N]`, valid up to `length` `[B]`.
        drafted: int64 `[B, T - 1]`.
        depth: int64 `[T]` or `[B, T]`, distance of each fed token from the first; None for a chain.
    """
    if depth is not None or (compiled := compiled_steps(tokens)) is None:
        fed = torch.cat([tokens.gather(1, length[:, None] - 1), drafted], dim=1)
        return fed, length[:, None] + (torch.arange(fed.shape[1], device=length.device) if depth is None else depth)
    shape = len(drafted), drafted.shape[1] + 1
    inputs, position = np.empty(shape, np.int64), np.empty(shape, np.int64)
    compiled.feed_tokens(tokens.numpy(), *_arrays(length, drafted), inputs, position)
    return torch.from_numpy(inputs), torch.from_numpy(position)


def commit_tokens(
    fed: Tensor, path: Tensor, count: Tensor, next_token: Tensor, length: Tensor, num_tokens: int, tokens: Tensor
) -> Tensor:
    """Write the tokens after the accepted slots of a pass to `tokens` int64 `[B, >= N + A]`; returns their number `[B]`.

    Columns that are not committed may be written, too.

    Args:
        fed: int64 `[B, T]`.
        path, count, next_token: accepted slots int64 `[B, A]`, their number and the token after them, `[B]` each.
        length: int64 `[B]`, number of tokens before.
        num_tokens: N.
    """
    if (compiled := compiled_steps(fed)) is None:
        place = torch.arange(path.shape[1], device=path.device)
        following = fed.gather(1, path.roll(-1, dims=1))  # an accepted draft token follows its parent
        following = torch.where(place == count[:, None] - 1, next_token[:, None], following)
        tokens.scatter_(1, length[:, None] + place, following)
        return torch.minimum(count, num_tokens - length)
    committed = np.empty(len(length), np.int64)
    compiled.commit_tokens(*_arrays(fed, path, count, next_token, length), num_tokens, tokens.numpy(), committed)
    return torch.from_numpy(committed)
