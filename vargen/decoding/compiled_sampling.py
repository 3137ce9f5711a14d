"""Sampling with the shared noise as a compiled function, where `vargen.kernels.cpu_code` has loaded it.

Shape suffixes: B images, T positions, V vocabulary.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

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


def compiled_steps(tensor: Tensor) -> Any:
    """The module of compiled functions, if it is loaded and these steps run on a CPU; else None."""
    return TOKEN_STEPS.loaded() if is_eager_cpu(tensor) else None


def sample_from_logits(logits: Tensor, sampling: Sampling, noise: Noise) -> Tensor | None:
    """The tokens int64 `[B, T]` of `noise.sample(to_probs(logits, sampling), Purpose.TOKEN)` for guided logits `[B, T, V]`.

    Neither the probabilities nor the noise of all tokens of the vocabulary are computed. Returns None where no compiled
    function does it.
    """
    if (compiled := compiled_steps(logits)) is None or (keys := noise.token_keys()) is None:
        return None
    V, tokens = logits.shape[-1], np.empty(keys.shape, np.int64)
    given, key = (np.ascontiguousarray(tensor.numpy()) for tensor in (logits.float(), keys))  # the layout that is built
    undecided = compiled.sample_rows(given, *_row_options(sampling, len(logits), V), key, *_scratch.reserve(V), tokens)
    for image, slot in np.argwhere(tokens < 0) if undecided else ():  # rare: rounding could change the token
        row = slice(image, image + 1)
        single = Noise(noise.seeds[row], noise.position[row, slot : slot + 1])
        options = sampling.select_rows(torch.tensor([image]))
        tokens[image, slot] = single.sample(to_probs(logits[row, slot : slot + 1], options), Purpose.TOKEN).item()
    return torch.from_numpy(tokens)


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
