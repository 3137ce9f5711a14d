"""Frequencies of sampled images of table models, compared with the joint distribution: a check that sums nothing.

Shape suffixes: V vocabulary, N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vargen.decoding import Method, Sampling, decode, decode_scales
from vargen.decoding.sampling import to_probs
from vargen.verify.tables import ScaleTable, TableModel, encode_sequences


def sample_images(method: Method, model: TableModel | ScaleTable, sampling: Sampling, samples: int) -> float:
    """Sample images of a table model, and return the p-value of their frequencies."""
    loop: Any = decode_scales if isinstance(model, ScaleTable) else decode
    condition, seeds = torch.zeros(samples, dtype=torch.int64), torch.arange(samples) + 10**6
    tokens = loop(model, condition, seeds, method, sampling).tokens
    V, N = model.vocab, tokens.shape[1]
    truth = model.joint(0, lambda logits: to_probs(logits, sampling)).flatten()
    return compute_p_value(torch.bincount(encode_sequences(tokens, V), minlength=V**N), truth)


def compute_p_value(counts: Tensor, truth: Tensor) -> float:
    """Return the p-value of Pearson's test; results expected fewer than 5 times are one cell, impossible ones give 0."""
    counts, expected = counts.double(), truth.double() * counts.sum()
    if counts[truth == 0].any():
        return 0.0
    rare = expected < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    return float(torch.special.gammaincc(freedom / 2, statistic.cpu() / 2))
