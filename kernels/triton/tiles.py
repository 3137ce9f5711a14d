"""Tile sizes of tree attention by head width and number of queries, and the number of splits of the keys.

The tiles compile for sm_80, sm_90 and sm_100 without register spills (tests/kernels/test_aot.py reads registers, spills and
shared memory from the compiled artifacts). Which tiles are fastest on a GPU has not been measured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """Tile of `queries` x `keys`, and the warps and pipeline stages of a program."""

    queries: int
    keys: int
    warps: int
    stages: int


# For two-byte dtypes, by maximum head width and maximum number of queries.
TILES: dict[tuple[int, int], Tiles] = {
    (64, 16): Tiles(16, 64, 4, 3),
    (64, 32): Tiles(32, 64, 4, 3),
    (64, 64): Tiles(64, 64, 4, 2),
    (128, 16): Tiles(16, 64, 4, 2),
    (128, 32): Tiles(32, 64, 8, 2),
    (128, 64): Tiles(64, 32, 4, 2),
}
FLOAT32 = {64: Tiles(16, 32, 4, 2), 128: Tiles(16, 32, 8, 2)}  # by maximum head width; exact products, without tensor cores

MAX_HEAD_DIM = 128  # maximum head width
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_TARGET_PROGRAMS = 2 * 132  # two per multiprocessor of an H100 or H200
_MIN_SPLIT_KEYS = 128  # minimum keys of a split, at the longest context
_MAX_SPLITS = 16


def choose_tiles(queries: int, width: int, dtype: torch.dtype) -> Tiles:
    """Return the tile for `queries` (token, query head) pairs of one key head."""
    wide = 64 if width <= 64 else 128
    if dtype == torch.float32:
        return FLOAT32[wide]
    return TILES[wide, 16 if queries <= 16 else 32 if queries <= 32 else 64]


def choose_splits(programs: int, slots: int, keys: int) -> int:
    """Return the number of splits of the keys, a power of two, given the number of programs without splits.

    It depends only on shapes, so that a captured graph is valid for all lengths.
    """
    most = min(_TARGET_PROGRAMS // programs, _MAX_SPLITS)  # limited: each partial output is written and read once more
    splits = 1
    while 2 * splits <= most and slots >= 2 * splits * max(_MIN_SPLIT_KEYS, keys):
        splits *= 2
    return splits
