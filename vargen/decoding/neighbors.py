"""Neighbor tables: the tokens whose codebook vectors are nearest to that of each token, computed once for each codebook.

Shape suffixes: K neighbors, V vocabulary.
"""

from __future__ import annotations

import hashlib
import logging
import zipfile
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vargen.decoding.interfaces import TokenModel
from vargen.files import atomic_file, cache_folder
from vargen.kernels.host import normal_tensors

logger = logging.getLogger("vargen")

_MAX_DISTANCES = 2**24  # number of distances in memory at a time


@dataclass(frozen=True)
class _Codebook:
    """A codebook as a cache key: equal to any other of this name, which is a hash of its shape and values."""

    name: str
    codes: Tensor = field(compare=False)  # float32 `[V, C]` on the CPU


def build_neighbor_table(codebook: Tensor, count: int) -> Tensor:
    """Return the `count` nearest neighbors of each token, nearest first: int32 `[V, K]`.

    A token is not its own neighbor. K is min(count, V - 1). Distances are Euclidean, and ties are broken by token id, so that a
    codebook with duplicate codes, such as unused ones, has the same table on every machine.

    Args:
        codebook: float `[V, C]`, finite.
    """
    if codebook.is_meta:  # of a model without weights, which generates nothing
        return codebook.new_empty(len(codebook), min(count, len(codebook) - 1), dtype=torch.int32)
    if codebook.dim() != 2 or len(codebook) < 2 or not codebook.isfinite().all():
        raise ValueError(f"codebook must be a matrix [V, C] of finite numbers and at least 2 codes, got {list(codebook.shape)}")
    codes = codebook.detach().to("cpu", torch.float32).contiguous()
    name = hashlib.sha256(f"{list(codes.shape)}".encode() + codes.numpy().tobytes()).hexdigest()[:16]
    return _load_or_build(_Codebook(name, codes), min(count, len(codes) - 1)).to(codebook.device)


def require_codebook(model: TokenModel) -> Tensor:
    """Return the codebook `[V, C]` that defines the similarity of a model's tokens."""
    if model.codebook is None:
        raise ValueError("this rule needs a model with a codebook, whose vectors define which tokens are similar")
    if len(model.codebook) != model.vocab:
        raise ValueError(f"the codebook must have a vector for each of the {model.vocab} tokens, got {len(model.codebook)}")
    return model.codebook


@lru_cache(maxsize=4)
@normal_tensors()
def _load_or_build(book: _Codebook, count: int) -> Tensor:
    path = cache_folder() / "neighbours" / f"{book.name}.npz"
    found = _read_cache(path, len(book.codes), count)
    if found is None:
        found = _build_table(book.codes, count)
        try:
            with atomic_file(path) as temporary, open(temporary, "wb") as file:
                np.savez(file, nearest=found.numpy())
        except OSError as error:  # the cache folder is not writable
            logger.debug("the neighbor table is not cached: %s", error)
    return found[:, :count].contiguous()


def _read_cache(path: Path, vocab: int, count: int) -> Tensor | None:
    """Load a table of at least `count` columns; None if the file is missing, or holds anything else."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            table = stored["nearest"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    fits = table.ndim == 2 and len(table) == vocab and table.shape[1] >= count and table.dtype == np.int32
    return torch.from_numpy(table) if fits and table.min() >= 0 and table.max() < vocab else None


def _build_table(codes: Tensor, count: int) -> Tensor:
    table = torch.empty(len(codes), count, dtype=torch.int32)
    high = codes.double()
    for rows in torch.arange(len(codes)).split(max(1, _MAX_DISTANCES // len(codes))):
        # Without matrix products: their rounding separates equal distances, differently on every machine.
        gap = torch.cdist(high[rows], high, compute_mode="donot_use_mm_for_euclid_dist")
        gap[torch.arange(len(rows)), rows] = torch.inf  # exclude the token itself; a duplicate code may be at distance 0
        farthest = gap.topk(count, largest=False).values[:, -1:]
        nearer, even = gap < farthest, gap == farthest
        chosen = nearer | (even & (even.cumsum(1) <= count - nearer.sum(1, keepdim=True)))
        member = chosen.nonzero()[:, 1].view(len(rows), count)  # sorted by token id
        order = gap.gather(1, member).argsort(dim=1, stable=True)
        table[rows] = member.gather(1, order).to(table.dtype)
    return table
