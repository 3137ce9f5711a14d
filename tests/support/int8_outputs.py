"""What compiled passes and steps compute for tiny random networks, without torch, so that any CPU can run it.

`python int8_outputs.py FILE` writes it to an .npz file, with the name of the instruction set.

Shape suffixes: as in `vargen.kernels.int8.passes`.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from vargen.kernels.int8.format import Matrix, Slots, allocate_slots, join_layers, make_buffers, pack_matrix
from vargen.kernels.int8.instructions import instruction_set
from vargen.kernels.int8.load import load_modules

L, B, D, V = 2, 2, 60, 100
TOKENS = 16
FUNCTIONS = ("run_token_pass", "move_slots", "run_scale_pass")


class Random:
    """Numbers that are the same on each machine: no function of a library rounds them."""

    def __init__(self, seed: int):
        self.generator = np.random.default_rng(seed)

    def floats(self, *shape: int) -> np.ndarray:
        """float32 from -1 to 1."""
        return self.generator.random(shape, np.float32) * np.float32(2) - np.float32(1)

    def integers(self, limit: int, *shape: int) -> np.ndarray:
        return self.generator.integers(-limit, limit + 1, shape)

    def matrix(self, N: int, C: int) -> Matrix:
        scale = (self.floats(N) + np.float32(2)) / np.float32(128 * C**0.5)
        return pack_matrix(self.integers(127, N, C).astype(np.int8), scale)

    def slots(self, rows: int, heads: int, head_dim: int, prefix: int, slots: int) -> Slots:
        """A cache with something in all slots; the last number of the prefix is hidden from every second row."""
        made = allocate_slots(L, rows, heads, head_dim, prefix=prefix, slots=slots, most=slots)
        for pairs, limit in zip((made.k, made.v), made.limits, strict=True):
            low, high = self.integers(limit, 2, *pairs.shape)
            pairs[...] = (high << 16) | (low & 0xFFFF)
        for scale in (made.k_scale, made.v_scale):
            scale[...] = (self.floats(*scale.shape) + np.float32(2)) * np.float32(2**-12)
        made.bias[...] = self.floats(*made.bias.shape)
        made.bias[::2, -1] = -np.inf
        return made


def run_tokens(passes: Any, steps: Any) -> dict[str, np.ndarray]:
    """Decode a few tokens of two images by chains, and a tree, under guidance; all that passes and steps write."""
    random, R, H, G, F, P, T = Random(0), 2 * B, 6, 3, 70, 3, 5
    K = D // H
    matrices = [[random.matrix(*shape) for shape in (((H + 2 * G) * K, D), (D, D), (2 * F, D), (D, F))] for _ in range(L)]
    weights = passes.TokenWeights(
        sizes=np.array([H, F]),
        layers=join_layers(matrices),
        norms=random.floats(2 * L + 1, D),
        output=random.matrix(V, D),
        embedding=random.floats(V, D),
        rotary=random.floats(TOKENS, K // 2, 2),
        eps=1e-5,
    )
    slots = random.slots(R, G, K, P, P + TOKENS + T)
    buffers = make_buffers(weights.layers, weights.output, slots, (R, T), H, D, F)
    tokens, length = random.generator.integers(0, V, (B, TOKENS + T)), np.array([1, 6])
    known, seeds = random.generator.integers(0, V, (B, TOKENS + T)), np.array([3, 2**62])
    sampling = np.array([1, 1.5], np.float32), np.array([V, 20]), np.array([0.9, 1.0])
    scratch = np.zeros((3, V + 32), np.float32), np.zeros(V + 32, np.int32)
    chain, tree = np.zeros((R, 0, 0), np.bool_), np.tile(np.tril(np.ones((T, T), np.bool_)), (R, 1, 1))
    tree[:, 2:, 1] = False  # the second token is a sibling of the third
    found = {}
    for number, ancestors in enumerate((chain, chain, tree)):
        drafted, valid = np.zeros((B, T - 1), np.int64), np.zeros((B, T - 1), np.bool_)
        fed, position = np.zeros((2, B, T), np.int64)
        sampled, committed = np.zeros((B, T), np.int64), np.zeros(B, np.int64)
        count, following = np.zeros((2, B), np.int64)
        steps.draft_window(known, length + 2, length[:, None].copy(), seeds, np.array([number]), 5, TOKENS, V, drafted, valid)
        steps.feed_tokens(tokens, length, drafted, fed, position)
        cells = np.tile(position, (2, 1)) if len(ancestors[0]) else np.zeros((0, 0), np.int64)
        states, features = np.zeros((2, R, T, D), np.float32)
        logits, guidance = np.zeros((B, T, V), np.float32), random.floats(B, T) + np.float32(2)
        slots.length[...] = np.tile(length - 1, 2)
        passes.run_token_pass(weights, slots, buffers, fed, cells, ancestors, guidance, states, features, logits)
        steps.sample_rows(logits, *sampling, 1, seeds, position, *scratch, drafted, sampled, count, following)
        path = np.array([[0, 2, 4], [0, 1, 2]])
        count = np.minimum(count + number, 3)  # other than what is accepted, so that slots move
        steps.commit_tokens(fed, path, count, following, length, TOKENS, tokens, committed)
        passes.move_slots(slots, np.tile(path, (2, 1)), np.tile(count, 2), TOKENS)
        length += committed
        written = {"drafted": drafted, "valid": valid, "fed": fed, "position": position, "sampled": sampled, "count": count}
        written |= {"following": following, "states": states, "features": features, "logits": logits, "tokens": tokens}
        found |= {f"{name}{number}": each.copy() for name, each in (written | slots._asdict()).items() if name != "limits"}
    return found


def run_scales(passes: Any, R: int, unit: bool) -> dict[str, np.ndarray]:
    """Three scales, the first one after a caption, under guidance if R is even; `unit`: queries and keys are normalized."""
    random, H, F, P = Random(R), 3, 150, 5
    matrices = [[random.matrix(*shape) for shape in ((3 * D, D), (D, D), (F, D), (D, F))] for _ in range(L)]
    layers = join_layers(matrices)
    weights = passes.ScaleWeights(
        sizes=np.array([F, int(unit)]),
        layers=layers,
        bias=random.floats(*layers.scale.shape),
        sharpness=random.floats(L, H) + np.float32(2),
        output=random.matrix(V, D),
        output_bias=random.floats(-(-V // 64) * 64),
    )
    slots = random.slots(R, H, D // H, P, P + 14)
    buffers = make_buffers(layers, weights.output, slots, (R, 9), H, D, F)
    modulation, last = random.floats(L, 6, R, D), random.floats(2, R, D)
    found, place = {}, 0
    for number, (fed, own) in enumerate(((P, 1), (0, 4), (0, 9))):
        T = fed + own
        states, features = random.floats(R, T, D), np.zeros((R, own, D), np.float32)
        logits, guidance = np.zeros((R if R % 2 else R // 2, own, V), np.float32), random.floats(0 if R % 2 else own)
        reach = np.full((R, T), T)
        reach[:, :fed] = fed
        reach[::2, fed - 1 : fed] = 0  # padding of a caption sees nothing
        passes.run_scale_pass(weights, slots, buffers, states, modulation, last, reach, place, guidance, features, logits)
        place += T
        written = {"states": states, "features": features, "logits": logits, **slots._asdict()}
        found |= {f"{name}{number} of {R}": each.copy() for name, each in written.items() if name != "limits"}
    return found


if __name__ == "__main__":
    passes, steps = load_modules(FUNCTIONS, None)
    outputs = run_tokens(passes, steps) | run_scales(passes, 4, True) | run_scales(passes, 3, False)
    np.savez(sys.argv[1], set=np.array(instruction_set()), **outputs)
