"""Kernel benchmarks against the alternatives: torch's attention with a mask, FlexAttention, and the library's plain torch code.

What a machine cannot run is listed with the reason. Network shapes and lower bounds on the bytes that each operation moves
are defined here as well; `benchmarks/kernels_static` uses them without a GPU.

NetworkShape suffixes: R rows, T tokens of the pass, H query heads, G key heads, S slots, K head width, V vocabulary.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.kernels.attention import KernelMask, attend, fold_bias, pack_bits
from vargen.kernels.dispatch import explain_kernels, force_reference

Run = Callable[[], Any]


class NetworkShape(NamedTuple):
    """Layers, query heads, key heads and head width of a network."""

    layers: int
    heads: int
    key_heads: int
    width: int


NETWORK_SHAPES: dict[str, NetworkShape] = {
    "emoji": NetworkShape(10, 7, 7, 32),
    "LlamaGen-B": NetworkShape(12, 12, 12, 64),
    "LlamaGen-XL": NetworkShape(36, 20, 20, 64),
    "LlamaGen-3B": NetworkShape(24, 32, 32, 100),
    "7B": NetworkShape(32, 32, 32, 128),
    "grouped": NetworkShape(24, 32, 8, 128),
}
VOCABULARIES = (4096, 8192, 16384)


def attention_bytes(shape: NetworkShape, R: int, T: int, slots: int, size: int) -> int:
    """Bytes moved by one layer: keys and values once, queries and output, in elements of `size` bytes, and tree masks."""
    queries = 2 * R * T * shape.heads * shape.width * size
    return 2 * R * shape.key_heads * slots * shape.width * size + queries + 8 * T * -(-T // 64)


def attention_flops(shape: NetworkShape, R: int, T: int, slots: int) -> int:
    """Floating-point operations of one layer's two matrix products."""
    return 4 * R * T * shape.heads * slots * shape.width


def sampler_bytes(rows: int, V: int, size: int) -> int:
    """Bytes moved by the sampler: logits of `size` bytes read, probabilities of 4 bytes written."""
    return rows * V * (size + 4)


def commit_bytes(shape: NetworkShape, R: int, path: int, size: int) -> int:
    """Bytes moved by a commit: keys and values of all layers, read and written, except for the root, which stays in place."""
    return shape.layers * R * shape.key_heads * (path - 1) * shape.width * size * 4


@dataclass(frozen=True)
class Timing:
    """Time of an implementation in `microseconds`, or the `reason` why there is none.

    `bytes` is the fewest that the operation moves, `share` the fraction of the time that this takes at the rate of a copy.
    """

    operation: str
    shape: str
    implementation: str
    bytes: int
    microseconds: float | None = None
    share: float | None = None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Operation:
    """An operation and its `implementations` by name: the function to run, or the reason why it cannot run here."""

    name: str
    shape: str
    bytes: int
    implementations: dict[str, Run | str]


def measure_seconds(run: Run, device: torch.device, rounds: int) -> float:
    """Return the median seconds of one call; on a GPU the caches are flushed before each call."""
    run()
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(run, warmup=10, rep=20 * rounds, return_mode="median") / 1e3
    once = max(_time_once(run), 1e-7)
    repeats = max(1, min(200, int(0.005 / once)))
    return statistics.median(_time_once(lambda: [run() for _ in range(repeats)]) / repeats for _ in range(rounds))


def _time_once(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure_copy_rate(device: torch.device) -> float:
    """Return the bytes per second of a large copy, counting reads and writes."""
    count = 2**28 if device.type == "cuda" else 2**25
    source = torch.ones(count // 4, device=device)
    target = torch.empty_like(source)
    return 2 * count / measure_seconds(lambda: target.copy_(source), device, 3)


def measure_operations(operations: list[Operation], device: torch.device, rounds: int, rate: float) -> list[Timing]:
    """Measure every implementation of every operation."""
    found = []
    for each in operations:
        for name, run in each.implementations.items():
            if isinstance(run, str):
                found.append(Timing(each.name, each.shape, name, each.bytes, reason=run))
                continue
            seconds = measure_seconds(run, device, rounds)
            found.append(Timing(each.name, each.shape, name, each.bytes, 1e6 * seconds, each.bytes / rate / seconds))
    return found


def attention_operation(model: str, T: int, held: int, dtype: torch.dtype, device: torch.device, images: int = 1) -> Operation:
    """Attention of one layer over a tree of T tokens, two rows per image, in every implementation."""
    shape: NetworkShape = NETWORK_SHAPES[model]
    R, S = 2 * images, 1 + held + T
    room = -(-shape.width // 16) * 16
    k, v = (torch.randn(R, shape.key_heads, S, room, device=device).to(dtype)[..., : shape.width] for _ in range(2))
    q = torch.randn(R, T, shape.heads, shape.width, device=device).to(dtype)
    ancestors = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    ancestors[T // 2 :, 1 : T // 2] = False  # two branches
    length, prefix = torch.full((R,), held, device=device), torch.zeros(R, 1, device=device)
    mask = torch.cat([torch.ones(T, 1 + held, dtype=torch.bool, device=device), ancestors], 1)
    bias = torch.zeros(R, 1, T, S, device=device, dtype=dtype).masked_fill_(~mask, -torch.inf)
    with torch.no_grad():
        ready = fold_bias(bias, shape.heads, shape.key_heads)
    implementations: dict[str, Run | str] = {
        "kernel": kernel_or_skip_reason(lambda: attend(q, k, v, KernelMask(length, prefix, pack_bits(ancestors), 0)), device),
        "torch, our path": lambda: attend(q, k, v, ready),
        "SDPA with a mask": lambda: F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=shape.heads != shape.key_heads
        ),
        "FlexAttention": _make_flex_attention(q, k, v, mask) if device.type == "cuda" else "measured on a GPU only",
    }
    name = f"{model}, T {T}, {held} held, {str(dtype).removeprefix('torch.')}"
    return Operation("attention, a layer", name, attention_bytes(shape, R, T, S, dtype.itemsize), implementations)


def kernel_or_skip_reason(run: Run, device: torch.device) -> Run | str:
    """Return the call that runs the kernel, or the reason why it cannot run on this machine."""
    name, reason = explain_kernels(device)
    if name == "triton" and device.type != "cuda":
        return "interpreted kernels are for tests: their time says nothing"
    return run if name == "triton" else reason


def run_in_torch(run: Run) -> Run:
    """Return the call with kernels disabled."""

    def without() -> Any:
        with force_reference():
            return run()

    return without


def _make_flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask[query, key]

    T, S = mask.shape
    blocks = create_block_mask(visible, None, None, T, S, device=q.device)
    compiled = torch.compile(flex_attention)
    grouped = q.shape[2] != k.shape[1]
    return lambda: compiled(q.transpose(1, 2), k, v, block_mask=blocks, enable_gqa=grouped)


def sampler_operation(V: int, T: int, device: torch.device, reference: Callable[[Tensor], Tensor]) -> Operation:
    """Probabilities of T rows of logits with top-k 100 and top-p 0.9. `reference` is the library's plain torch code."""
    logits = torch.randn(1, T, V, device=device)

    def kernel() -> Any:
        from vargen.kernels.sampler import sample_from_logits

        return sample_from_logits(logits, top_k=100, top_p=0.9).probs

    implementations: dict[str, Run | str] = {
        "kernel": kernel_or_skip_reason(kernel, device),
        "torch, our path": run_in_torch(lambda: reference(logits)),
    }
    return Operation("sampler", f"V {V}, T {T}, top-k and top-p", sampler_bytes(T, V, 4), implementations)


def acceptance_operation(kind: str, V: int, T: int, device: torch.device, verify: Run) -> Operation:
    """Verification of a draft of T - 1 tokens of one image by the library's rule for a `kind` of topology.

    The rule dispatches to the kernel itself. The bytes are those for a rejected first draft: a row of p and one of q.
    """
    implementations: dict[str, Run | str] = {
        "kernel": kernel_or_skip_reason(verify, device),
        "torch, our path": run_in_torch(verify),
    }
    return Operation(f"accept, {kind}", f"V {V}, T {T}", 8 * V, implementations)


def commit_operation(
    model: str, path: int, dtype: torch.dtype, device: torch.device, caches: Callable[[NetworkShape], Any]
) -> Operation:
    """Commit of a path to the cache. `caches` creates the library's cache of such a network, for two rows and `dtype`."""
    shape = NETWORK_SHAPES[model]
    slots = torch.arange(path, device=device)[None].expand(2, -1)
    paths = torch.where(slots > 0, slots + 1, 0)
    count = torch.full((2,), path, device=device)

    def keeping(cache: Any) -> Run:
        start = torch.zeros_like(cache.length)

        def keep() -> None:
            cache.rollback(start)
            cache.commit_path(paths, count)

        return keep

    with force_reference():
        plain = caches(shape)
    implementations: dict[str, Run | str] = {
        "kernel": kernel_or_skip_reason(keeping(caches(shape)), device),
        "torch, our path": run_in_torch(keeping(plain)),
    }
    return Operation("commit", f"{model}, path of {path}", commit_bytes(shape, 2, path, dtype.itemsize), implementations)


def standard_operations(
    names: Sequence[str], widths: Sequence[int], lengths: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[Operation]:
    """Return the operations of `vargen bench kernels`: attention, sampling, acceptance and commit, each at several sizes.

    Args:
        names: of `NETWORK_SHAPES`. widths: tokens per pass. lengths: cached tokens.
    """
    from vargen.decoding.sampling import Sampling, to_probs
    from vargen.models.kv_cache import KVCache

    def make_cache(shape: NetworkShape) -> KVCache:
        size = {"prefix": 1, "tokens": 256, "scratch": 64}
        return KVCache(shape.layers, 2, shape.key_heads, shape.width, **size, dtype=dtype, device=device)

    filter_logits = partial(to_probs, sampling=Sampling(top_k=100, top_p=0.9))
    vocabularies = VOCABULARIES[::2]
    operations = [
        attention_operation(name, T, count, dtype=dtype, device=device) for name in names for count in lengths for T in widths
    ]
    operations += [sampler_operation(V, T, device, filter_logits) for V in vocabularies for T in widths]
    operations += [each for V in vocabularies for T in widths if T > 1 for each in _exact_rules(V, T, device)]
    return operations + [commit_operation(name, 6, dtype, device, make_cache) for name in names]


def _exact_rules(V: int, T: int, device: torch.device) -> list[Operation]:
    """Return the exact rules on a chain, and on a tree with two children per node."""
    from vargen.decoding import Draft, Tree
    from vargen.decoding.next_token.acceptance import recursive_rejection, speculative_sampling
    from vargen.decoding.noise import Noise

    probs, q = (torch.randn(1, rows, V, device=device).softmax(-1) for rows in (T, T - 1))
    tokens = q.argmax(-1)
    seeds, excess = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, device=device)
    chain, tree = Tree.make_chain(T - 1, device), Tree.from_parents((-1, *((slot - 1) // 2 for slot in range(1, T))), device)
    cases: list[tuple[str, Tree, Callable[..., Any]]] = [
        ("chain", chain, speculative_sampling),
        ("tree", tree, recursive_rejection),
    ]
    return [
        acceptance_operation(
            kind, V, T, device, partial(rule, probs, Draft(tokens, shape, q), Noise(seeds, shape.depth[None], 1), excess)
        )
        for kind, shape, rule in cases
    ]
