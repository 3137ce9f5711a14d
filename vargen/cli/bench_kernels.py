"""`vargen bench kernels`: the time of each kernel and of alternative implementations of the same operation."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from vargen.cli.bench import JSON, prepare, whole_numbers
from vargen.cli.console import table
from vargen.cli.options import Device, Dtype, check_range
from vargen.cli.outputs import Write, check_apart, json_writes, result_file, write_each
from vargen.values import short_repr


def kernels(
    shape: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Network whose shapes are taken.")] = None,
    tokens: Annotated[str, typer.Option(metavar="N,...", help="Tokens of a pass.")] = "1,16,64",
    held: Annotated[str, typer.Option(metavar="N,...", help="Tokens held.")] = "256,1024",
    dtype: Annotated[Dtype, typer.Option()] = Dtype.auto,
    device: Annotated[Device, typer.Option()] = Device.auto,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads. Default: torch's.")] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Visits of each case; more are steadier.")] = 5,
    as_json: Annotated[str | None, JSON] = None,
) -> None:
    """Measure tree attention, sampling, acceptance and commit in microseconds.

    Compares our kernel, our torch path, SDPA with a mask, and FlexAttention. Variants that cannot run on this machine are
    listed with the reason. The share is the time to move the same bytes at copy bandwidth, divided by the measured time.
    """
    widths, lengths = whole_numbers(tokens, "tokens", 256), whole_numbers(held, "held", 16384)
    check_range(rounds, "rounds", 1)
    json_file, names = result_file(as_json, ".json", "json"), shape or ["LlamaGen-B"]
    check_apart({"json": [json_file]}, {})

    from vargen.evaluation.kernel_speed import NETWORK_SHAPES

    for name in names:
        if name not in NETWORK_SHAPES:
            raise ValueError(f"shape must be one of {', '.join(NETWORK_SHAPES)}, got {short_repr(name)}")
    chosen, kind, machine = prepare(device, dtype, threads, [])

    import torch

    from vargen.decoding.sampling import Sampling, to_probs
    from vargen.evaluation import kernel_speed
    from vargen.evaluation.machine import machine_line
    from vargen.kernels.dispatch import explain
    from vargen.models.kv_cache import KVCache

    def cache_of(network: Any) -> KVCache:
        size = {"prefix": 1, "tokens": 256, "scratch": 64}
        return KVCache(network.layers, 2, network.key_heads, network.width, **size, dtype=kind, device=chosen)

    with torch.inference_mode():
        rate = kernel_speed.measure_copy_rate(chosen)
        attend = partial(kernel_speed.attention_operation, dtype=kind, device=chosen)
        operations = [attend(name, T, count) for name in names for count in lengths for T in widths]
        filter_logits = partial(to_probs, sampling=Sampling(top_k=100, top_p=0.9))
        operations += [kernel_speed.sampler_operation(V, T, chosen, filter_logits) for V in (4096, 16384) for T in widths]
        operations += [each for V in (4096, 16384) for T in widths if T > 1 for each in _acceptance(V, T, chosen)]
        operations += [kernel_speed.commit_operation(name, 6, kind, chosen, cache_of) for name in names]
        timings = kernel_speed.measure(operations, chosen, rounds, rate)
    backend, reason = explain(chosen)
    document = {
        "machine": machine, "gigabytes_per_second": rate / 1e9, "kernels": backend, "reason": reason,
        "timings": [each.to_dict() for each in timings],
    }  # fmt: skip
    head = f"{machine_line(machine, chosen, kind)}; {rate / 1e9:.1f} GB/s copied\nkernels: {backend} ({reason})"
    lines = f"{head}\n\n{_table(timings)}"
    writes: list[Write] = [] if as_json == "-" else [("table", lambda: print(lines, flush=True))]
    write_each([*writes, *json_writes(as_json, json_file, document)])


def _acceptance(V: int, T: int, device: Any) -> list[Any]:
    """Benchmark the exact rules on a chain, and on a tree with two children per node."""
    import torch

    from vargen.decoding import Draft, Tree
    from vargen.decoding.next_token.acceptance import recursive_rejection, speculative_sampling
    from vargen.decoding.noise import Noise
    from vargen.evaluation.kernel_speed import acceptance_operation

    probs, q = (torch.randn(1, rows, V, device=device).softmax(-1) for rows in (T, T - 1))
    tokens = q.argmax(-1)
    seeds, spent = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, device=device)
    trees = {
        "chain": Tree.make_chain(T - 1, device),
        "tree": Tree.from_parents((-1, *((slot - 1) // 2 for slot in range(1, T))), device),
    }
    rules = {"chain": speculative_sampling, "tree": recursive_rejection}
    return [
        acceptance_operation(
            kind, V, T, device, partial(rules[kind], probs, Draft(tokens, tree, q), Noise(seeds, tree.depth[None], 1), spent)
        )
        for kind, tree in trees.items()
    ]


def _table(timings: list[Any]) -> str:
    rows = []
    for each in timings:
        times = ["", "", each.reason]
        if each.microseconds is not None:
            times = [f"{each.microseconds:.1f}", f"{100 * each.share:.0f} %", ""]
        rows.append([each.operation, each.shape, each.implementation, f"{each.bytes / 1e3:.1f}", *times])
    return table(["operation", "shape", "way", "KB", "us", "of a copy", "not measured"], rows, "<<<>>><")
