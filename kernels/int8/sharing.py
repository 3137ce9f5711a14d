"""Products of a pass that several cores share: parts of the columns are handed out, so that each sum is that of one core.

The core of the caller runs the pass. Others help from when they arrive until the pass ends; it waits for none to arrive, only
for parts that another core has begun. What they share is an array of 64-bit integers, `Buffers.team`, with the arguments of the
present product and a ticket: the number of the product, how many parts it has, and the next part.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from vargen.kernels.int8.format import ENDED, MOST_PARTS, PANEL
from vargen.kernels.int8.steps import INNER, compiled, i64, multiply_columns, widen_rows

_TICKET, _DONE, _GIVEN = 0, 8, 16  # places in the array: in cache lines of their own, as is `ENDED`
_FIELD, _MASK = i64(16), i64(0xFFFF)
_SPINS = 64  # before the time slice is given to others, which may be the core that this one waits for
_I64 = ir.IntType(64)


def _atomic(make: Callable[..., Any], count: int) -> Any:
    """An intrinsic over the address of a place and `count` - 1 integers, from what builds its instruction."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _I64.as_pointer())
        return make(builder, place, *arguments[1:]) or _I64(0)

    signature = types.int64(*[types.intp] * count)
    bodies = (
        lambda context, place: (signature, generate),
        lambda context, place, value: (signature, generate),
        lambda context, place, value, other: (signature, generate),
    )
    return intrinsic(bodies[count - 1])


def _store(builder: Any, place: Any, value: Any) -> None:
    builder.store_atomic(value, place, "seq_cst", 8)


def _exchange(builder: Any, place: Any, expected: Any, value: Any) -> Any:
    done = builder.extract_value(builder.cmpxchg(place, expected, value, "seq_cst", "seq_cst"), 1)
    return builder.zext(done, _I64)


def _yield(builder: Any, place: Any) -> None:
    if os.name == "posix":
        builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), ()), "sched_yield"), ())


_load_place = _atomic(lambda builder, place: builder.load_atomic(place, "seq_cst", 8), 1)
_store_place = _atomic(_store, 2)
_add_place = _atomic(lambda builder, place, value: builder.atomic_rmw("add", place, value, "seq_cst"), 2)
_exchange_place = _atomic(_exchange, 3)
_yield_core = _atomic(_yield, 1)


@njit(**INNER)
def _take_parts(team):
    """Compute parts of the present product until none is left; returns whether there was one."""
    base, found = i64(team.ctypes.data), False
    while True:
        ticket = _load_place(base + 8 * _TICKET)
        part, parts = ticket & _MASK, (ticket >> _FIELD) & _MASK
        if part >= parts:
            return found
        if _exchange_place(base + 8 * _TICKET, ticket, ticket + 1):
            found, N = True, team[_GIVEN]
            width = -(-N // (PANEL * parts)) * PANEL
            first = part * width
            last = first + width if first + width < N else N
            multiply_columns(
                first, last, N, team[_GIVEN + 1], team[_GIVEN + 2], team[_GIVEN + 3], team[_GIVEN + 4], team[_GIVEN + 5],
                team[_GIVEN + 6], team[_GIVEN + 7],
            )  # fmt: skip
            _add_place(base + 8 * _DONE, 1)


@njit(**INNER)
def product(x, rows, matrix, start, steps, pairs, team, sums, N):
    """Products of byte rows `x [M, 4 steps]` with a packed matrix of N columns, a multiple of 64, to int32 `sums [M, N]`.

    Args:
        matrix: address of the bytes of `vargen.kernels.int8.format.pack_matrix`.
        start: int32 `[N]`, initial sums, which undo what is added to the bytes.
        pairs: int16 `[M, >= 4 steps]`, overwritten where instructions multiply pairs of 16-bit integers.
        team: `Buffers.team`.
    """
    address, row_stride = widen_rows(x, rows, steps, pairs)
    base, panels, most = i64(team.ctypes.data), N // PANEL, team[MOST_PARTS]
    parts = panels if panels < most else most
    given = (
        i64(N), i64(rows), address, row_stride, matrix, i64(start.ctypes.data), i64(steps), i64(sums.ctypes.data),
    )  # fmt: skip
    for place in range(len(given)):
        team[_GIVEN + place] = given[place]
    _store_place(base + 8 * _DONE, 0)
    number = (_load_place(base + 8 * _TICKET) >> i64(32)) + 1
    _store_place(base + 8 * _TICKET, (number << i64(32)) | (parts << _FIELD))
    _take_parts(team)
    spins = 0
    while _load_place(base + 8 * _DONE) < parts:
        spins += 1
        if spins > _SPINS:
            _yield_core(base)


@compiled("int64 [S]", int)
def help_pass(team, number):
    """Compute parts of the products of pass `number` until it ends."""
    base, spins = i64(team.ctypes.data), 0
    while _load_place(base + 8 * ENDED) < number:
        spins = 0 if _take_parts(team) else spins + 1
        if spins > _SPINS:
            _yield_core(base)
