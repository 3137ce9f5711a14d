"""Sampling with the shared noise as a compiled function, where `vargen.kernels.cpu_code` has loaded it.

Shape suffixes: B images, T positions, V vocabulary.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vargen.decoding.harness import sum_rows
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.sampling import MIN_TEMPERATURE, RowSampling, Sampling, to_probs
from vargen.kernels.cpu_code import TOKEN_STEPS
from vargen.kernels.dispatch import is_eager_cpu


class _Scratch(threading.local):
    """Arrays of a thread that the compiled sampler takes: making them takes longer than sampling a row."""

    size, shape = 0, (0, 0)
    sampling: Sampling | None = None

    def reserve(self, vocab: int) -> tuple[np.ndarray, np.ndarray]:
        """float32 `[3, >= V + 32]` and int32 `[>= V + 32]`."""
        if self.size < vocab + 32:
            self.size = vocab + 32
            self.rows, self.kept = np.empty((3, self.size), np.float32), np.empty(self.size, np.int32)
        return self.rows, self.kept

    def options(self, sampling: Sampling, images: int, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Temperature, top-k and top-p of each image; float32, int64 and float64 `[B]`."""
        if isinstance(sampling, RowSampling):  # whose rows change
            return _stack_options(tuple(sampling.rows), vocab)
        if self.sampling is not sampling or self.shape != (images, vocab):
            self.sampling, self.shape = sampling, (images, vocab)
            self.stacked = _stack_options((sampling,) * images, vocab)
        return self.stacked


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


def sample_from_logits(logits: Tensor, sampling: Sampling, noise: Noise, drafted: Tensor | None = None) -> SampledRows | None:
    """Sample the tokens of `noise.sample(to_probs(logits, sampling), Purpose.TOKEN)` from guided logits `[B, T, V]`.

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
        np.ascontiguousarray(logits.float().numpy()), *_scratch.options(sampling, B, V), _TOKEN, seeds, position,
        *_scratch.reserve(V), chain, tokens, count, following,
    )  # fmt: skip
    for image, slot in np.argwhere(tokens < 0) if undecided else ():  # rare: rounding could change the token
        row = slice(image, image + 1)
        single = Noise(noise.seeds[row], noise.position[row, slot : slot + 1])
        sums[image, slot] = sum_rows(logits[image, slot]).item()
        options = sampling.select_rows(torch.tensor([image]))
        tokens[image, slot] = single.sample(to_probs(logits[row, slot : slot + 1], options), Purpose.TOKEN).item()
    known = drafted is not None and not undecided
    outcome = (torch.from_numpy(count), torch.from_numpy(following)) if known else None
    return SampledRows(torch.from_numpy(tokens), torch.from_numpy(sums), outcome)


@lru_cache(maxsize=8)
def _stack_options(rows: tuple[Sampling, ...], vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.array([max(row.temperature, MIN_TEMPERATURE) for row in rows], np.float32),
        np.array([min(row.top_k or vocab, vocab) for row in rows], np.int64),
        np.array([row.top_p for row in rows], np.float64),
    )
