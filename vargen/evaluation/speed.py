"""Time of a pass, by tokens fed and relative to reading the weights once; and speed of sequential decoding.

A pass that feeds few tokens is bound by reading the weights, so more tokens cost little: speculative decoding relies on this.
Cases are measured in rotation over several rounds, so that a gradual change in the machine's speed affects all of them
equally. Each visit of a case begins with an untimed pass, since in a decoding loop the processor's caches hold what the
previous pass left there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import DecodeStats, Method, Progress
from vargen.device import validate_compile
from vargen.evaluation.networks import BenchmarkModel

_VISIT_SECONDS, _VISIT_PASSES = 0.05, 5  # timed passes of one visit: until either is reached
_LONG_PASS = 0.1  # seconds; a pass this long evicts what another case left in the caches, so needs no untimed one


@dataclass(frozen=True)
class StepResult:
    """Result of one case. `milliseconds` is the median of the timed passes, `quartiles` the first and the third.

    `over_one` is the cost relative to the one-token pass at the same batch size (None if that was not measured), `over_read`
    relative to reading the weights once.
    """

    batch: int
    tokens: int
    milliseconds: float
    quartiles: tuple[float, float]
    passes: int
    over_one: float | None
    over_read: float


@dataclass(frozen=True)
class StepReport:
    """All cases of a model. `read_milliseconds` is the fastest read of `weight_bytes` bytes with the same number of threads."""

    model: str
    dtype: str
    device: str
    guidance: bool
    cached_tokens: int
    parameters: int
    weight_bytes: int
    read_milliseconds: float
    results: list[StepResult]

    @property
    def gigabytes_per_second(self) -> float:
        return self.weight_bytes / self.read_milliseconds / 1e6

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gigabytes_per_second": self.gigabytes_per_second}


@dataclass(frozen=True)
class BaselineReport:
    """Sequential decoding of one batch, over whole images. Rates are medians over the runs."""

    model: str
    dtype: str
    device: str
    batch: int
    guidance_scale: float
    runs: int
    tokens_per_second: float
    tokens_per_second_per_image: float
    milliseconds_per_pass: float
    share_by_part: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe_dtype(transformer: Any) -> str:
    """Name of the format that a transformer computes in, such as `"float32"` or `"int8"`."""
    quantization = transformer.config.get("quantization") or transformer.gpu_quantization
    return quantization or str(transformer.dtype).removeprefix("torch.")


def weight_readers(nbytes: int, device: torch.device) -> list[Callable[[], Tensor]]:
    """Return functions that read `nbytes` bytes once; which one is fastest depends on the machine.

    They read the same buffer repeatedly, as decoding does with the weights, so what fits into a cache stays there.
    """
    columns = 1024
    # float32 with arbitrary content except subnormal numbers, which are slow to add
    buffer = torch.randn(max(nbytes // 4 // columns, 1), columns, device=device)
    flat, vector = buffer.flatten(), torch.randn(columns, device=device)
    return [flat.sum, lambda: torch.dot(flat, flat), lambda: torch.mv(buffer, vector)]


class _Case:
    """A function to time, and its times in seconds."""

    def __init__(self, run: Callable[[], Any], device: torch.device):
        self.run, self.device = run, device
        self.seconds: list[float] = []

    def visit(self) -> None:
        if not self.seconds or self.seconds[-1] < _LONG_PASS:
            self._time()
        spent, passes = 0.0, 0
        while passes < _VISIT_PASSES and spent < _VISIT_SECONDS:
            self.seconds.append(self._time())
            spent, passes = spent + self.seconds[-1], passes + 1

    def _time(self) -> float:
        self._wait()
        start = time.perf_counter()
        self.run()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@torch.no_grad()
def measure_steps(
    network: BenchmarkModel,
    tokens: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    batches: Sequence[int] = (1, 8),
    *,
    guidance: bool = False,
    rounds: int = 7,
    progress: Callable[[int, int], None] | None = None,
) -> StepReport:
    """Time a pass of the transformer for every batch size (images) and number of fed tokens, and a read of its weights.

    Args:
        guidance: feed two rows per image, as classifier-free guidance does.
        rounds: number of visits of each case.
        progress: called with the numbers of finished rounds and of all rounds.
    """
    transformer, device = network.transformer, network.transformer.device
    if not tokens or not batches or min(*tokens, *batches, rounds) < 1 or max(tokens) > network.pipe.num_tokens:
        raise ValueError(
            f"tokens must be from 1 to the {network.pipe.num_tokens} of the grid, batch and rounds at least 1; "
            f"got tokens {list(tokens)}, batch {list(batches)}, rounds {rounds}"
        )
    weight_bytes = network.weight_bytes
    readers = [_Case(read, device) for read in weight_readers(weight_bytes, device)]
    cases: dict[tuple[int, int], _Case] = {}
    rows_per_image = 2 if guidance else 1
    for batch in dict.fromkeys(batches):
        rows = batch * rows_per_image
        for width, run in network.passes(rows, tokens).items():
            cases[batch, width] = _Case(run, device)
    for done in range(rounds):
        for case in [*readers, *cases.values()]:
            case.visit()
        if progress:
            progress(done + 1, rounds)
    read = min(min(case.seconds) for case in readers)
    medians = {key: statistics.median(case.seconds) for key, case in cases.items()}
    return StepReport(
        model=network.name,
        dtype=describe_dtype(transformer),
        device=str(device),
        guidance=guidance,
        cached_tokens=network.pipe.num_tokens // 2,
        parameters=sum(p.numel() for p in transformer.parameters()),
        weight_bytes=weight_bytes,
        read_milliseconds=1e3 * read,
        results=[
            _summarize_case(batch, width, case.seconds, medians.get((batch, 1)), read) for (batch, width), case in cases.items()
        ],
    )


def _summarize_case(batch: int, width: int, seconds: list[float], one: float | None, read: float) -> StepResult:
    """Return the result of a case.

    Args:
        seconds, one, read: seconds of its passes, of a pass of one token, and of a read of the weights.
    """
    median = statistics.median(seconds)
    low, _, high = [median] * 3 if len(seconds) < 2 else statistics.quantiles(seconds, n=4, method="inclusive")
    return StepResult(
        batch=batch,
        tokens=width,
        milliseconds=1e3 * median,
        quartiles=(1e3 * low, 1e3 * high),
        passes=len(seconds),
        over_one=median / one if one else None,
        over_read=median / read,
    )


@torch.no_grad()
def measure_baseline(
    network: BenchmarkModel,
    batch: int,
    *,
    seconds: float = 10.0,
    compile: bool = False,
    accelerator: str | Method | None = None,
) -> BaselineReport:
    """Decode whole images, after a short warm-up, for at least `seconds`.

    Args:
        compile: run the passes through `torch.compile`, on a GPU; compilation is part of the warm-up.
        accelerator: another method than the network's baseline.
    """
    validate_compile(compile, network.transformer.device)
    transformer, decoder = network.transformer, network.decoder(compile)
    condition, seeds = network.condition(batch), torch.arange(batch)

    def run(**options: Any) -> DecodeStats:
        return decoder.decode(condition, seeds, accelerator or network.pipe.baseline, **options).stats

    def few_passes(progress: Progress) -> bool:
        return progress.step < 8

    run(callback=few_passes)
    runs: list[DecodeStats] = []
    while not runs or sum(stats.seconds for stats in runs) < seconds:
        runs.append(run())
    # On a GPU, times of parts need a synchronization after each, which slows the loop: measured in a separate run.
    parts = (run(profile=True) if transformer.device.type == "cuda" else runs[-1]).seconds_by_part
    rate = statistics.median(stats.tokens_per_second for stats in runs)
    whole = sum(parts.values())
    return BaselineReport(
        model=network.name,
        dtype=describe_dtype(transformer),
        device=str(transformer.device),
        batch=batch,
        guidance_scale=network.guidance_scale,
        runs=len(runs),
        tokens_per_second=rate,
        tokens_per_second_per_image=rate / batch,
        milliseconds_per_pass=1e3 * statistics.median(stats.seconds / stats.passes for stats in runs),
        share_by_part={part: spent / whole for part, spent in parts.items()},
    )
