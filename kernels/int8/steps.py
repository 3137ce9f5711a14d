"""The steps between the products of a CPU pass, for Numba: bit for bit the operations of `vargen.kernels.int8.arithmetic`.

No fused multiply-adds and no other order of float operations: none of LLVM's fast-math flags that would allow them is set. Sums
and maxima are of integers, which LLVM vectorizes.

Exact dot products of 8-bit and 16-bit integers use AVX-512 VNNI, whose instructions multiply four pairs of 8-bit, or two pairs
of 16-bit, integers in each of 16 lanes and add the products to 32-bit sums. Numba needs no compiler on the user's machine.
Addresses and strides are in bytes.

Shape suffixes: M rows of a product, D width, F hidden width, N output channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import numpy as np
from llvmlite import ir
from numba import from_dtype, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from vargen.kernels.int8.format import EXP_RANGE, EXP_TERMS, INT8_MAX, LN_2, LOG2_E, NORM_MAX, PANEL, TINY

OPTIONS = {"fastmath": {"nnan", "nsz"}, "boundscheck": False, "error_model": "numpy", "nogil": True, "_nrt": False}
INNER = {**OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # functions that only compiled ones call

f32, i32, i64, f64 = np.float32, np.int32, np.int64, np.float64
ROUND = f32(1.5 * 2**23)  # adding and subtracting it rounds to the nearest integer, ties to even, for |x| < 2^22
ONE, ZERO, SMALLEST = f32(1), f32(0), f32(TINY)
_RANGE, _LOG2_E, _LN_2 = f32(EXP_RANGE), f32(LOG2_E), f32(LN_2)
_T0, _T1, _T2, _T3, _T4, _T5, _T6 = (f32(term) for term in EXP_TERMS)
_INT8, _INT8_UNIT = f32(INT8_MAX), f32(1 / INT8_MAX)
_NORM, _NORM_UNIT = f32(NORM_MAX), 1 / NORM_MAX


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


# -- vector instructions -----------------------------------------------------------------------------------------------------

LANES = 16  # 32-bit sums of a vector
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_SUMS = ir.VectorType(_I32, LANES)
_BYTES, _PAIRS = ir.VectorType(_I8, 4 * LANES), ir.VectorType(_I16, 2 * LANES)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _at(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, _I64(offset))


def _fill(builder: Any, value: Any, kind: Any) -> Any:
    """A vector with this value in all lanes."""
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(single, ir.Constant(kind, ir.Undefined), ir.Constant(_SUMS, [0] * LANES))


def make_dot(rows: int, vectors: int, name: str, kind: Any) -> Callable[..., None]:
    """Make a function that adds dot products of `rows` rows with 16 x `vectors` columns to 32-bit sums, kept in registers.

    Its arguments are integers: address and stride of the rows; address of the columns, of which 32 bits of each column lie side
    by side, and stride to the next 32 bits; number of such steps; address of the initial sums, one per column, or 0; address
    and stride of the sums to write.

    Args:
        name, kind: the instruction, and the type of its factors.
    """

    @intrinsic
    def dot(context, row, row_stride, column, column_stride, steps, start, out, out_stride):
        def generate(context, builder, signature, arguments):
            row, row_stride, column, column_stride, steps, start, out, out_stride = arguments
            instruction = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_SUMS, (_SUMS, kind, kind)), name)
            sums = [[cgutils.alloca_once(builder, _SUMS) for _ in range(vectors)] for _ in range(rows)]
            for each in sums:
                for place in each:
                    builder.store(ir.Constant(_SUMS, [0] * LANES), place)
            with builder.if_then(builder.icmp_signed("!=", start, _I64(0))):
                for each in sums:
                    for index, place in enumerate(each):
                        builder.store(_load(builder, _at(builder, start, 64 * index), _SUMS), place)
            with cgutils.for_range(builder, steps) as loop:
                first = builder.add(column, builder.mul(loop.index, column_stride))
                columns = [_load(builder, _at(builder, first, 64 * index), kind) for index in range(vectors)]
                factor = builder.add(row, builder.mul(loop.index, _I64(4)))
                for number, each in enumerate(sums):
                    word = _load(builder, builder.add(factor, builder.mul(row_stride, _I64(number))), _I32)
                    factors = builder.bitcast(_fill(builder, word, _SUMS), kind)
                    for place, values in zip(each, columns, strict=True):
                        builder.store(builder.call(instruction, [builder.load(place), factors, values]), place)
            for number, each in enumerate(sums):
                line = builder.add(out, builder.mul(out_stride, _I64(number)))
                for index, place in enumerate(each):
                    target = builder.inttoptr(_at(builder, line, 64 * index), _SUMS.as_pointer())
                    builder.store(builder.load(place), target, align=1)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), generate

    return dot


# Rows of unsigned bytes with columns of signed bytes; rows and columns of 16-bit integers.
BYTE_DOT = "llvm.x86.avx512.vpdpbusd.512", _BYTES
PAIR_DOT = "llvm.x86.avx512.vpdpwssd.512", _PAIRS
byte_dot_1, byte_dot_2, byte_dot_4, byte_dot_6 = (make_dot(rows, 4, *BYTE_DOT) for rows in (1, 2, 4, 6))


@intrinsic
def keep_vector(context, values, index, bound, kept_values, kept_index):
    """Write those of 16 float32 numbers that are at least `bound`, side by side, and their index int32; returns their number.

    Writes 16 numbers, of which those after the kept ones are undefined.

    Args:
        values, kept_values, kept_index: addresses.
        index: of the first number.
    """

    def generate(context, builder, signature, arguments):
        values, index, bound, kept_values, kept_index = arguments
        floats, mask = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(1), LANES)
        given = _load(builder, values, floats)
        kept = builder.fcmp_ordered(">=", given, _fill(builder, bound, floats))
        places = builder.add(_fill(builder, builder.trunc(index, _I32), _SUMS), ir.Constant(_SUMS, list(range(LANES))))
        for kind, name, numbers, address in ((floats, "f32", given, kept_values), (_SUMS, "i32", places, kept_index)):
            function = ir.FunctionType(kind, (kind, kind, mask))
            compress = cgutils.get_or_insert_function(builder.module, function, f"llvm.x86.avx512.mask.compress.v16{name}")
            side_by_side = builder.call(compress, [numbers, ir.Constant(kind, None), kept])
            builder.store(side_by_side, builder.inttoptr(address, kind.as_pointer()), align=1)
        return builder.zext(builder.ctpop(builder.bitcast(kept, _I16)), _I64)

    return types.int64(types.intp, types.intp, types.float32, types.intp, types.intp), generate


@intrinsic
def float_of_bits(context, bits):
    """The float32 with these bits (int32)."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def bits_of_float(context, number):
    """The bits (int32) of a float32. Those of nonnegative numbers have the order of the numbers."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _I32)

    return types.int32(types.float32), generate


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
def largest(row, first, count):
    """Largest absolute value of float32 `row[first : first + count]`, at least `TINY`."""
    top = bits_of_float(SMALLEST)
    for d in range(first, first + count):
        bits = bits_of_float(abs(row[d]))
        top = bits if bits > top else top
    return float_of_bits(top)


@njit(**INNER)
def quantize(row, count, out):
    """Quantize float32 `row[:count]` to bytes `out`, with 128 added; returns the scale."""
    top = largest(row, i64(0), count)
    factor = _INT8 / top
    for d in range(count):
        out[d] = np.uint8(i32((row[d] * factor + ROUND) - ROUND) + i32(128))
    return top * _INT8_UNIT


@njit(**INNER)
def norm(x, factor, shift, eps, out):
    """Norm of float32 `x [D]`, times `factor`, plus `shift`, to `out`; mean and variance are of 16-bit values.

    A layer norm; where `shift` is None, `exact_rms_norm`.
    """
    D = len(x)
    top = largest(x, i64(0), D)
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


@njit(**INNER)
def product(x, rows, matrix, start, steps, sums, N):
    """Products of byte rows `x [M, 4 steps]` with a packed matrix of N columns, a multiple of 64, to int32 `sums [M, N]`.

    Args:
        matrix: address of the bytes of `vargen.kernels.int8.format.pack_matrix`.
        start: int32 `[N]`, initial sums, which undo the 128 added to the bytes.
    """
    row_stride, address, out_stride = x.strides[0], x.ctypes.data, 4 * N
    for n in range(0, N, PANEL):
        panel = matrix + n * steps * 4
        first, column = start.ctypes.data + 4 * n, sums.ctypes.data + 4 * n
        m = 0
        while m < rows:
            row, out, left = address + m * row_stride, column + m * out_stride, rows - m
            if left >= 6:
                byte_dot_6(row, row_stride, panel, 4 * PANEL, steps, first, out, out_stride)
                m += 6
            elif left >= 4:
                byte_dot_4(row, row_stride, panel, 4 * PANEL, steps, first, out, out_stride)
                m += 4
            elif left >= 2:
                byte_dot_2(row, row_stride, panel, 4 * PANEL, steps, first, out, out_stride)
                m += 2
            else:
                byte_dot_1(row, row_stride, panel, 4 * PANEL, steps, first, out, out_stride)
                m += 1
