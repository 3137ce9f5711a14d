"""Vector instructions for CPU passes, as functions that Numba compiles: exact dot products of 8-bit and 16-bit integers.

They use AVX-512 VNNI, whose instructions multiply four pairs of 8-bit, or two pairs of 16-bit, integers in each of 16 lanes and
add the products to 32-bit sums. Numba needs no compiler on the user's machine. `vargen.kernels.int8.cpu`
decides whether it is used.

Addresses and strides are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

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


def _byte_dot(rows: int) -> Callable[..., None]:
    """Rows of unsigned bytes, 64 columns of signed bytes."""
    return make_dot(rows, 4, "llvm.x86.avx512.vpdpbusd.512", _BYTES)


def _pair_dot(rows: int, vectors: int) -> Callable[..., None]:
    """Rows and columns of 16-bit integers."""
    return make_dot(rows, vectors, "llvm.x86.avx512.vpdpwssd.512", _PAIRS)


byte_dot_1, byte_dot_2, byte_dot_4, byte_dot_6 = (_byte_dot(rows) for rows in (1, 2, 4, 6))
pair_dot_1x1, pair_dot_1x2, pair_dot_1x4 = (_pair_dot(1, vectors) for vectors in (1, 2, 4))
pair_dot_4x1, pair_dot_4x2, pair_dot_4x4 = (_pair_dot(4, vectors) for vectors in (1, 2, 4))


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
