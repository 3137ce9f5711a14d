"""Shapes of the programs of tree attention: a table by head width and queries, and how many parts the keys are split into.

The tiles are those that compile for sm_80, sm_90 and sm_100 without running out of registers (tests/kernels/test_aot.py reads
registers, spills and shared memory from the compiled artefacts); which of them is quickest on a GPU has not been measured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """`queries` x `keys` of a tile, warps and pipeline stages of a program."""

    queries: int
    keys: int
    warps: int
    stages: int


# By head width (up to) and queries (up to): two-byte dtypes.
TILES: dict[tuple[int, int], Tiles] = {
    (64, 16): Tiles(16, 64, 4, 3),
    (64, 32): Tiles(32, 64, 4, 3),
    (64, 64): Tiles(64, 64, 4, 2),
    (128, 16): Tiles(16, 64, 4, 2),
    (128, 32): Tiles(32, 64, 8, 2),
    (128, 64): Tiles(64, 32, 4, 2),
}
FLOAT32 = {64: Tiles(16, 32, 4, 2), 128: Tiles(16, 32, 8, 2)}  # by head width: no tensor cores, exact products

MOST_WIDTH = 128  # of a head
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_PROGRAMS = 2 * 132  # two for each multiprocessor of an H100 or H200
_LEAST_KEYS = 128  # of a split, at the longest context
_MOST_SPLITS = 16


def tiles_for(queries: int, width: int, dtype: torch.dtype) -> Tiles:
    """The tile of so many (token, query head) pairs of one key head."""
    wide = 64 if width <= 64 else 128
    if dtype == torch.float32:
        return FLOAT32[wide]
    return TILES[wide, 16 if queries <= 16 else 32 if queries <= 32 else 64]


def splits_for(programs: int, slots: int, keys: int) -> int:
    """Into how many parts the keys are split, a power of two, where there are so many programs already.

    By shapes alone: a captured graph serves all lengths.
    """
    wanted = min(_PROGRAMS // programs, _MOST_SPLITS)  # not more: each part is written and read once again
    splits = 1
    while 2 * splits <= wanted and slots >= 2 * splits * max(_LEAST_KEYS, keys):
        splits *= 2
    return splits
