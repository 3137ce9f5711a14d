"""Numbers of the int8 arithmetic (`vargen.kernels.int8.arithmetic`) and layout of its matrices, for all implementations.

Imports neither torch nor Numba.
"""

from __future__ import annotations

import math

import numpy as np

INT8_MAX = 127
NORM_MAX = 32767  # of the integers whose squares a norm sums
TINY = 2.0**-100  # smallest maximum of a row, for rows of zeros
EXP_UNITS = 2.0**19  # of the terms of a softmax, whose largest is 1
WEIGHT_SUM = 32000.0  # sum of the integer attention weights; each fits 16 bits
EXP_RANGE = 87.0
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
EXP_TERMS = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)  # of the Taylor series, highest power first
PANEL = 64  # columns of a matrix that are stored together
QUERIES = 4  # queries of a block: 16 vectors of sums fit the registers
_EXACT = 2**24  # all integers up to it are float32 numbers


def score_limit(head_dim: int) -> int:
    """Largest absolute integer of queries and keys: their dot products then fit 24 bits."""
    return math.isqrt(_EXACT // head_dim)


def value_limit(slots: int) -> int:
    """Largest absolute integer of values, if up to `slots` slots are visible: their weighted sums then fit 24 bits."""
    return int(_EXACT // (WEIGHT_SUM + slots / 2 + 1))


def pack_matrix(weight_NK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reorder an int8 matrix for products: 64 columns side by side, four consecutive inputs of each together.

    Returns:
        int8 bytes, and int32 `[N']`, minus 128 times the sum of each output channel; N' is N rounded up to 64.
    """
    N, K = weight_NK.shape
    padded = np.zeros((-(-N // PANEL) * PANEL, -(-K // 4) * 4), np.int8)
    padded[:N, :K] = weight_NK
    packed = padded.reshape(len(padded) // PANEL, PANEL, -1, 4).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(packed).reshape(-1), -128 * padded.sum(1, dtype=np.int32)
