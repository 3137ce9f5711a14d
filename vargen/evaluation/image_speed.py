"""Time per image, compared with the machine's limits and with the published sampling loop, in one run.

The limit is the roofline: a pass takes at least as long as reading its weights once, and as long as its floating-point
operations at the rate of a large matrix product. Both rates are measured here. Our loop and the published one alternate.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from vargen.decoding.pass_costs import time_call
from vargen.device import validate_compile
from vargen.evaluation.networks import BenchmarkModel
from vargen.evaluation.speed import weight_readers
from vargen.models.quantization import quantization_of

_MATMUL_SIZE = 1536  # rows and columns of the matrices that measure the rate


@dataclass(frozen=True)
class ImageSpeedReport:
    """Milliseconds per image, medians over the rounds.

    Attributes:
        token_milliseconds, pixel_milliseconds: sampling the tokens with the baseline, and decoding their pixels.
        reference_token_milliseconds, reference_pixel_milliseconds: the same by the published loop, in float32.
        speedup, speedup_with_pixels: speedup over the published loop, without and with decoding of pixels.
        roofline, roofline_with_pixels: lower bound by the weights read and the floating-point operations.
        roofline_fraction, roofline_fraction_with_pixels: the roofline as a fraction of our time.
        gigabytes_per_second, gigaflops: measured rates of reading and of a matrix product, in the transformer's dtype.
    """

    model: str
    dtype: str
    device: str
    batch: int
    threads: int
    rounds: int
    parameters: int
    token_milliseconds: float
    pixel_milliseconds: float
    reference_token_milliseconds: float
    reference_pixel_milliseconds: float
    speedup: float
    speedup_with_pixels: float
    roofline: float
    roofline_with_pixels: float
    roofline_fraction: float
    roofline_fraction_with_pixels: float
    gigabytes_per_second: float
    gigaflops: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_image_speed(
    network: BenchmarkModel,
    batch: int = 1,
    *,
    rounds: int = 5,
    compile: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ImageSpeedReport:
    """Generate whole batches with the baseline and with the published loop, alternating, after one untimed round.

    Args:
        compile: run the baseline's passes through `torch.compile`, on a GPU; compilation is part of the untimed round.
        progress: called with the numbers of finished rounds and of all rounds.

    Raises:
        ValueError: `batch` or `rounds` is below 1, or compiled passes are requested on a CPU.
    """
    if batch < 1 or rounds < 1:
        raise ValueError(f"batch and rounds must be at least 1, got {batch} and {rounds}")
    transformer, device = network.transformer, network.transformer.device
    validate_compile(compile, device)
    decoder = network.decoder(compile)
    condition, seeds = network.condition(batch), torch.arange(batch)
    published_tokens, published_pixels = network.published_sampler(batch)
    stages: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "": (lambda: decoder.decode(condition, seeds, network.pipe.baseline), network.pixels),
        "reference_": (published_tokens, published_pixels),
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    for done in range(rounds + 1):
        for name, (generate, decode) in stages.items():
            spent, tokens = time_call(generate, device)
            seconds[f"{name}token_milliseconds"].append(spent)
            seconds[f"{name}pixel_milliseconds"].append(time_call(partial(decode, tokens), device)[0])
        if progress:
            progress(done, rounds)
    each = {name: 1e3 * statistics.median(times[1:]) / batch for name, times in seconds.items()}
    quantization = quantization_of(transformer)
    product = torch.int8 if quantization == "int8" else transformer.dtype
    bandwidth, rate = _bandwidth(network.weight_bytes, device), _matmul_rate(product, device)
    lower_bound = sum(max(nbytes / bandwidth, operations / rate) for nbytes, operations in network.pass_work(batch))
    pixels = network.decoder_flops(batch) / _matmul_rate(torch.float32, device)
    roofline, roofline_with = 1e3 * lower_bound / batch, 1e3 * (lower_bound + pixels) / batch
    ours, with_pixels = each["token_milliseconds"], each["token_milliseconds"] + each["pixel_milliseconds"]
    return ImageSpeedReport(
        model=network.name,
        dtype=quantization or str(transformer.dtype).removeprefix("torch."),
        device=str(device),
        batch=batch,
        threads=torch.get_num_threads(),
        rounds=rounds,
        parameters=sum(p.numel() for p in transformer.parameters()),
        speedup=each["reference_token_milliseconds"] / ours,
        speedup_with_pixels=(each["reference_token_milliseconds"] + each["reference_pixel_milliseconds"]) / with_pixels,
        roofline=roofline,
        roofline_with_pixels=roofline_with,
        roofline_fraction=roofline / ours,
        roofline_fraction_with_pixels=roofline_with / with_pixels,
        gigabytes_per_second=bandwidth / 1e9,
        gigaflops=rate / 1e9,
        **each,
    )


def _bandwidth(nbytes: int, device: torch.device) -> float:
    """Return the read bandwidth in bytes per second, by the fastest of several ways to read."""
    return nbytes / min(_fastest_run(read, device) for read in weight_readers(nbytes, device))


def _matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the operations per second of a product of large matrices."""
    left, right = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device=device).to(dtype) for _ in range(2))
    multiply = torch._int_mm if dtype == torch.int8 else torch.matmul
    return 2 * _MATMUL_SIZE**3 / _fastest_run(lambda: multiply(left, right), device)


def _fastest_run(run: Callable[[], Any], device: torch.device, times: int = 5) -> float:
    """Return the seconds of the fastest of several runs."""
    return min([time_call(run, device)[0] for _ in range(times + 1)][1:])
