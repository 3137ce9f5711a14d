"""Neighbor tables: the tokens whose codebook vectors are nearest to that of each token, computed once for each codebook.

Shape suffixes: K neighbors, V vocabulary.
"""

from __future__ import annotations

import hashlib
import logging
import zipfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vargen.decoding.interfaces import TokenModel
from vargen.device import normal_tensors
from vargen.files import atomic_file, cache_folder

logger = logging.getLogger("vargen")

_MAX_DISTANCES = 2**24  # number of distances in memory at a time


def build_neighbor_table(codebook: Tensor, count: int) -> Tensor:
    """Return the `count` nearest neighbors of each token, nearest first: `[V, K]`, int16 if token ids fit, otherwise int32.

    A token is not its own neighbor. K is min(count, V - 1). Distances are Euclidean, and ties are broken by token id, so that a
    codebook with duplicate codes, such as unused ones, has the same table on every machine.

    Args:
        codebook: float `[V, C]`, finite.
    """
    if codebook.dim() != 2 or len(codebook) < 2 or not codebook.isfinite().all():
        raise ValueError(f"codebook must be a matrix [V, C] of finite numbers and at least 2 codes, got {list(codebook.shape)}")
    codes = codebook.detach().to("cpu", torch.float32).contiguous()
    count = min(count, len(codes) - 1)
    return _load_or_build(_CodebookKey(codes, hash_codebook(codes)), count).to(codebook.device)


def require_codebook(model: TokenModel) -> Tensor:
    """Return the codebook `[V, C]` that defines the similarity of a model's tokens."""
    if model.codebook is None:
        raise ValueError("this rule needs a model with a codebook, whose vectors define which tokens are similar")
    if len(model.codebook) != model.vocab:
        raise ValueError(f"the codebook must have a vector for each of the {model.vocab} tokens, got {len(model.codebook)}")
    return model.codebook


def hash_codebook(codebook: Tensor) -> str:
    """Return a hash of the values and shape of a float32 codebook on the CPU."""
    return hashlib.sha256(f"{list(codebook.shape)}".encode() + codebook.numpy().tobytes()).hexdigest()[:16]


class _CodebookKey:
    """A codebook as a cache key; equal to any other codebook with the same digest."""

    def __init__(self, codes: Tensor, name: str):
        self.codes, self.name = codes, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CodebookKey) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


@lru_cache(maxsize=4)
@normal_tensors()
def _load_or_build(book: _CodebookKey, count: int) -> Tensor:
    path = cache_folder() / "neighbours" / f"{book.name}.npz"
    found = _read_cache(path, book, count)
    if found is None:
        found = _build_table(book.codes, count)
        _write_cache(path, book, found)
    return found[:, :count].contiguous()


def token_dtype(vocab: int) -> torch.dtype:
    """The smallest dtype of a table that holds every token of a vocabulary: int16 or int32."""
    return torch.int16 if vocab <= 2**15 else torch.int32


def _build_table(codes: Tensor, count: int) -> Tensor:
    table = torch.empty(len(codes), count, dtype=token_dtype(len(codes)))
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


# -- disk cache -------------------------------------------------------------------------------------------------------


def _read_cache(path: Path, book: _CodebookKey, count: int) -> Tensor | None:
    """Load a table of this codebook with at least `count` columns; None if the file is missing, invalid, or another table."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            name, table = str(stored["codebook"]), stored["nearest"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    V = len(book.codes)
    fits = table.ndim == 2 and table.shape[0] == V and table.shape[1] >= count and table.dtype in (np.int16, np.int32)
    if name != book.name or not fits or table.min() < 0 or table.max() >= V:
        return None
    return torch.from_numpy(table)


def _write_cache(path: Path, book: _CodebookKey, table: Tensor) -> None:
    try:
        with atomic_file(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, codebook=book.name, nearest=table.numpy())
    except OSError as error:  # the cache folder is not writable
        logger.debug("the neighbor table is not cached: %s", error)
