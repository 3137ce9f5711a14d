"""The steps between the products of a CPU pass, for Numba: bit for bit the operations of `vargen.kernels.int8.arithmetic`.

No fused multiply-adds and no other order of float operations: none of LLVM's fast-math flags that would allow them is set. Sums
and maxima are of integers, which LLVM vectorizes.

Exact dot products of integers are those of `vargen.kernels.int8.vector`. Addresses and strides are in bytes.

Shape suffixes: M rows of a product, D width, F hidden width, N output channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import numpy as np
from numba import from_dtype, njit, types

from vargen.kernels.int8.format import EXP_RANGE, EXP_TERMS, INT8_MAX, LN_2, LOG2_E, NORM_MAX, TINY
from vargen.kernels.int8.vector import LAYOUT, REGISTERS, WIDTH, bits_of_float, float_of_bits, make_dot

OPTIONS = {"fastmath": {"nnan", "nsz"}, "boundscheck": False, "error_model": "numpy", "nogil": True, "_nrt": False}
INNER = {**OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # functions that only compiled ones call

f32, i32, i64, f64 = np.float32, np.int32, np.int64, np.float64
ROUND = f32(1.5 * 2**23)  # adding and subtracting it rounds to the nearest integer, ties to even, for |x| < 2^22
ONE, ZERO, SMALLEST = f32(1), f32(0), f32(TINY)
_RANGE, _LOG2_E, _LN_2 = f32(EXP_RANGE), f32(LOG2_E), f32(LN_2)
_T0, _T1, _T2, _T3, _T4, _T5, _T6 = (f32(term) for term in EXP_TERMS)
_INT8, _INT8_UNIT = f32(INT8_MAX), f32(1 / INT8_MAX)
_NORM, _NORM_UNIT = f32(NORM_MAX), 1 / NORM_MAX
_OFFSET = i32(LAYOUT.offset)


def compiled(*arguments: Any, **options: Any) -> Callable[[Any], Any]:
    """Decorate a function that `vargen.kernels.int8.load` compiles, for arguments of these types.

    Args:
        arguments: types; those of contiguous arrays as text, such as "float32 [R, D]". Named tuples are annotated like this.
        options: of Numba, other than `OPTIONS`.
    """

    def decorate(function: Any) -> Any:
        made = njit(**{**OPTIONS, "no_cfunc_wrapper": True, **options})(function)
        made.argument_types = tuple(map(_type_of, arguments))
        return made

    return decorate


def _type_of(given: Any) -> Any:
    """Numba's type of an argument."""
    if isinstance(given, str):
        dtype, shape = given.split(" ", 1)
        return types.Array(from_dtype(np.dtype(dtype)), shape.count(",") + 1, "C")
    if hasattr(given, "_fields"):
        fields = get_type_hints(given, include_extras=True).values()
        return types.BaseTuple.from_types([_type_of(field) for field in fields], given)
    if hasattr(given, "__metadata__"):  # an annotated array
        return _type_of(given.__metadata__[0])
    if parts := get_args(given):
        return types.BaseTuple.from_types([_type_of(part) for part in parts])
    return from_dtype(np.dtype(given))


# -- steps -------------------------------------------------------------------------------------------------------------------


@njit(**INNER)
def exp(x):
    """`exact_exp` of a float32."""
    bounded = x if x > -_RANGE else -_RANGE
    power = (bounded if bounded < _RANGE else _RANGE) * _LOG2_E
    whole = (power + ROUND) - ROUND
    rest = (power - whole) * _LN_2
    total = _T0
    total = total * rest + _T1
    total = total * rest + _T2
    total = total * rest + _T3
    total = total * rest + _T4
    total = total * rest + _T5
    total = total * rest + _T6
    return total * float_of_bits(i32((i32(whole) + i32(127)) << i32(23)))


@njit(**INNER)
def largest(row):
    """Largest absolute value of float32 `row`, at least `TINY`."""
    top = bits_of_float(SMALLEST)
    for d in range(len(row)):
        bits = bits_of_float(abs(row[d]))
        top = bits if bits > top else top
    return float_of_bits(top)


@njit(**INNER)
def quantize(row, count, out):
    """Quantize float32 `row[:count]` to bytes `out`, with the offset of this CPU's set added; returns the scale."""
    top = largest(row[:count])
    factor = _INT8 / top
    for d in range(count):
        out[d] = np.uint8(i32((row[d] * factor + ROUND) - ROUND) + _OFFSET)
    return top * _INT8_UNIT


@njit(**INNER)
def norm(x, factor, shift, eps, out):
    """Norm of float32 `x [D]`, times `factor`, plus `shift`, to `out`; mean and variance are of 16-bit values.

    A layer norm; where `shift` is None, `exact_rms_norm`.
    """
    D = len(x)
    top = largest(x)
    units = _NORM / top
    total, squares = i64(0), i64(0)
    for d in range(D):
        value = i32((x[d] * units + ROUND) - ROUND)
        total += i64(value)
        squares += i64(i32(value * value))
    unit = f64(top) * _NORM_UNIT
    if shift is None:
        scale = f32(1.0 / np.sqrt(f64(squares) * unit * unit * (1.0 / D) + eps))
        for d in range(D):
            out[d] = x[d] * scale * factor[d]
    else:
        mean = f64(total) * unit / D
        variance = f64(squares) * unit * unit / D - mean * mean
        center, slope = f32(mean), f32(1.0 / np.sqrt(variance + eps))
        for d in range(D):
            out[d] = (x[d] - center) * slope * factor[d] + shift[d]


@njit(**INNER)
def add_rows(x, sums, stride, scale, channel_scale, bias, gain, T):
    """Add a product, int32 sums with `stride` columns a row, to the residual `x [R T, D]`.

    Args:
        bias, gain: float32 `[D]` and `[R, D]`, which the product is increased by, and then multiplied with; None: neither.
    """
    for m in range(len(x)):
        a, line = scale[m], sums[m * stride : m * stride + x.shape[1]]
        for d in range(x.shape[1]):
            value = f32(line[d]) * a * channel_scale[d]
            x[m, d] += value if gain is None else (value + bias[d]) * gain[m // T, d]


@njit(**INNER)
def add_normalized_rows(x, sums, stride, scale, channel_scale, norms, number, eps, row):
    """As `add_rows`, with one of the RMS norms float32 `[n, D]` of the product; `[0, D]`: without."""
    if len(norms) == 0:
        add_rows(x, sums, stride, scale, channel_scale, None, None, 1)
        return
    for m in range(len(x)):
        a, line = scale[m], sums[m * stride : m * stride + x.shape[1]]
        for d in range(x.shape[1]):
            row[d] = f32(line[d]) * a * channel_scale[d]
        norm(row[: x.shape[1]], norms[number], None, eps, row)
        for d in range(x.shape[1]):
            x[m, d] += row[d]


@njit(**INNER)
def swiglu_rows(sums, stride, scale, channel_scale, rows, F, row, out):
    """SwiGLU of a product `[M, 2 F]`, and quantize it; replaces the scales of the rows."""
    for m in range(rows):
        a = scale[m]
        gates, ups = sums[m * stride : m * stride + F], sums[m * stride + F : m * stride + 2 * F]
        for f in range(F):
            gate = f32(gates[f]) * a * channel_scale[f]
            row[f] = gate / (exp(-gate) + ONE)
        for f in range(F):
            row[f] = row[f] * (f32(ups[f]) * a * channel_scale[F + f])
        scale[m] = quantize(row, F, out[m])


# Rows of a block whose sums, with those of all columns that lie side by side, fit the registers.
_ROWS_0, _ROWS_1, _ROWS_2, _ROWS_3 = (6, 4, 2, 1) if REGISTERS == 32 else (3, 2, 1, 1)
_dot_0, _dot_1, _dot_2, _dot_3 = (
    make_dot(rows, LAYOUT.columns // WIDTH, False) for rows in (_ROWS_0, _ROWS_1, _ROWS_2, _ROWS_3)
)
_COLUMNS, _TOGETHER, _WIDENED, _ = LAYOUT


@njit(inline="always", **INNER)
def widen_rows(x, rows, steps, pairs):
    """Return address and stride of byte rows `x [M, 4 steps]`, or of their 16-bit integers where instructions need pairs."""
    if not _WIDENED:
        return i64(x.ctypes.data), i64(x.strides[0])
    for m in range(rows):
        for c in range(4 * steps):
            pairs[m, c] = np.int16(x[m, c])
    return i64(pairs.ctypes.data), i64(pairs.strides[0])


@njit(inline="always", **INNER)
def multiply_columns(first, last, N, rows, address, row_stride, matrix, start, steps, sums):
    """Columns from `first` to `last`, multiples of 64, of a product; see `vargen.kernels.int8.sharing.product`."""
    out_stride, count, stride = 4 * N, steps * (4 // _TOGETHER), _COLUMNS * _TOGETHER
    for n in range(first, last, _COLUMNS):
        panel, initial, column = matrix + n * steps * 4, start + 4 * n, sums + 4 * n
        m = 0
        while m < rows:
            row, out, left = address + m * row_stride, column + m * out_stride, rows - m
            if left >= _ROWS_0:
                _dot_0(row, row_stride, panel, stride, count, initial, out, out_stride)
                m += _ROWS_0
            elif left >= _ROWS_1:
                _dot_1(row, row_stride, panel, stride, count, initial, out, out_stride)
                m += _ROWS_1
            elif left >= _ROWS_2:
                _dot_2(row, row_stride, panel, stride, count, initial, out, out_stride)
                m += _ROWS_2
            else:
                _dot_3(row, row_stride, panel, stride, count, initial, out, out_stride)
                m += _ROWS_3
