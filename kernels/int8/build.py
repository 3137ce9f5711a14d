"""Compile CPU code: `python -m vargen.kernels.int8.build PART FOLDER STAMP` writes it to the folder, then an empty file.

It does not import torch, which would take a quarter of its time. Each loader calls functions of a module on a tiny network,
which compiles them, or loads their code.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np


def load_token_layers() -> ModuleType:
    from vargen.kernels.int8 import token_pass as passes

    weights, slots, tokens = _make_token_pass()
    buffers = passes.make_buffers(weights, slots, tokens.shape[1])
    passes.run_layers(weights, slots, buffers, tokens, tokens[:0, :0].copy(), np.zeros((len(tokens), 0, 0), np.bool_))
    return passes


def load_token_output() -> ModuleType:
    from vargen.kernels.int8 import token_pass as passes

    weights, slots, tokens = _make_token_pass()
    (R, T), (V, D) = tokens.shape, weights.embedding.shape
    states, logits = np.zeros((2, R, T, D), np.float32), np.zeros((1, T, V), np.float32)
    buffers = passes.make_buffers(weights, slots, T)
    passes.run_output(weights, buffers, np.ones((1, T), np.float32), states[0], states[1], logits)
    passes.advance(slots.length, np.ones(1, np.int64))
    passes.move_slots(slots, tokens, np.ones(R, np.int64), 4)
    return passes


def _make_token_pass() -> tuple[Any, Any, np.ndarray]:
    """Weights, slots and tokens of a pass."""
    from vargen.kernels.int8 import token_pass as passes

    layers, rows, heads, head_dim, hidden, vocab = 1, 2, 1, 4, 4, 4
    width, columns = heads * head_dim, passes.PANEL
    matrices = [passes.pack_matrix(np.zeros(shape, np.int8))[0] for shape in ((12, 4), (4, 4), (8, 4), (4, 4))]
    weights = passes.Weights(
        sizes=np.array([heads, heads, head_dim, hidden]),
        packed=np.array([[matrix.ctypes.data for matrix in matrices]]),
        start=np.zeros((layers, 4 * columns), np.int32),
        scale=np.ones((layers, 4 * columns), np.float32),
        norms=np.ones((2 * layers + 1, width), np.float32),
        output=matrices[0],
        output_start=np.zeros(columns, np.int32),
        output_scale=np.ones(columns, np.float32),
        embedding=np.ones((vocab, width), np.float32),
        rotary=np.ones((4, head_dim // 2, 2), np.float32),
        eps=1e-5,
    )
    slots = passes.Slots(
        k=np.zeros((layers, rows, heads, head_dim // 2, 16), np.int32),
        v=np.zeros((layers, rows, heads, 8, 16), np.int32),
        k_scale=np.ones((layers, rows, heads, 16), np.float32),
        v_scale=np.ones((layers, rows, heads, 16), np.float32),
        length=np.zeros(rows, np.int64),
        bias=np.zeros((rows, 1), np.float32),
        limits=(100, 100),
    )
    return weights, slots, np.zeros((rows, 2), np.int64)


def load_token_steps() -> ModuleType:
    from vargen.kernels.int8 import sample as steps

    rows, vocab, tokens = 1, 4, 2
    fed, one, held = np.zeros((rows, tokens), np.int64), np.ones(rows, np.int64), np.zeros((rows, 6), np.int64)
    options = np.ones(rows, np.float32), np.full(rows, vocab), np.ones(rows)
    scratch, kept = np.zeros((3, vocab + 32), np.float32), np.zeros(vocab + 32, np.int32)
    valid = np.zeros((rows, 1), np.bool_)
    steps.sample_rows(
        np.zeros((rows, tokens, vocab), np.float32), *options, 0, one, fed, scratch, kept, fed[:, :1].copy(), fed.copy(),
        one.copy(), one.copy(),
    )  # fmt: skip
    steps.feed_tokens(held, one, fed[:, :1].copy(), fed.copy(), fed.copy())
    steps.commit_tokens(fed, fed, one, one, one, 4, held, one.copy())
    steps.draft_window(held, one, fed, one, one, 3, vocab, vocab, fed[:, :1].copy(), valid)
    return steps


def load_scale_layers() -> ModuleType:
    from vargen.kernels.int8 import scale_pass as passes

    layers, rows, heads, width, hidden, tokens = 1, 2, 1, 4, 4, 2
    packed = [passes.pack_matrix(np.zeros(shape, np.int8))[0] for shape in ((12, 4), (4, 4), (4, 4), (4, 4))]
    columns = len(packed[0]) // width
    floats = np.ones((layers, 4 * columns), np.float32)
    weights = passes.Weights(
        sizes=np.array([width, hidden, 1]),
        packed=np.array([[matrix.ctypes.data for matrix in packed]]),
        start=np.zeros((layers, 4 * columns), np.int32),
        scale=floats,
        bias=floats,
        sharpness=np.ones((layers, heads), np.float32),
    )
    slots = passes.Slots(
        k=np.zeros((rows, layers, heads, width // 2, 16), np.int32),
        v=np.zeros((rows, layers, heads, 8, 16), np.int32),
        k_scale=np.ones((rows, layers, heads, 16), np.float32),
        v_scale=np.ones((rows, layers, heads, 16), np.float32),
        bias=np.zeros((rows, 1), np.float32),
        limits=(100, 100),
    )
    buffers = passes.make_buffers(weights, slots, rows, tokens, columns)
    x, modulation = np.ones((rows * tokens, width), np.float32), np.ones((layers, 6, rows, width), np.float32)
    passes.run_layers(weights, slots, buffers, x, modulation, np.ones((rows, tokens), np.int64), 0)
    return passes


def load_scale_output() -> ModuleType:
    from vargen.kernels.int8 import scale_pass as passes

    R, T, D, V = 2, 2, 4, 4
    matrix, columns = passes.pack_matrix(np.zeros((V, D), np.int8))[0], passes.PANEL
    x, modulation, floats = np.ones((R, T, D), np.float32), np.ones((2, R, D), np.float32), np.ones(columns, np.float32)
    passes.run_head(
        x, modulation, matrix, np.zeros(columns, np.int32), floats, floats, np.ones(T, np.float32), np.zeros(D, np.float32),
        np.zeros(R * T, np.float32), np.zeros((R * T, D), np.uint8), np.zeros(R * T * columns, np.int32),
        x.copy(), np.zeros((1, T, V), np.float32),
    )  # fmt: skip
    return passes


LOADERS = {
    "token layers": load_token_layers,
    "token output": load_token_output,
    "token steps": load_token_steps,
    "scale layers": load_scale_layers,
    "scale output": load_scale_output,
}

if __name__ == "__main__":
    from vargen.kernels.int8.load import load_parts

    if hasattr(os, "nice") and not sys.argv[1].endswith("layers"):
        os.nice(5)  # the layers take longest
    gc.disable()  # the compiler makes millions of objects, of which few can be freed
    load_parts(sys.argv[1:2], Path(sys.argv[2]))
    Path(sys.argv[3]).touch()
