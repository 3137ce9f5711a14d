"""Neighborhood acceptance (LANTERN): verify a draft token by the total probability of similar tokens.

Shape suffixes: B images, S draft tokens, K neighbors, V vocabulary.
"""

from __future__ import annotations

import hashlib
import logging
import zipfile
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vargen.decoding.interfaces import TokenModel
from vargen.decoding.next_token.acceptance.exact import gather_prob
from vargen.decoding.next_token.acceptance.relaxed import RelaxedRule
from vargen.device import normal_tensors
from vargen.files import atomic_file, cache_folder
from vargen.values import number_field


@dataclass(frozen=True)
class NeighborhoodRule(RelaxedRule):
    """Relaxed rule of LANTERN: accept x if u < (p(x) + p(A)) / q(x), A being the nearest neighbors of x in the codebook.

    LANTERN (Jang et al. 2024, section 4) and LANTERN++ (Park et al. 2025). A is the longest prefix of the `size` nearest
    tokens, excluding x, whose total probability p(A) stays within the configured bounds: `delta` (LANTERN), and (ratio - 1)
    p(x) (LANTERN++), which limits p(x) + p(A) to `ratio` p(x). An accepted draft token is committed unchanged. A rejection
    samples from norm((p - q)+), the optimal residual of every relaxed rule (see `relaxed`). Neither bound limits the total
    distance of the output from p, because every draft token has its own A; that distance is reported as relaxation and limited
    by `budget`. A draft token that the filters set to probability zero is never accepted, whatever its neighbors.

    Under greedy sampling (temperature 0), probabilities are taken at temperature 1, and a draft token is accepted if p(x) +
    p(A) is at least the largest probability of any other token (LANTERN's greedy form). Each accepted token that is not the
    argmax counts as a relaxation of one.

    Args:
        size: maximum number of neighbors, at least 1; limited by the size of the codebook.
        ratio: lambda, above 1; None disables this bound.
        delta: in (0, 1]; None disables this bound.
        budget, tightening: see `RelaxedRule`.

    Raises:
        ValueError: if a value is out of range, or neither bound is set.
    """

    size: int = number_field(10, 1, is_integer=True, meaning="the maximum number of neighbors")
    ratio: float | None = number_field(5.0, 1, open_below=True, optional=True)
    delta: float | None = number_field(None, 0, 1, open_below=True, optional=True)
    neighbor_table: Tensor | None = field(
        default=None, init=False, repr=False, compare=False
    )  # int16 or int32 `[V, K]`; see `bind`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio is None and self.delta is None:
            raise ValueError("ratio, delta or both must be a number, which bounds the neighborhood, got None for both")

    def bind(self, model: TokenModel) -> NeighborhoodRule:
        """Return the rule with the neighbor table of the model's codebook, which is computed on first use.

        Raises:
            ValueError: if the model has no codebook, or an invalid one.
        """
        bound = replace(self)
        object.__setattr__(bound, "neighbor_table", build_neighbor_table(require_codebook(model), self.size))
        return bound

    def neighbor_prob(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Total neighbor probability p(A) of `tokens` `[B, S]` under p `[B, S, V]`: float `[B, S]`."""
        if self.neighbor_table is None:
            raise ValueError("the rule has no neighbor table: call bind(model) first")
        reached = p.gather(2, self.neighbor_table[tokens].long()).cumsum(2)
        within = torch.ones_like(reached, dtype=torch.bool)
        if self.ratio is not None:
            within &= reached <= (self.ratio - 1) * gather_prob(p, tokens)[..., None]
        if self.delta is not None:
            within &= reached <= self.delta
        return (reached * within).amax(2)

    def accept_prob(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        own_p, own_q = gather_prob(p, tokens), gather_prob(q, tokens)
        return torch.where(own_p > 0, (own_p + self.neighbor_prob(p, tokens)) / own_q.clamp_min(1e-30), 0.0)

    def greedy_accept_prob(self, p: Tensor, q: Tensor | None, tokens: Tensor, unfiltered_probs: Tensor) -> Tensor:
        own = gather_prob(unfiltered_probs, tokens)
        others = unfiltered_probs.scatter(2, tokens[..., None], 0.0).amax(2)
        return ((own > 0) & (own + self.neighbor_prob(unfiltered_probs, tokens) >= others)).to(p.dtype)


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
