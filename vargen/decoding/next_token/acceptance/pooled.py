"""PooledRule acceptance with local repair (MuLo-SD): a draft stands if it and the tokens that look like it have enough
probability together; what does not stand is drawn anew, with the drafts around it, and the others wait for their turn.

Shape suffixes: B images, T fed tokens of one pass, S = T - 1 drafts, K neighbours, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vargen.decoding.next_token.acceptance.exact import probability, resample_rejected
from vargen.decoding.next_token.acceptance.neighborhood import build_neighbor_table, require_codebook
from vargen.decoding.next_token.acceptance.relaxed import RelaxedRule
from vargen.decoding.next_token.acceptance.siblings import Siblings
from vargen.decoding.next_token.draft import Draft, Verdict
from vargen.decoding.next_token.protocols import TokenModel
from vargen.decoding.noise import Noise, Purpose
from vargen.values import parse_float, parse_int, short_repr


@dataclass(frozen=True)
class PooledRule(RelaxedRule):
    """RelaxedRule: a draft x is accepted if p(x) and the p of its `size` nearest tokens in codebook space sum to `threshold`.

    MuLo-SD 2026, arXiv 2601.05149. Drafts below it are judged exactly, where MuLo refuses them: refusing more
    than p / q asks biases the output for nothing. Past the first refusal MuLo keeps what stands and draws the rest anew, which
    here is a coupling: a draft that is not reached yet is kept with the chance that the rule gives it, else drawn from
    norm((p - q)+), so that its probabilities are p, but for what was granted. That is counted where it is granted, for drafts
    that were not reached as well.

    Drafts up to `radius` rows or columns behind a refused one, behind in raster order, are drawn anew from p whether they stand
    or not (MuLo's local expansion). Those before it are not: their p has not seen it, and to let the fate of a later token
    decide over an earlier one would bias it.

    Drafts that their drafter wants kept (`Draft.kept`, as `Wavefront` does) stand in any case; that is granted, and counted.

    Args:
        size: neighbours, 0 or more; where the codebook has fewer, all.
        threshold: tau, above 0; above 1 nothing passes by its mass.
        radius: 0 or more.
        budget, tightening: see `RelaxedRule`. With a budget of 0 it is the exact rule with a maximal coupling.

    Raises:
        ValueError: for values outside these ranges; by `bind` for a radius that the grid does not have, or if it needs a
            codebook and the model has none, or one of another vocabulary.
    """

    topologies = ("chain",)

    size: int = 10
    threshold: float = 0.3
    radius: int = 0
    nearest: Tensor | None = field(default=None, init=False, repr=False, compare=False)  # int16 or int32 `[V, K]`, by `bind`
    columns: int = field(default=0, init=False, repr=False, compare=False)  # of the grid, by `bind`

    def __post_init__(self) -> None:
        super().__post_init__()
        size, threshold, radius = parse_int(self.size, 0), parse_float(self.threshold), parse_int(self.radius, 0)
        if size is None:
            raise ValueError(
                f"size, the neighbours of a token, must be a whole number of at least 0, got {short_repr(self.size)}"
            )
        if threshold is None or threshold <= 0:
            raise ValueError(f"threshold, the mass that lets a draft stand, must be above 0, got {short_repr(self.threshold)}")
        if radius is None:
            raise ValueError(f"radius must be a whole number of at least 0 (the draft alone), got {short_repr(self.radius)}")
        for name, value in (("size", size), ("threshold", threshold), ("radius", radius)):
            object.__setattr__(self, name, value)

    def bind(self, model: TokenModel) -> PooledRule:
        """This rule with the grid and the neighbours in the model's codebook, which are made the first time."""
        rows, columns = model.grid
        if self.radius and self.radius >= max(rows, columns):
            raise ValueError(f"radius must be less than the grid of {rows} x {columns}, got {self.radius}")
        bound = replace(self)
        object.__setattr__(bound, "columns", columns)
        if self.size and self.threshold <= 1:
            object.__setattr__(bound, "nearest", build_neighbor_table(require_codebook(model), self.size))
        return bound

    def mass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """p of `tokens` `[B, S]` and of their neighbours under p `[B, S, V]`: float `[B, S]`."""
        own = probability(p, tokens)
        return own if self.nearest is None else own + p.gather(2, self.nearest[tokens].long()).sum(2)

    def wanted(self, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        return (self.mass(p, tokens) >= self.threshold).to(p.dtype)

    def granted(self, siblings: Siblings, depth: Tensor) -> Tensor:
        granted = super().granted(siblings, depth)
        return granted if siblings.kept is None else torch.where(siblings.kept, 1 - siblings.exact_chance, granted)

    def __call__(self, probs: Tensor, draft: Draft, noise: Noise, relaxation: Tensor) -> Verdict:
        """See `AcceptanceRule`. `drawn` holds the drafts that stand, and others in the place of those that do not."""
        verdict, drafted, granted = self.along_chain(probs, draft, noise, relaxation)
        kept, again = self._standing(verdict, drafted, granted, draft, noise)
        drawn = resample_rejected(probs, draft, noise, kept, again)
        return replace(verdict, drawn=drawn, relaxation=(granted * ~again).sum(1))

    def _standing(
        self, verdict: Verdict, drafted: Siblings, granted: Tensor, draft: Draft, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        """Of drafts, bool `[B, S]` each: which stand, and which are near behind a refused one; neither says anything of those
        that are committed."""
        slot = torch.arange(granted.shape[1], device=granted.device)
        kept = noise.uniform(Purpose.REDRAW_ACCEPT)[:, :-1] < drafted.exact_chance + granted
        if draft.valid is not None:
            kept &= draft.valid
        reached = slot < verdict.count[:, None] - 1  # accepted
        if not self.radius:
            return kept, torch.zeros_like(kept)
        first = slot == verdict.count[:, None] - 1  # the one refused by the verdict, whose coin is another
        refused = (first | ~kept) & ~reached
        if draft.valid is not None:
            refused &= draft.valid
        return kept, self._near(refused, noise.position[:, :-1]) & ~reached & ~first

    def _near(self, refused: Tensor, position: Tensor) -> Tensor:
        """Which places `[B, S]`, in raster order, are at most `radius` rows and columns away from, and behind, one of those."""
        row, column = position // self.columns, position % self.columns
        down, across = row[:, :, None] - row[:, None, :], column[:, :, None] - column[:, None, :]  # of a place from another
        behind = position[:, :, None] > position[:, None, :]
        return (behind & (down <= self.radius) & (across.abs() <= self.radius) & refused[:, None, :]).any(2)
