"""Shapes of the networks that the kernels serve, and the bytes that their operations move at least.

Shape suffixes: R rows, T tokens of the pass, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Layers, query heads, key heads and head width of a network."""

    layers: int
    heads: int
    key_heads: int
    width: int


MODELS: dict[str, Shape] = {
    "emoji": Shape(10, 7, 7, 32),
    "LlamaGen-B": Shape(12, 12, 12, 64),
    "LlamaGen-XL": Shape(36, 20, 20, 64),
    "LlamaGen-3B": Shape(24, 32, 32, 100),
    "7B": Shape(32, 32, 32, 128),
    "grouped": Shape(24, 32, 8, 128),
}
VOCABULARIES = (4096, 8192, 16384)


def attention_bytes(shape: Shape, R: int, T: int, slots: int, size: int) -> int:
    """Of one layer: keys and values once, queries and output, in numbers of `size` bytes, and the words of a tree."""
    queries = 2 * R * T * shape.heads * shape.width * size
    return 2 * R * shape.key_heads * slots * shape.width * size + queries + 8 * T * -(-T // 64)


def attention_flops(shape: Shape, R: int, T: int, slots: int) -> int:
    """Of one layer's two products."""
    return 4 * R * T * shape.heads * slots * shape.width


def sampler_bytes(rows: int, V: int, size: int) -> int:
    """Logits of `size` bytes read, probabilities of 4 written."""
    return rows * V * (size + 4)


def commit_bytes(shape: Shape, R: int, path: int, size: int) -> int:
    """Keys and values of all layers read and written, but for the root, which lies in place."""
    return shape.layers * R * shape.key_heads * (path - 1) * shape.width * size * 4
