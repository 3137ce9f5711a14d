"""Where the time of a pass goes on a CPU: products of weights, attention, other steps; and what a step costs beside its pass.

Compiled int8 passes read the processor's clock between their parts. For others, torch's profiler attributes each operator to a
part; the profiler slows operators down, so only its shares are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vargen.decoding import Progress
from vargen.evaluation.networks import BenchmarkModel

PARTS = ("products", "attention", "other steps")
_PRODUCTS = frozenset("aten::mm aten::addmm aten::_int_mm aten::linear aten::matmul aten::mv aten::addmv".split())
_ATTENTION = frozenset(
    "aten::bmm aten::baddbmm aten::_softmax aten::scaled_dot_product_attention "
    "aten::_scaled_dot_product_flash_attention_for_cpu aten::_scaled_dot_product_attention_math".split()
)
_OTHER_PARTS = ("prefill", "target")  # of a run: not beside the pass
_PROFILED_PASSES = 3
_COUNTED_PASSES = 24  # of a run that measures the time beside passes


def measure_parts(run: Callable[[], Any], buffers: Any = None) -> dict[str, float]:
    """Return the share of each of `PARTS` in a pass.

    Args:
        run: runs the pass.
        buffers: `vargen.kernels.cpu_pass.Buffers` of a compiled pass.
    """
    if buffers is not None:
        before = buffers.ticks.copy()
        for _ in range(_PROFILED_PASSES):
            run()
        spent = dict(zip(PARTS, (buffers.ticks - before).tolist(), strict=True))
    else:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(_PROFILED_PASSES):
                run()
        spent = dict.fromkeys(PARTS, 0.0)
        for event in profile.key_averages():
            part = "products" if event.key in _PRODUCTS else "attention" if event.key in _ATTENTION else "other steps"
            spent[part] += event.self_cpu_time_total
    whole = sum(spent.values()) or 1.0
    return {part: value / whole for part, value in spent.items()}


def measure_time_beside(network: BenchmarkModel, batches: Sequence[int]) -> Mapping[int, float]:
    """Return, by batch size, the milliseconds that a step of the baseline takes beside its pass: sampling, acceptance, Python.

    The model's default guidance and sampling apply.
    """
    found = {}
    for batch in dict.fromkeys(batches):
        decoder, condition = network.decoder(), network.condition(batch)

        def few_passes(progress: Progress) -> bool:
            return progress.step < _COUNTED_PASSES

        spent = []
        for _ in range(3):
            stats = decoder.decode(condition, torch.arange(batch), network.pipe.baseline, callback=few_passes).stats
            passes = sum(stats.seconds_by_part.get(part, 0.0) for part in _OTHER_PARTS)
            spent.append((stats.seconds - passes) / stats.passes)
        found[batch] = 1e3 * min(spent)
    return found
