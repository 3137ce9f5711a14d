"""Compile the CPU passes: `python -m vargen.kernels.cpu_build FOLDER STAMP` writes the code to the folder, then an empty file.

It does not import torch, which would take a quarter of its time.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np


def call_once(passes: Any) -> None:
    """Call each function of `vargen.kernels.cpu_pass` on a tiny network, which compiles it, or loads its code."""
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
    options = np.ones(1, np.float32), np.full(1, vocab), np.ones(1)
    scratch, kept = np.zeros((3, vocab + 32), np.float32), np.zeros(vocab + 32, np.int32)
    passes.sample_rows(logits, *options, fed[:1], scratch, kept, fed[1:].copy())
    one, held = np.ones(1, np.int64), np.zeros((1, 6), np.int64)
    passes.commit_tokens(fed[:1], fed[:1], one, one, one, 4, held, held[0].copy(), one.copy(), one.copy())
    passes.verify_chain(fed[:1], fed[:1], one.copy(), one.copy())
    passes.draft_window(fed[:1], one, held, one, vocab, held.copy())


if __name__ == "__main__":
    from vargen.kernels.cpu import load_code

    gc.disable()  # the compiler makes millions of objects, of which few can be freed
    load_code(Path(sys.argv[1]))
    Path(sys.argv[2]).touch()
