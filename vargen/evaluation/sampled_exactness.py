"""Statistical checks of exactness: frequencies of sampled images and of shared noise, with p-values from simulated samples.

Shape suffixes: V vocabulary, N tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from vargen.decoding import Method, Noise, Purpose, Sampling, decode, decode_scales
from vargen.decoding.sampling import to_probs
from vargen.evaluation.table_models import ScaleTable, TableModel, encode_sequences

_SIMULATIONS = 20_000


@cache
def measure_shared_noise(images: int = 100_000) -> float:
    """Return the p-value of tokens that shared noise selects: do they have the distribution they are selected from?

    Chi-squared over pairs of tokens at neighboring positions and seeds, whose joint distribution is the product.
    """
    p = torch.tensor([0.02, 0.08, 0.2, 0.3, 0.4])
    position = torch.arange(2).expand(images, 2)
    tokens = Noise(torch.arange(images) + 10**6, position).sample(p.expand(images, 2, 5), Purpose.TOKEN)
    following = tokens.roll(-1, 0)[:, 0]
    triple = tokens[:, 0] * 25 + tokens[:, 1] * 5 + following
    expected = torch.einsum("i,j,k->ijk", p.double(), p.double(), p.double()).flatten()
    return compute_p_value(torch.bincount(triple, minlength=125).numpy(), expected.numpy())


def sample_images(method: Method, model: TableModel | ScaleTable, sampling: Sampling, samples: int) -> float:
    """Sample images of a table model, and return the p-value of their frequencies; see `compute_p_value`."""
    loop: Any = decode_scales if isinstance(model, ScaleTable) else decode
    condition, seeds = torch.zeros(samples, dtype=torch.int64), torch.arange(samples) + 10**6
    tokens = loop(model, condition, seeds, method, sampling).tokens
    V, N = model.vocab, tokens.shape[1]
    counts = torch.bincount(encode_sequences(tokens, V), minlength=V**N)
    truth = model.joint(0, lambda logits: to_probs(logits, sampling)).flatten()
    return compute_p_value(counts.numpy(), truth.numpy())


def compute_p_value(counts: np.ndarray, truth: np.ndarray, simulations: int = _SIMULATIONS) -> float:
    """Return the probability that independent samples of `truth` are at least as far from it as `counts`, by simulation.

    The distance is the total variation. A sample of probability 0 gives the p-value 0.
    """
    if counts[truth == 0].any():
        return 0.0
    total, possible = int(counts.sum()), truth > 0
    counts, truth = counts[possible], truth[possible] / truth.sum()
    found = np.abs(counts / total - truth).sum()
    generator, larger, chunk = np.random.default_rng(0), 0, max(1, 2_000_000 // len(truth))
    for start in range(0, simulations, chunk):
        simulated = generator.multinomial(total, truth, size=min(chunk, simulations - start))
        larger += int((np.abs(simulated / total - truth).sum(1) >= found).sum())
    return (1 + larger) / (1 + simulations)
