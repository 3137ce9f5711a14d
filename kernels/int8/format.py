"""Numbers of the int8 arithmetic (`vargen.kernels.int8.arithmetic`), and arrays that compiled passes read and write.

Imports neither torch nor Numba. Text in annotations is the dtype and the shape.

Shape suffixes: L layers, R rows, M tokens of all rows of a pass, D width, G key heads, K head width, S cache slots, P prefix
slots, N outputs and C inputs of a matrix; N' is N rounded up to 64, and other primes mean rounded up, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np

from vargen.kernels.int8.instructions import LAYOUTS, instruction_set

INT8_MAX = 127
NORM_MAX = 32767  # of the integers whose squares a norm sums
TINY = 2.0**-100  # smallest maximum of a row, for rows of zeros
EXP_UNITS = 2.0**19  # of the terms of a softmax, whose largest is 1
WEIGHT_SUM = 32000.0  # sum of the integer attention weights; each fits 16 bits
EXP_RANGE = 87.0
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
EXP_TERMS = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)  # of the Taylor series, highest power first
PANEL = 64  # columns of a matrix are a multiple of it
TEAM = 40  # integers that the cores of a pass share
ENDED, MOST_PARTS = 32, 33  # places of two of them: the number of the last pass that has ended; parts of a product
_PARTS = 16
_SHARED_WEIGHTS = 2**24  # bytes, about what caches hold: smaller products end before another core has begun
QUERIES = 4  # queries of a block: 16 vectors of sums fit the registers
_EXACT = 2**24  # all integers up to it are float32 numbers


def score_limit(head_dim: int) -> int:
    """Largest absolute integer of queries and keys: their dot products then fit 24 bits."""
    return math.isqrt(_EXACT // head_dim)


def value_limit(slots: int) -> int:
    """Largest absolute integer of values, if up to `slots` slots are visible: their weighted sums then fit 24 bits."""
    return int(_EXACT // (WEIGHT_SUM + slots / 2 + 1))


class Matrix(NamedTuple):
    """A packed matrix of 8-bit integers, for products with bytes of which each has `Layout.offset` added."""

    values: Annotated[np.ndarray, "int8 [N' C']"]
    start: Annotated[np.ndarray, "int32 [N']"]  # initial sums: minus the offset times the sum of each output channel
    scale: Annotated[np.ndarray, "float32 [N']"]  # of the output channels


class Layers(NamedTuple):
    """The four matrices of each layer, whose columns lie one after the other in `start` and `scale`."""

    packed: Annotated[np.ndarray, "int64 [L, 4]"]  # addresses of their values
    start: Annotated[np.ndarray, "int32 [L, N]"]
    scale: Annotated[np.ndarray, "float32 [L, N]"]


class Slots(NamedTuple):
    """A cache of pairs of 16-bit integers, and the largest integers of keys and of values.

    An instruction multiplies pairs of 16 slots or columns. Number j of slot s of a head is in:

        k           s = 0      s = 1              v           j = 0         j = 1
        [0]        j = 0, 1   j = 0, 1            [0]        s = 0, 1      s = 0, 1
        [1]        j = 2, 3   j = 2, 3            [1]        s = 2, 3      s = 2, 3

    Slots are [ prefix | image tokens | scratch ]. Rows are first, so that a slice of them is contiguous.
    """

    k: Annotated[np.ndarray, "int32 [R, L, G, K/2, S']"]
    v: Annotated[np.ndarray, "int32 [R, L, G, S'/2, K']"]
    k_scale: Annotated[np.ndarray, "float32 [R, L, G, S']"]
    v_scale: Annotated[np.ndarray, "float32 [R, L, G, S']"]
    length: Annotated[np.ndarray, "int64 [R]"]  # image tokens that the rows hold; 0 in passes of scales
    bias: Annotated[np.ndarray, "float32 [R, P]"]  # added to the scores of the prefix
    limits: tuple[int, int]


def allocate_slots(layers: int, rows: int, heads: int, head_dim: int, *, prefix: int, slots: int, most: int) -> Slots:
    """Allocate a cache of zeros; `most` is the number of visible slots that any cache of the network has at most."""
    shape = rows, layers, heads
    padded, width = (-(-each // 16) * 16 for each in (slots, head_dim))
    return Slots(
        k=np.zeros((*shape, head_dim // 2, padded), np.int32),
        v=np.zeros((*shape, padded // 2, width), np.int32),
        k_scale=np.zeros((*shape, padded), np.float32),
        v_scale=np.zeros((*shape, padded), np.float32),
        length=np.zeros(rows, np.int64),
        bias=np.zeros((rows, prefix), np.float32),
        limits=(score_limit(head_dim), value_limit(most)),
    )


class Buffers(NamedTuple):
    """Inputs and outputs of the products of a pass; of attention, the queries, and what four of them need at a time."""

    pairs: Annotated[np.ndarray, "int16 [M, longest]"]  # inputs, where instructions multiply pairs; else [1, 1]
    team: Annotated[np.ndarray, "int64 [S]"]  # see `vargen.kernels.int8.sharing`
    wide: Annotated[np.ndarray, "uint8 [M, D']"]  # inputs of all products but the last of a layer
    hidden: Annotated[np.ndarray, "uint8 [M, F']"]  # inputs of that one
    scale: Annotated[np.ndarray, "float32 [M]"]
    sums: Annotated[np.ndarray, "int32 [M N']"]
    row: Annotated[np.ndarray, "float32 [longest]"]  # as many as a row has columns, and 4 more than slots
    q: Annotated[np.ndarray, "int16 [G, queries + 3, K]"]  # of a row
    q_scale: Annotated[np.ndarray, "float32 [G, queries]"]
    dots: Annotated[np.ndarray, "int32 [4, S']"]
    weights: Annotated[np.ndarray, "int16 [4, S']"]
    mixed: Annotated[np.ndarray, "int32 [4, K']"]  # weighted sums of values
    attended: Annotated[np.ndarray, "float32 [M, D]"]
    places: Annotated[np.ndarray, "int64 [2, R, tokens]"]  # in passes of tokens: how far each sees, and its cell of the grid


def pack_matrix(weight_NC: np.ndarray, scale_N: np.ndarray) -> Matrix:
    """Reorder an int8 matrix for products by this CPU's instructions; see `vargen.kernels.int8.instructions.Layout`."""
    N, C = weight_NC.shape
    columns, together, _, offset = LAYOUTS[instruction_set()]
    padded = np.zeros((-(-N // PANEL) * PANEL, -(-C // 4) * 4), np.int8)
    padded[:N, :C] = weight_NC
    values = padded.reshape(len(padded) // columns, columns, -1, together).transpose(0, 2, 1, 3)
    scale = np.ones(len(padded), np.float32)
    scale[:N] = scale_N
    return Matrix(np.ascontiguousarray(values).reshape(-1), -offset * padded.sum(1, dtype=np.int32), scale)


def join_layers(matrices: Sequence[Sequence[Matrix]]) -> Layers:
    """Describe the four matrices of each layer. They must be kept as long as this is used, which has only their addresses."""
    starts, scales = (np.stack([np.concatenate([each[i] for each in four]) for four in matrices]) for i in (1, 2))
    return Layers(np.array([[each.values.ctypes.data for each in four] for four in matrices]), starts, scales)


def make_team(weights: int) -> np.ndarray:
    """Return `Buffers.team` for products with this number of weights."""
    team = np.zeros(TEAM, np.int64)
    team[MOST_PARTS] = _PARTS if weights > _SHARED_WEIGHTS else 1
    return team


def make_buffers(
    layers: Layers, output: Matrix | None, slots: Slots, shape: tuple[int, int], heads: int, width: int, hidden: int
) -> Buffers:
    """Allocate buffers for passes.

    Args:
        output: the matrix of the output layer; None: it is run otherwise.
        shape: rows, and most tokens of each.
        heads: query heads.
        width, hidden: D and F, most inputs of the products but the last of a layer, and inputs of that one.
    """
    G, pairs, S = slots.k.shape[2:]
    tokens, queries = math.prod(shape), heads // G * shape[1]
    columns = max(layers.start.shape[1], 0 if output is None else len(output.start))
    longest = max(-(-each // 4) * 4 for each in (width, hidden))
    return Buffers(
        pairs=np.zeros((tokens, longest) if LAYOUTS[instruction_set()].widened else (1, 1), np.int16),
        team=make_team(layers.start.size * width),
        wide=np.zeros((tokens, -(-width // 4) * 4), np.uint8),
        hidden=np.zeros((tokens, -(-hidden // 4) * 4), np.uint8),
        scale=np.zeros(tokens, np.float32),
        sums=np.zeros(tokens * columns, np.int32),
        row=np.zeros(max(columns, S) + QUERIES, np.float32),
        q=np.zeros((G, queries + QUERIES - 1, 2 * pairs), np.int16),
        q_scale=np.zeros((G, queries), np.float32),
        dots=np.zeros((QUERIES, S), np.int32),
        weights=np.zeros((QUERIES, S), np.int16),
        mixed=np.zeros((QUERIES, slots.v.shape[4]), np.int32),
        attended=np.zeros((tokens, width), np.float32),
        places=np.zeros((2, *shape), np.int64),
    )
