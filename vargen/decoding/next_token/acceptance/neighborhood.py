"""NeighborhoodRule acceptance (LANTERN): a draft is judged by the mass of the tokens that look like it.

Shape suffixes: B images, S drafts, K neighbours, V vocabulary.
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

from vargen.decoding.next_token.acceptance import fused
from vargen.decoding.next_token.acceptance.exact import probability
from vargen.decoding.next_token.acceptance.relaxed import RelaxedRule
from vargen.decoding.next_token.protocols import TokenModel
from vargen.files import atomic_file, cache_folder
from vargen.modes import normal_tensors
from vargen.values import parse_float, parse_int, short_repr


@dataclass(frozen=True)
class NeighborhoodRule(RelaxedRule):
    """RelaxedRule: a draft x is accepted while u < (p(x) + p(A)) / q(x), A the tokens whose codes are nearest to that of x.

    LANTERN (Jang et al. 2024, section 4) and LANTERN++ (Park et al. 2025). A is the longest prefix of the `size` nearest
    tokens, x itself not among them, whose mass p(A) stays within the bounds that are set: `delta` (LANTERN), (ratio - 1) p(x)
    (LANTERN++), so that what x counts for is at most `ratio` p(x). The draft itself is kept, and a refusal draws
    norm((p - q)+), which is the optimal residual of every relaxed rule (see `relaxation`). Neither bound limits how far the
    output is from p in sum, because every draft has an A of its own: that is what is reported, and what `budget` is for.
    A draft that the filters leave without probability is never accepted, whatever its neighbours have.

    Where drawing is greedy (temperature 0), masses are those at temperature 1, and a draft is accepted if p(x) + p(A) is at
    least the probability of the likeliest other token (LANTERN's greedy form). Each such token that is not the likeliest itself
    counts as a relaxation of one.

    Args:
        size: most neighbours, 1 or more; where the codebook has fewer, all.
        ratio: lambda, above 1, or None for no such bound.
        delta: in (0, 1], or None for no such bound.
        budget, tightening: see `RelaxedRule`.

    Raises:
        ValueError: for values outside these ranges, or if neither bound is set.
    """

    size: int = 10
    ratio: float | None = 5.0
    delta: float | None = None
    nearest: Tensor | None = field(default=None, init=False, repr=False, compare=False)  # int16 or int32 `[V, K]`, by `bind`

    def __post_init__(self) -> None:
        super().__post_init__()
        size, ratio, delta = parse_int(self.size, 1), parse_float(self.ratio), parse_float(self.delta)
        if size is None:
            raise ValueError(
                f"size, most neighbours of a token, must be a whole number of at least 1, got {short_repr(self.size)}"
            )
        if self.ratio is not None and (ratio is None or ratio <= 1):
            raise ValueError(f"ratio must be above 1, or None to bound by delta alone, got {short_repr(self.ratio)}")
        if self.delta is not None and (delta is None or not 0 < delta <= 1):
            raise ValueError(f"delta must be in (0, 1], or None to bound by ratio alone, got {short_repr(self.delta)}")
        if ratio is None and delta is None:
            raise ValueError("a neighbourhood needs a bound of its mass: ratio, delta or both, got None for both")
        for name, value in (("size", size), ("ratio", ratio), ("delta", delta)):
            object.__setattr__(self, name, value)

    def bind(self, model: TokenModel) -> NeighborhoodRule:
        """This rule with the neighbours in the model's codebook, which are made the first time.

        Raises:
            ValueError: if the model has no codebook, or one that is none.
        """
        bound = replace(self)
        object.__setattr__(bound, "nearest", build_neighbor_table(require_codebook(model), self.size))
        return bound

    def mass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """p(A) of `tokens` `[B, S]` under p `[B, S, V]`: float `[B, S]`."""
        if self.nearest is None:
            raise ValueError("this rule is bound to no model: call bind(model) first")
        reached = p.gather(2, self.nearest[tokens].long()).cumsum(2)
        within = torch.ones_like(reached, dtype=torch.bool)
        if self.ratio is not None:
            within &= reached <= (self.ratio - 1) * probability(p, tokens)[..., None]
        if self.delta is not None:
            within &= reached <= self.delta
        return (reached * within).amax(2)

    def wanted(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        if self.nearest is not None and fused.applies(p):
            from vargen.kernels.accept_wanted import neighborhood_accept_prob

            return neighborhood_accept_prob(p, q, tokens, self.nearest, self.ratio, self.delta)
        own_p, own_q = probability(p, tokens), probability(q, tokens)
        return torch.where(own_p > 0, (own_p + self.mass(p, tokens)) / own_q.clamp_min(1e-30), 0.0)

    def wanted_greedily(self, p: Tensor, q: Tensor | None, tokens: Tensor, soft: Tensor) -> Tensor:
        own = probability(soft, tokens)
        others = soft.scatter(2, tokens[..., None], 0.0).amax(2)
        return ((own > 0) & (own + self.mass(soft, tokens) >= others)).to(p.dtype)


logger = logging.getLogger("vargen")

_AT_ONCE = 2**24  # distances that are held at a time


def build_neighbor_table(codebook: Tensor, count: int) -> Tensor:
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


def require_codebook(model: TokenModel) -> Tensor:
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
@normal_tensors()
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
        with atomic_file(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, codebook=book.name, nearest=table.numpy())
    except OSError as error:  # a home that cannot be written
        logger.debug("the table of nearest codes is not kept: %s", error)
