"""Threads that help with the products of compiled passes; see `vargen.kernels.int8.sharing`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from vargen.kernels.int8.format import ENDED, MOST_PARTS

_MOST = 8  # cores; memory has no more bytes for further ones


@lru_cache(maxsize=1)
def _helpers(process: int, count: int) -> ThreadPoolExecutor:
    """Threads of a process, which a fork does not have."""
    return ThreadPoolExecutor(count, thread_name_prefix="vargen-products")


@contextmanager
def share_products(compiled: Any, team: np.ndarray) -> Iterator[None]:
    """Let as many threads as torch has, but at most 8, compute the products of one compiled pass.

    Args:
        compiled: the module of the pass.
        team: its `Buffers.team`, of which a thread runs one pass at a time.
    """
    count = min(torch.get_num_threads(), _MOST) - 1 if team[MOST_PARTS] > 1 else 0
    number = int(team[ENDED]) + 1 if count else 0
    helpers = [_helpers(os.getpid(), count).submit(compiled.help_pass, team, number) for _ in range(count)]
    try:
        yield
    finally:
        if count:
            team[ENDED] = number
            for each in helpers:
                each.cancel()  # those that did not arrive
