"""Vector instructions of CPUs, as Numba intrinsics: exact dot products of 8-bit and 16-bit integers, and compression.

Each instruction set computes the same sums: products of integers are exact. Sets differ in how a matrix is packed, so that an
instruction reads consecutive bytes (`Layout`); what is stored in files does not depend on them. Numba needs no compiler on the
user's machine. Addresses and strides are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from vargen.kernels.int8.instructions import LAYOUTS, instruction_set

SET = instruction_set()
LAYOUT = LAYOUTS[SET]
LANES = 16  # of what callers count as a vector: two of instructions that have eight
WIDTH = {"avx512-vnni": 16, "neon-dotprod": 4}.get(SET, 8)  # 32-bit sums of an instruction
REGISTERS = 32 if SET in ("avx512-vnni", "neon-dotprod") else 16
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_SUMS = ir.VectorType(_I32, WIDTH)
_BYTES, _PAIRS = ir.VectorType(_I8, LAYOUT.together * WIDTH), ir.VectorType(_I16, 2 * WIDTH)
_DOTS = {  # products of bytes, and of pairs
    "avx512-vnni": ("llvm.x86.avx512.vpdpbusd.512", "llvm.x86.avx512.vpdpwssd.512"),
    "avx-vnni": ("llvm.x86.avx512.vpdpbusd.256", "llvm.x86.avx512.vpdpwssd.256"),
    "neon-dotprod": ("llvm.aarch64.neon.sdot.v4i32.v16i8", None),
}


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _at(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, _I64(offset))


def _fill(builder: Any, value: Any, kind: Any) -> Any:
    """A vector with this value in all lanes."""
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
    mask = ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(single, ir.Constant(kind, ir.Undefined), mask)


def _add_pairs(builder: Any, sums: Any, factors: Any, values: Any) -> Any:
    """Add products of pairs of 16-bit integers `[2 WIDTH]` to 32-bit sums."""
    if SET == "avx2":
        kind = ir.FunctionType(_SUMS, (_PAIRS, _PAIRS))
        instruction = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pmadd.wd")
        return builder.add(sums, builder.call(instruction, [factors, values]))
    for first in (0, 1):  # which LLVM turns into the instructions that a CPU has
        mask = ir.Constant(_SUMS, list(range(first, 2 * WIDTH, 2)))
        a, b = (builder.sext(builder.shuffle_vector(each, each, mask), _SUMS) for each in (factors, values))
        sums = builder.add(sums, builder.mul(a, b))
    return sums


def make_dot(rows: int, vectors: int, pairs: bool) -> Callable[..., None]:
    """Make a function that adds dot products of `rows` rows with WIDTH x `vectors` columns to 32-bit sums, kept in registers.

    Its arguments are integers: address and stride of the rows; address of the columns, of which the integers of a step of each
    column lie side by side, and stride to the next step; number of steps; address of the initial sums, one per column, or 0;
    address and stride of the sums to write. A step is 32 bits of a row.

    Args:
        pairs: rows and columns of 16-bit integers, two of each a step; otherwise columns are signed bytes, and rows bytes,
            unsigned if they have an offset, or, where an instruction has pairs only, 16-bit integers.
    """
    name = _DOTS.get(SET, (None, None))[pairs]
    kind = _PAIRS if pairs else _BYTES
    size = 4 * WIDTH if pairs else LAYOUT.together * WIDTH  # bytes of a vector of columns

    @intrinsic
    def dot(context, row, row_stride, column, column_stride, steps, start, out, out_stride):
        def generate(context, builder, signature, arguments):
            if SET == "neon-dotprod" and not pairs:  # LLVM may not know that this CPU has it; llvmlite's `add` takes no pairs
                set.add(builder.function.attributes, '"target-features"="+dotprod"')
            row, row_stride, column, column_stride, steps, start, out, out_stride = arguments

            def add(sums: Any, word: Any, values: Any) -> Any:
                if not name:
                    return _add_pairs(builder, sums, builder.bitcast(word, _PAIRS), values)
                function = ir.FunctionType(_SUMS, (_SUMS, kind, kind))
                instruction = cgutils.get_or_insert_function(builder.module, function, name)
                return builder.call(instruction, [sums, builder.bitcast(word, kind), values])

            sums = [[cgutils.alloca_once(builder, _SUMS) for _ in range(vectors)] for _ in range(rows)]
            for each in sums:
                for place in each:
                    builder.store(ir.Constant(_SUMS, [0] * WIDTH), place)
            with builder.if_then(builder.icmp_signed("!=", start, _I64(0))):
                for each in sums:
                    for index, place in enumerate(each):
                        builder.store(_load(builder, _at(builder, start, 4 * WIDTH * index), _SUMS), place)
            with cgutils.for_range(builder, steps) as loop:
                first = builder.add(column, builder.mul(loop.index, column_stride))
                columns = [_load(builder, _at(builder, first, size * index), kind) for index in range(vectors)]
                if not name and not pairs:
                    columns = [builder.sext(each, _PAIRS) for each in columns]
                factor = builder.add(row, builder.mul(loop.index, _I64(4)))
                for number, each in enumerate(sums):
                    word = _load(builder, builder.add(factor, builder.mul(row_stride, _I64(number))), _I32)
                    word = _fill(builder, word, _SUMS)
                    for place, values in zip(each, columns, strict=True):
                        builder.store(add(builder.load(place), word, values), place)
            for number, each in enumerate(sums):
                line = builder.add(out, builder.mul(out_stride, _I64(number)))
                for index, place in enumerate(each):
                    _store(builder, builder.load(place), _at(builder, line, 4 * WIDTH * index))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), generate

    return dot


@intrinsic
def keep_vector(context, values, index, bound, kept_values, kept_index):
    """Write those of 16 float32 numbers that are at least `bound`, side by side, and their index int32; returns their number.

    Writes up to 16 numbers, of which those after the kept ones are undefined.

    Args:
        values, kept_values, kept_index: addresses.
        index: of the first number.
    """

    def compress(builder, values, index, bound, kept_values, kept_index):
        floats, places = ir.VectorType(_FLOAT, LANES), ir.VectorType(_I32, LANES)
        given = _load(builder, values, floats)
        kept = builder.fcmp_ordered(">=", given, _fill(builder, bound, floats))
        numbers = builder.add(_fill(builder, index, places), ir.Constant(places, list(range(LANES))))
        for name, each, address in (("f32", given, kept_values), ("i32", numbers, kept_index)):
            function = ir.FunctionType(each.type, (each.type, each.type, kept.type))
            instruction = cgutils.get_or_insert_function(builder.module, function, f"llvm.x86.avx512.mask.compress.v16{name}")
            _store(builder, builder.call(instruction, [each, ir.Constant(each.type, None), kept]), address)
        return builder.zext(builder.ctpop(builder.bitcast(kept, _I16)), _I64)

    def select(builder, values, index, bound, kept_values, kept_index):
        count = _I64(0)
        for lane in range(LANES):
            value, offset = _load(builder, _at(builder, values, 4 * lane), _FLOAT), builder.mul(count, _I64(4))
            _store(builder, value, builder.add(kept_values, offset))
            _store(builder, builder.add(index, _I32(lane)), builder.add(kept_index, offset))
            count = builder.add(count, builder.zext(builder.fcmp_ordered(">=", value, bound), _I64))
        return count

    def generate(context, builder, signature, arguments):
        values, index, bound, kept_values, kept_index = arguments
        form = compress if SET == "avx512-vnni" else select
        return form(builder, values, builder.trunc(index, _I32), bound, kept_values, kept_index)

    return types.int64(types.intp, types.intp, types.float32, types.intp, types.intp), generate


@intrinsic
def float_of_bits(context, bits):
    """The float32 with these bits (int32)."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def bits_of_float(context, number):
    """The bits (int32) of a float32. Those of nonnegative numbers have the order of the numbers."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], _I32)

    return types.int32(types.float32), generate
