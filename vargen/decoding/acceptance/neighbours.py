"""Which tokens look alike: the nearest ones of each in codebook space, as a table that is made once per codebook.

The table depends on nothing but the codebook. It is kept in this process and, by the codebook's digest, in the cache folder, as
measured costs are: for 16,384 tokens it takes seconds to make.

Shape suffixes: V vocabulary, C width of a code, K neighbours.
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

from vargen.decoding.protocols import TokenModel
from vargen.files import cache_folder, whole_file
from vargen.modes import ordinary_tensors

logger = logging.getLogger("vargen")

_AT_ONCE = 2**24  # distances that are held at a time


def nearest_tokens(codebook: Tensor, count: int) -> Tensor:
    """The `count` nearest tokens of each, without itself, nearest first: `[V, K]`, int16 where token numbers fit, else int32.

    K is V - 1 where that is less. Distances are Euclidean; of equal ones the smaller token comes first, so that a codebook with
    codes that are alike, as unused ones are, has one table everywhere.

    Args:
        codebook: float `[V, C]`, of finite numbers.

    Raises:
        ValueError: for a codebook that is no such matrix.
    """
    if codebook.dim() != 2 or len(codebook) < 2 or not codebook.isfinite().all():
        raise ValueError(f"codebook must be a matrix [V, C] of finite numbers and at least 2 codes, got {list(codebook.shape)}")
    codes = codebook.detach().to("cpu", torch.float32).contiguous()
    count = min(count, len(codes) - 1)
    return _kept(_Codes(codes, digest(codes)), count).to(codebook.device)


def codebook_of(model: TokenModel) -> Tensor:
    """The codebook `[V, C]` that says which of a model's tokens look alike.

    Raises:
        ValueError: if there is none, or one of another vocabulary.
    """
    if model.codebook is None:
        raise ValueError("neighbourhoods need a model with a codebook, whose vectors say how alike two tokens are")
    if len(model.codebook) != model.vocab:
        raise ValueError(f"the codebook must have a vector for each of the {model.vocab} tokens, got {len(model.codebook)}")
    return model.codebook


def digest(codebook: Tensor) -> str:
    """Changes with any number of a float32 codebook on the CPU, and with its shape."""
    return hashlib.sha256(f"{list(codebook.shape)}".encode() + codebook.numpy().tobytes()).hexdigest()[:16]


class _Codes:
    """A codebook that equals another one of the same digest, as a key of what is kept."""

    def __init__(self, codes: Tensor, name: str):
        self.codes, self.name = codes, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Codes) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


@lru_cache(maxsize=4)
@ordinary_tensors()
def _kept(book: _Codes, count: int) -> Tensor:
    path = cache_folder() / "neighbours" / f"{book.name}.npz"
    found = _read(path, book, count)
    if found is None:
        found = _made(book.codes, count)
        _write(path, book, found)
    return found[:, :count].contiguous()


def _made(codes: Tensor, count: int) -> Tensor:
    table = torch.empty(len(codes), count, dtype=torch.int16 if len(codes) <= 2**15 else torch.int32)
    high = codes.double()
    for rows in torch.arange(len(codes)).split(max(1, _AT_ONCE // len(codes))):
        # By differences: a product would round equal distances apart, differently on every machine.
        gap = torch.cdist(high[rows], high, compute_mode="donot_use_mm_for_euclid_dist")
        gap[torch.arange(len(rows)), rows] = torch.inf  # not its own neighbour, though another code may be as near
        farthest = gap.topk(count, largest=False).values[:, -1:]
        nearer, even = gap < farthest, gap == farthest
        chosen = nearer | (even & (even.cumsum(1) <= count - nearer.sum(1, keepdim=True)))
        member = chosen.nonzero()[:, 1].view(len(rows), count)  # by token
        order = gap.gather(1, member).argsort(dim=1, stable=True)
        table[rows] = member.gather(1, order).to(table.dtype)
    return table


# -- what is kept on disk ---------------------------------------------------------------------------------------------


def _read(path: Path, book: _Codes, count: int) -> Tensor | None:
    """A table of this codebook with at least `count` columns; None if the file holds none, whatever it is."""
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


def _write(path: Path, book: _Codes, table: Tensor) -> None:
    try:
        with whole_file(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, codebook=book.name, nearest=table.numpy())
    except OSError as error:  # a home that cannot be written
        logger.debug("the table of nearest codes is not kept: %s", error)
