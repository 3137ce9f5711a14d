"""The launches that the library's models make, recorded without a GPU: what is compiled ahead of time, tested and listed.

Each case has the bytes that its launches move at least, counted from shapes (the docstrings of the kernels have the formulas),
and the floating-point operations of its matrix products.

Shape suffixes: B images, R rows (two for each image, guidance's), T tokens of the pass, L tokens held, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vargen.evaluation.kernel_speed import (
    NETWORK_SHAPES,
    VOCABULARIES,
    attention_bytes,
    attention_flops,
    commit_bytes,
    sampler_bytes,
)
from vargen.kernels.kv_compaction import compact_kv
from vargen.kernels.launch import Launch, record_launches
from vargen.kernels.relaxed_probs import grouped_accept_prob, neighborhood_accept_prob
from vargen.kernels.sampler import NoiseStream, sample_from_logits, sample_gumbel_max
from vargen.kernels.tree_attention import tree_attention
from vargen.kernels.verify_chain import verify_chain
from vargen.kernels.verify_traversal import verify_traversal
from vargen.kernels.verify_tree import verify_recursive_rejection, verify_shared_noise


class KernelCase(NamedTuple):
    """`launches` of an operation at a `shape`, and what they move and multiply at least."""

    operation: str
    shape: str
    launches: list[Launch]
    bytes: int
    flops: int = 0


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _meta_int(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int64)


def _record(run: Callable[[], Any]) -> list[Launch]:
    with record_launches() as launches:
        run()
    return launches


def attention(
    model: str, T: int, held: int, dtype: torch.dtype = torch.bfloat16, R: int = 2, chain: bool = False
) -> KernelCase:
    """One layer's attention of T tokens over `held` tokens, in a cache made for that many."""
    shape = NETWORK_SHAPES[model]
    room = -(-shape.width // 16) * 16
    slots = 1 + held + T
    k, v = (_meta(R, shape.key_heads, slots, room, dtype=dtype)[..., : shape.width] for _ in range(2))
    q = _meta(R, T, shape.heads, shape.width, dtype=dtype)
    words = None if chain else _meta_int(T, -(-T // 64))
    launches = _record(lambda: tree_attention(q, k, v, _meta_int(R), _meta(R, 1), words))
    splits = launches[0].grid[2]
    moved = attention_bytes(shape, R, T, slots, dtype.itemsize)
    moved += 0 if splits == 1 else 8 * splits * R * T * shape.heads * (shape.width + 1)
    kind = "chain" if chain else "tree"
    name = f"{model}, {kind} of {T}, {held} held, {str(dtype).removeprefix('torch.')}"
    return KernelCase("attention, a layer", name, launches, moved, attention_flops(shape, R, T, slots))


def sampling(V: int, T: int, B: int = 1, filters: bool = True, token: bool = False) -> KernelCase:
    """Probabilities of T rows of guided logits, with or without filters and a sampled token."""
    logits = _meta(B, T, V, dtype=torch.bfloat16)
    noise = NoiseStream(_meta_int(B), _meta_int(B, T), 0) if token else None
    options: dict[str, Any] = {"top_k": 100, "top_p": 0.9} if filters else {}
    launches = _record(lambda: sample_from_logits(logits, noise=noise, **options))
    name = f"V {V}, {T} rows{', top-k and top-p' if filters else ''}{', a draw' if token else ''}"
    return KernelCase("sampler", name, launches, sampler_bytes(B * T, V, 2))


def sampling_from_probs(V: int, T: int, B: int = 1) -> KernelCase:
    """Gumbel-max sampling from T rows of probabilities."""
    return KernelCase(
        "race",
        f"V {V}, {T} rows",
        _record(lambda: sample_gumbel_max(_meta(B, T, V), NoiseStream(_meta_int(B), _meta_int(B, T), 0))),
        4 * B * T * V,
    )


def acceptance(V: int, T: int, B: int = 1, counted: bool = False, sampled: bool = True) -> Iterator[KernelCase]:
    """Every rule, at T fed tokens of each image; a tree's path is taken to be 5 slots long, with 2 siblings tried at each.

    Args:
        counted: whether the device counts the passes, as captured ones; only rules with uniforms differ.
        sampled: whether drafts were sampled, from probabilities q, and some may be invalid; otherwise they were looked up.
    """
    probs, q, tokens = _meta(B, T, V), _meta(B, T - 1, V), _meta_int(B, T - 1)
    valid = _meta(B, T - 1, dtype=torch.bool)
    shape = f"V {V}, {T} fed{', counted on the device' if counted else ''}{'' if sampled else ', not drawn'}"
    draft = probs, tokens, q if sampled else None, valid if sampled else None
    noise = _meta_int(B), _meta_int(B, T), torch.empty((), dtype=torch.int64, device="meta") if counted else 1
    rows = 8 if sampled else 4  # bytes of p and q, or of p
    relaxed: dict[str, Any] = {"accept_prob": _meta(B, T - 1), "relaxation": _meta(B)}
    yield KernelCase("accept, chain", shape, _record(lambda: verify_chain(*draft, *noise)), rows * B * V)
    yield KernelCase("accept, relaxed chain", shape, _record(lambda: verify_chain(*draft, *noise, **relaxed)), rows * B * V)
    children = _meta_int(T, 4)
    walked = _record(lambda: verify_recursive_rejection(*draft, children, 6, *noise))
    yield KernelCase("accept, tree", shape, walked, B * 4 * V * (6 + (6 if sampled else 0)))
    tables = (children, _meta_int(T), _meta_int(T), _meta_int(T))
    traversed = _record(lambda: verify_traversal(*draft, *tables, 6, *noise))
    yield KernelCase("accept, traversal", shape, traversed, B * 4 * V * (T // 3 + (T if sampled else 0)))
    if counted:
        return
    codes = _meta(8, V) if sampled else None
    groups = _record(lambda: grouped_accept_prob(probs[:, :-1], draft[2], tokens, 14, 0.15, 1.0 if sampled else None, codes))
    yield KernelCase("accept, groups", shape, groups, B * (T - 1) * rows * V + (4 * 8 * V if sampled else 0))


def small_cases(T: int, B: int = 1) -> Iterator[KernelCase]:
    """What needs no row of the vocabulary."""
    tokens, children = _meta_int(B, T - 1), _meta_int(T, 4)
    yield KernelCase(
        "accept, own noise", f"{T} fed", _record(lambda: verify_shared_noise(_meta_int(B, T), tokens, children, 6)), 32 * B * T
    )
    probs, nearest = _meta(B, T, 16384), _meta(16384, 1000, dtype=torch.int16)
    near = _record(lambda: neighborhood_accept_prob(probs[:, :-1], probs[:, 1:], tokens, nearest, 5.0, None))
    yield KernelCase("accept, neighbours", f"V 16384, {T} fed, 1000 near", near, B * (T - 1) * 6 * 1000)


def commit(model: str, path: int, R: int = 2) -> KernelCase:
    """Moving a path of so many slots, of which only the root lies in place."""
    shape = NETWORK_SHAPES[model]
    room = -(-shape.width // 16) * 16
    k = _meta(shape.layers, R, shape.key_heads, 1100, room, dtype=torch.bfloat16)[..., : shape.width]
    done = _meta(R, dtype=torch.int32)
    launches = _record(
        lambda: compact_kv(k, k, _meta_int(R), _meta_int(R, path), _meta_int(R), done, image_start=1, grid_tokens=1024)
    )
    return KernelCase("commit", f"{model}, path of {path}", launches, commit_bytes(shape, R, path, 2))


def list_cases() -> list[KernelCase]:
    """All: every tile of attention by head width, every vocabulary, every rule."""
    low, high = torch.bfloat16, torch.float32
    found = [attention("emoji", 16, 256, high), attention("emoji", 16, 256, low)]
    for T in (1, 16, 32, 64, 128):
        found += [attention("LlamaGen-B", T, 1024), attention("LlamaGen-3B", T, 1024)]
    found += [attention("LlamaGen-XL", 32, 1024), attention("LlamaGen-B", 16, 4096), attention("LlamaGen-3B", 16, 4096)]
    found += [attention("LlamaGen-B", 64, 1024, high), attention("7B", 16, 1024, high)]
    found += [attention("LlamaGen-B", 32, 1024, torch.float16), attention("7B", 16, 1024, chain=True)]
    found += [attention("grouped", 16, 1024), *(attention("7B", T, 1024) for T in (16, 32, 64))]
    for V in VOCABULARIES:
        found += [
            sampling(V, 32),
            sampling(V, 32, filters=False),
            sampling(V, 1, token=True),
            sampling_from_probs(V, 32),
            *acceptance(V, 32),
        ]
    found += [*acceptance(VOCABULARIES[0], 32, counted=True), *acceptance(VOCABULARIES[0], 32, sampled=False)]
    return [*found, *small_cases(32), commit("LlamaGen-B", 6), commit("LlamaGen-3B", 6), commit("LlamaGen-3B", 32)]
