"""Scales of Infinity's images by aspect ratio and size, and the rotary positions of their tokens.

Source: Han et al. 2024, "Infinity: Scaling Bitwise AutoRegressive Modeling for High-Resolution Image Synthesis"
(arXiv:2412.04431), whose official tables these are.

Shape suffixes: L tokens of all scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from vargen.values import parse_int, short_repr

Grid = tuple[int, int]  # rows and columns

NUM_SCALES = {"0.06M": 7, "0.25M": 10, "0.60M": 12, "1M": 13}  # by the official name of a number of pixels, `pn`
MOST_SCALES = 13

# Rows and columns of the scales of images that are at least as high as wide, by height / width.
_TALL = {
    1.0: "1x1 2x2 4x4 6x6 8x8 12x12 16x16 20x20 24x24 32x32 40x40 48x48 64x64",
    1.25: "1x1 2x2 3x3 5x4 10x8 15x12 20x16 25x20 30x24 35x28 45x36 55x44 70x56",
    1.333: "1x1 2x2 4x3 8x6 12x9 16x12 20x15 24x18 28x21 36x27 48x36 60x45 72x54",
    1.5: "1x1 2x2 3x2 6x4 9x6 15x10 21x14 27x18 33x22 39x26 48x32 63x42 78x52",
    1.75: "1x1 2x2 3x3 7x4 11x6 14x8 21x12 28x16 35x20 42x24 56x32 70x40 84x48",
    2.0: "1x1 2x2 4x2 6x3 10x5 16x8 22x11 30x15 38x19 46x23 60x30 74x37 90x45",
    2.5: "1x1 2x2 5x2 10x4 15x6 20x8 25x10 30x12 40x16 50x20 65x26 80x32 100x40",
    3.0: "1x1 2x2 6x2 9x3 15x5 21x7 27x9 36x12 45x15 54x18 72x24 90x30 111x37",
}


def _read_tables() -> dict[float, tuple[Grid, ...]]:
    tables: dict[float, tuple[Grid, ...]] = {}
    for ratio, text in _TALL.items():
        grids = [tuple(map(int, each.split("x"))) for each in text.split()]
        tables[ratio] = tuple((rows, columns) for rows, columns in grids)
        inverse = int(1000 / ratio) / 1000  # official keys are cut, not rounded
        tables[inverse] = tuple((columns, rows) for rows, columns in grids)
    return tables


SCALES = _read_tables()


@dataclass(frozen=True)
class ScalePlan:
    """The scales of an image.

    Attributes:
        scales: rows and columns of the token grids, coarse to fine.
        final: rows and columns of the finest grid that the ratio has at any size. Rotary positions are places in it.
    """

    scales: tuple[Grid, ...]
    final: Grid

    @classmethod
    def official(cls, num_scales: int = MOST_SCALES, ratio: float = 1.0) -> ScalePlan:
        """Return the first `num_scales` scales of the official ratio nearest to this height / width."""
        table = SCALES[min(SCALES, key=lambda each: abs(each - ratio))]
        return cls(table[:num_scales], table[-1])

    @property
    def ends(self) -> tuple[int, ...]:
        """Number of tokens up to each scale, included."""
        return tuple(accumulate(rows * columns for rows, columns in self.scales))

    @property
    def cached_tokens(self) -> int:
        """Number of tokens of all scales but the last, whose keys no later pass reads."""
        return (0, *self.ends)[-2]

    def levels(self, device: torch.device | None = None) -> Tensor:
        """The scale of each token, int64 `[L]`."""
        counts = torch.tensor([rows * columns for rows, columns in self.scales], device=device)
        return torch.arange(len(counts), device=device).repeat_interleave(counts, output_size=self.ends[-1])

    def positions(self) -> Tensor:
        """Row and column of each token in the final grid, float32 `[L, 2]`: rounded, ties to even, as officially."""
        found = []
        for grid in self.scales:
            rows, columns = (
                (torch.arange(side, dtype=torch.float32) * (last / side)).round()
                for side, last in zip(grid, self.final, strict=True)
            )
            found.append(torch.cartesian_prod(rows, columns))
        return torch.cat(found)


def choose_plan(height: Any, width: Any, pn: Any, num_scales: int, stride: int) -> ScalePlan:
    """Return the official scales nearest to a requested size.

    The ratio is the one nearest to height / width. Without `pn`, the number of scales is the one whose image has the number of
    pixels nearest to height x width; without a size, the model's own.

    Args:
        height, width: of the image in pixels, both or neither.
        pn: official name of a number of pixels, of `NUM_SCALES`; or None.
        num_scales: of the model's usual images.
        stride: pixels of a token along a side.
    """
    if (height is None) != (width is None):
        missing, name, value = ("width", "height", height) if width is None else ("height", "width", width)
        raise ValueError(f"{name} must come with {missing}, got {name}={short_repr(value)} alone")
    for name, value in (("height", height), ("width", width)):
        if value is not None and parse_int(value, 1, 2**16) is None:
            raise ValueError(f"{name} must be a whole number of pixels from 1 to {2**16}, got {short_repr(value)}")
    if pn is not None and (not isinstance(pn, str) or pn not in NUM_SCALES):
        raise ValueError(f"pn must be {', '.join(NUM_SCALES)} or None, got {short_repr(pn)}")
    if height is None:
        return ScalePlan.official(NUM_SCALES[pn] if pn else num_scales)
    counts = [NUM_SCALES[pn]] if pn else [num_scales, *NUM_SCALES.values()]
    plans = [ScalePlan.official(count, height / width) for count in counts]
    return min(plans, key=lambda plan: abs(height * width - stride**2 * math.prod(plan.scales[-1])))
