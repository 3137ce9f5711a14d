"""Time per image, compared with the machine's limits and with the published sampling loop, in one run.

The limit is the roofline: a pass takes at least as long as reading its weights once, and as long as its floating-point
operations at the rate of a large matrix product. Both rates are measured here. Our loop and the published one alternate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from vargen.decoding.pass_costs import timed
from vargen.device import check_compile
from vargen.evaluation.networks import BenchmarkModel
from vargen.evaluation.speed import weight_readers

_PRODUCT = 1536  # rows and columns of the matrices that measure the rate


@dataclass(frozen=True)
class PictureReport:
    """Milliseconds per image, medians over the rounds.

    Attributes:
        drawing, decoding: sampling the tokens with the baseline, and decoding their pixels.
        published_drawing, published_decoding: the same by the published loop, in float32.
        ratio, ratio_with_pixels: speedup over the published loop, without and with pixel decoding.
        roofline, roofline_with_pixels: lower bound by the weights read and the floating-point operations.
        share, share_with_pixels: the roofline as a fraction of our time.
        gigabytes_per_second, gigaflops: measured rates of reading and of a matrix product, in the transformer's dtype.
    """

    model: str
    dtype: str
    device: str
    batch: int
    threads: int
    rounds: int
    parameters: int
    drawing: float
    decoding: float
    published_drawing: float
    published_decoding: float
    ratio: float
    ratio_with_pixels: float
    roofline: float
    roofline_with_pixels: float
    share: float
    share_with_pixels: float
    gigabytes_per_second: float
    gigaflops: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_pictures(
    network: BenchmarkModel,
    batch: int = 1,
    *,
    rounds: int = 5,
    compile: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PictureReport:
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
    check_compile(compile, device)
    decoder = network.decoder(compile)
    condition, seeds = network.condition(batch), torch.arange(batch)
    published_draw, published_pixels = network.published_sampler(batch)
    seconds: dict[str, list[float]] = {}

    def part(name: str, run: Callable[[], Any]) -> Any:
        spent, result = timed(run, device)
        seconds.setdefault(name, []).append(spent)
        return result

    for done in range(rounds + 1):
        drawn = part("drawing", lambda: decoder.decode(condition, seeds, network.pipe.baseline))
        part("decoding", partial(network.pixels, drawn))
        canvas = part("published_drawing", published_draw)
        part("published_decoding", partial(published_pixels, canvas))
        if progress:
            progress(done, rounds)
    each = {name: 1e3 * statistics.median(times[1:]) / batch for name, times in seconds.items()}
    bandwidth, rate = _bandwidth(network.weight_bytes, device), _product_rate(transformer.dtype, device)
    least = sum(max(nbytes / bandwidth, operations / rate) for nbytes, operations in network.pass_work(batch))
    pixels = network.decoder_flops(batch) / _product_rate(torch.float32, device)
    roofline, roofline_with = 1e3 * least / batch, 1e3 * (least + pixels) / batch
    ours, with_pixels = each["drawing"], each["drawing"] + each["decoding"]
    return PictureReport(
        model=network.name,
        dtype=str(transformer.dtype).removeprefix("torch."),
        device=str(device),
        batch=batch,
        threads=torch.get_num_threads(),
        rounds=rounds,
        parameters=sum(p.numel() for p in transformer.parameters()),
        ratio=each["published_drawing"] / ours,
        ratio_with_pixels=(each["published_drawing"] + each["published_decoding"]) / with_pixels,
        roofline=roofline,
        roofline_with_pixels=roofline_with,
        share=roofline / ours,
        share_with_pixels=roofline_with / with_pixels,
        gigabytes_per_second=bandwidth / 1e9,
        gigaflops=rate / 1e9,
        **each,
    )


def _bandwidth(nbytes: int, device: torch.device) -> float:
    """Return the read bandwidth in bytes per second, by the fastest of several ways to read."""
    return nbytes / min(_least(read, device) for read in weight_readers(nbytes, device))


def _product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the floating-point operations per second of a product of large matrices."""
    left, right = (torch.randn(_PRODUCT, _PRODUCT, device=device).to(dtype) for _ in range(2))
    return 2 * _PRODUCT**3 / _least(lambda: left @ right, device)


def _least(run: Callable[[], Any], device: torch.device, times: int = 5) -> float:
    """Return the seconds of the fastest of several runs."""
    return min([timed(run, device)[0] for _ in range(times + 1)][1:])
