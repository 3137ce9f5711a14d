"""Compile CPU code: `python -m vargen.kernels.cpu_build NAME FOLDER STAMP` writes it to the folder, then an empty file.

It does not import torch, which would take a quarter of its time. Each loader calls each function of a module on a tiny network,
which compiles it, or loads its code.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import ModuleType

import numpy as np


def load_token_pass() -> ModuleType:
    from vargen.kernels import cpu_pass as passes

    layers, rows, heads, head_dim, hidden, vocab, tokens = 1, 2, 1, 4, 4, 4, 2
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
    fed = np.zeros((rows, tokens), np.int64)
    buffers = passes.make_buffers(weights, slots, tokens)
    passes.run_layers(weights, slots, buffers, fed, fed[:0, :0].copy(), np.zeros((rows, 0, 0), np.bool_))
    states, logits = np.zeros((2, rows, tokens, width), np.float32), np.zeros((1, tokens, vocab), np.float32)
    passes.run_output(weights, buffers, np.ones((1, tokens), np.float32), states[0], states[1], logits)
    passes.move_slots(slots, fed, np.ones(rows, np.int64), 4)
    return passes


def load_token_steps() -> ModuleType:
    from vargen.kernels import cpu_sample as steps

    rows, vocab, tokens = 1, 4, 2
    fed, one, held = np.zeros((rows, tokens), np.int64), np.ones(rows, np.int64), np.zeros((rows, 6), np.int64)
    options = np.ones(rows, np.float32), np.full(rows, vocab), np.ones(rows)
    scratch, kept = np.zeros((3, vocab + 32), np.float32), np.zeros(vocab + 32, np.int32)
    steps.sample_rows(np.zeros((rows, tokens, vocab), np.float32), *options, fed, scratch, kept, fed.copy())
    steps.commit_tokens(fed, fed, one, one, one, 4, held, held[0].copy(), one.copy(), one.copy())
    steps.verify_chain(fed, fed, one.copy(), one.copy())
    steps.draft_window(fed, one, held, one, vocab, held.copy())
    return steps


def load_scale_pass() -> ModuleType:
    from vargen.kernels import cpu_scale_pass as passes

    layers, rows, heads, width, hidden, vocab, tokens = 1, 2, 1, 4, 4, 4, 2
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
    features, logits = np.zeros((rows, tokens, width), np.float32), np.zeros((1, tokens, vocab), np.float32)
    passes.run_head(
        x.reshape(rows, tokens, width), modulation[0, :2].copy(), packed[1], weights.start[0, :columns].copy(), floats[0],
        floats[0], np.ones(tokens, np.float32), buffers.row, buffers.scale, buffers.wide, buffers.sums, buffers.ticks,
        features, logits,
    )  # fmt: skip
    return passes


LOADERS = {"int8 passes": load_token_pass, "sampling steps": load_token_steps, "next-scale int8 passes": load_scale_pass}

if __name__ == "__main__":
    from vargen.kernels.cpu_code import load_code

    gc.disable()  # the compiler makes millions of objects, of which few can be freed
    load_code(sys.argv[1], Path(sys.argv[2]))
    Path(sys.argv[3]).touch()
