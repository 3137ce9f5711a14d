"""Pooled acceptance with local repair (MuLo-SD).

A draft token is accepted if it and its codebook neighbors together have enough probability. A rejected token is resampled
together with the draft tokens around it; the remaining draft stays for the next pass.

Shape suffixes: B images, T tokens fed in one pass, S = T - 1 draft tokens, K neighbors, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vargen.decoding.interfaces import TokenModel
from vargen.decoding.next_token.acceptance.exact import gather_prob, resample_rejected
from vargen.decoding.next_token.acceptance.neighborhood import build_neighbor_table, require_codebook
from vargen.decoding.next_token.acceptance.relaxed import RelaxedRule
from vargen.decoding.next_token.acceptance.siblings import Siblings
from vargen.decoding.noise import Noise, Purpose
from vargen.decoding.tree import Draft, Verdict
from vargen.values import number_field


@dataclass(frozen=True)
class PooledRule(RelaxedRule):
    """Relaxed rule of MuLo-SD: accept a draft token if it and its `size` nearest codebook neighbors sum to p >= `threshold`.

    MuLo-SD 2026, arXiv 2601.05149. Two differences from the paper avoid needless bias. (1) Below the threshold we apply the
    exact test min(1, p / q) instead of rejecting: rejecting more than the exact rule adds bias for no gain. (2) After the first
    rejection, MuLo keeps the draft tokens that pass and resamples the others. Here this is a coupling: a draft token that was
    not reached is kept with the probability that the rule gives it, otherwise resampled from norm((p - q)+), so it is
    distributed as p except for the relaxation spent. Relaxation is counted where it is spent, also on draft tokens that were
    not reached.

    Draft tokens within `radius` rows and columns of a rejected token, and after it in raster order, are resampled from p
    whether they pass or not (the paper's local expansion). Tokens before it are left alone: their p does not depend on it, and
    letting a later token decide about an earlier one would bias the output.

    Args:
        size: number of neighbors, at least 0; limited by the size of the codebook.
        threshold: tau, above 0; above 1 no token passes by its pooled probability.
        radius: at least 0.
        budget, tightening: see `RelaxedRule`. With a budget of 0 this is the exact rule with a maximal coupling.

    Raises:
        ValueError: if a value is out of range. `bind` raises it if the radius exceeds the grid, or if the rule needs a codebook
            and the model has none or one for another vocabulary.
    """

    topologies = ("chain",)

    size: int = number_field(10, 0, is_integer=True, meaning="the number of neighbors")
    threshold: float = number_field(0.3, 0, open_below=True)
    radius: int = number_field(0, 0, is_integer=True)
    neighbor_table: Tensor | None = field(
        default=None, init=False, repr=False, compare=False
    )  # int16 or int32 `[V, K]`; see `bind`
    columns: int = field(default=0, init=False, repr=False, compare=False)  # of the grid, set by `bind`

    def bind(self, model: TokenModel) -> PooledRule:
        """Return the rule with the grid and the neighbor table of the model's codebook, which is computed on first use."""
        rows, columns = model.grid
        if self.radius and self.radius >= max(rows, columns):
            raise ValueError(f"radius must be less than the grid of {rows} x {columns}, got {self.radius}")
        bound = replace(self)
        object.__setattr__(bound, "columns", columns)
        if self.size and self.threshold <= 1:
            object.__setattr__(bound, "neighbor_table", build_neighbor_table(require_codebook(model), self.size))
        return bound

    def fit_to_grid(self, rows: int, columns: int) -> PooledRule:
        return replace(self, radius=min(self.radius, max(rows, columns) - 1))

    def pooled_prob(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Total probability of `tokens` `[B, S]` and their neighbors under p `[B, S, V]`: float `[B, S]`."""
        own = gather_prob(p, tokens)
        return own if self.neighbor_table is None else own + p.gather(2, self.neighbor_table[tokens].long()).sum(2)

    def accept_prob(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        return (self.pooled_prob(p, tokens) >= self.threshold).to(p.dtype)

    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
        """See `AcceptanceRule`. `Verdict.sampled` holds the draft tokens, with rejected ones replaced."""
        verdict, drafted, spent = self.verify_chain(probs, draft, noise, relaxation)
        accepted, near = self._split_accepted(verdict, drafted, spent, draft, noise)
        sampled = resample_rejected(probs, draft, noise, accepted, near)
        return replace(verdict, sampled=sampled, relaxation=(spent * ~near).sum(1))

    def _split_accepted(
        self, verdict: Verdict, drafted: Siblings, spent: Tensor, draft: Draft, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        """Return two masks over draft tokens, bool `[B, S]` each: which are accepted, and which are close after a rejected one.

        Entries of committed tokens are undefined.
        """
        slot = torch.arange(spent.shape[1], device=spent.device)
        accepted = noise.uniform(Purpose.RESAMPLE_ACCEPT)[:, :-1] < drafted.exact_accept_prob + spent
        if draft.valid is not None:
            accepted &= draft.valid
        committed = slot < verdict.count[:, None] - 1
        if not self.radius:
            return accepted, torch.zeros_like(accepted)
        first = slot == verdict.count[:, None] - 1  # rejected by the verdict, which used other uniforms
        rejected = (first | ~accepted) & ~committed
        if draft.valid is not None:
            rejected &= draft.valid
        return accepted, self._is_near_rejected(rejected, noise.position[:, :-1]) & ~committed & ~first

    def _is_near_rejected(self, rejected: Tensor, position: Tensor) -> Tensor:
        """bool `[B, S]`: positions after a rejected one in raster order, within `radius` rows and columns of it."""
        row, column = position // self.columns, position % self.columns
        down, across = row[:, :, None] - row[:, None, :], column[:, :, None] - column[:, None, :]  # from one to another
        after = position[:, :, None] > position[:, None, :]
        return (after & (down <= self.radius) & (across.abs() <= self.radius) & rejected[:, None, :]).any(2)
