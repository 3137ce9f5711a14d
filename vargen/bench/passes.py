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

from vargen.bench.compare import open_decoder
from vargen.decoding import DecodeStats, Method, ScaleModel
from vargen.models.guidance import Condition
from vargen.models.kv_cache import KVCache
from vargen.models.quantization import quantize_network, quantize_weights_on_gpu
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.families import ModelFamily
from vargen.pipelines.loading import list_families, open_pipeline, read_index
from vargen.pipelines.model_names import locate_folder

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


def describe_dtype(transformer: Any) -> str:
    """Name of the format that a transformer computes in, such as `"float32"` or `"int8"`."""
    return transformer.config.get("quantization") or str(transformer.dtype).removeprefix("torch.")


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
            f"tokens per pass must be from 1 to the {network.pipe.num_tokens} of the grid, batch and rounds at least 1; "
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
def decode_images(network: BenchmarkModel, batch: int, method: str | Method | None = None) -> DecodeStats:
    """Decode one batch of whole images after a warm-up of a few passes, and return its statistics.

    Args:
        method: default: the network's baseline.
    """
    decoder, method = open_decoder(network.pipe), method or network.pipe.baseline
    condition, seeds = network.condition(batch), torch.arange(batch)
    decoder.decode(condition, seeds, method, callback=lambda progress: progress.step < 8)
    return decoder.decode(condition, seeds, method).stats


# -- models to benchmark: of a folder, or of an official size with random weights ------------------------------------------


@dataclass(frozen=True)
class BenchmarkModel:
    """A pipeline without text encoder and drafters, whose passes are measured with the checkpoint's sampling settings.

    Attributes:
        name: as given to `open_benchmark_model`.
    """

    name: str
    pipe: VisualPipeline

    @property
    def transformer(self) -> Any:
        return self.pipe.transformer

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the parameters that every pass reads in full."""
        other = self.transformer.partly_read_parameters
        named = self.transformer.named_parameters()
        return sum(p.nbytes for name, p in named if not any(part in name for part in other))

    def passes(self, rows: int, widths: Sequence[int]) -> dict[int, Callable[[], Any]]:
        """By width, a repeatable function that runs one pass of `width` tokens in the middle of an image.

        Passes of next-token models have half of an image in the cache; those of next-scale models, all earlier scales.
        """
        transformer, widths = self.transformer, sorted(set(widths))
        if self.pipe.paradigm == "next-scale":
            model: Any = self.pipe.decoding_model(1.0)
            condition, shapes = self.condition(rows), {width: find_pass_scales(model.scale_tokens, width) for width in widths}
            return {width: scale_pass(model, condition, rows, *shape, 1.0) for width, shape in shapes.items()}
        caches = half_filled_caches(transformer, rows, widths)
        fed = {width: torch.randint(self.pipe.vocab_size, (rows, width), device=transformer.device) for width in widths}
        # The cache's length does not advance, so every call repeats the same pass.
        return {width: lambda width=width: transformer(fed[width], cache=caches[width]) for width in widths}  # type: ignore[misc]

    def condition(self, batch: int) -> Condition:
        """Return an arbitrary condition of the right shape; its content does not affect the time of a pass."""
        config, device = self.pipe.transformer.config, self.pipe.transformer.device
        if self.pipe.is_class_conditional:
            return Condition(class_labels=torch.arange(batch, device=device) % config.num_classes)
        mask = torch.zeros(batch, self.pipe.max_caption_tokens, dtype=torch.bool, device=device)
        mask[:, -8:] = True
        embeds = torch.randn(*mask.shape, config.caption_dim, dtype=torch.float32, device=device) * mask[..., None]
        return Condition(caption_embeds=embeds, caption_mask=mask)


def half_filled_caches(transformer: Any, rows: int, widths: Sequence[int]) -> dict[int, KVCache]:
    """By width, a cache for passes of `width` tokens, half full of random keys and values. The caches share memory."""
    caches = {width: transformer.new_cache(rows, scratch=width) for width in sorted(widths)}
    if transformer.config.get("quantization"):
        for cache in caches.values():
            cache.fill_randomly()
            cache.commit_chain(transformer.tokens // 2)
        return caches
    widest = caches[max(widths)]
    filled = widest.kv.normal_().flatten()
    for cache in caches.values():
        cache.kv = filled[: cache.kv.numel()].view_as(cache.kv)
        cache.commit_chain(transformer.tokens // 2)
    return caches


def official_sizes() -> dict[str, ModelFamily]:
    """Return the names of the official sizes, such as `"llamagen-b"`, with the family of each."""
    return {name: family for family in list_families().values() for name in family.official_sizes}


def validate_benchmark_model(name: str) -> ModelFamily:
    """Return the family of a model that `open_benchmark_model` can open; reads no weight."""
    sizes = official_sizes()
    family = sizes[name] if name in sizes else read_index(locate_folder(name, {}))[1]
    paradigm = family.pipeline.paradigm
    if paradigm not in ("next-token", "next-scale"):
        raise ValueError(f"model must be a next-token or a next-scale one, got {name!r}, a model of {family.name}")
    return family


def open_benchmark_model(
    name: str, dtype: torch.dtype, device: torch.device, quantization: str | None = None
) -> BenchmarkModel:
    """Load a packaged model, a folder or a Hub model, or create one of an official size with random weights.

    A quantized model is returned with its compiled passes, if it has any.
    """
    family, components = validate_benchmark_model(name), {}
    code = family.components["transformer"].network_class.compiled_code
    if quantization is not None and code is not None and device.type == "cpu":
        code.load(wait=True)
    if name not in family.official_sizes:
        unused = dict.fromkeys(part for part, component in family.components.items() if not component.required)
        return BenchmarkModel(name, open_pipeline(name, device=device, dtype=dtype, quantization=quantization, **unused))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for part, config in family.official_sizes[name].items():
            components[part] = family.components[part].network_class(**config).eval()
        for parameter in components["transformer"].parameters():
            if parameter.dim() == 2 and not parameter.any():  # output layers are zero by default, for training
                torch.nn.init.normal_(parameter, std=0.02)
    pipe: VisualPipeline = family.pipeline(**{"vqvae": None, **components})
    pipe.to(device)
    pipe.transformer.to(dtype)
    if quantization is not None:
        quantize = quantize_network if device.type == "cpu" else quantize_weights_on_gpu
        quantize(pipe.transformer, quantization)
    return BenchmarkModel(name, pipe)


def find_pass_scales(scale_tokens: Sequence[int], width: int) -> tuple[int, int]:
    """Return the first and the last scale of a pass of `width` tokens; if ambiguous, the pass with the fewest scales."""
    for count in range(1, len(scale_tokens) + 1):
        for first in range(len(scale_tokens) + 1 - count):
            if sum(scale_tokens[first : first + count]) == width:
                return first, first + count - 1
    raise ValueError(f"a pass feeds whole scales, of {', '.join(map(str, scale_tokens))} tokens; got {width}")


@torch.no_grad()
def scale_pass(
    model: ScaleModel, condition: Condition, batch: int, first: int, last: int, guidance: float
) -> Callable[[], Any]:
    """Return a repeatable function that runs one pass of arbitrary tokens over scales `first` to `last`."""
    canvas, inputs = model.canvas(batch), [None]
    for scale in range(last):
        zeros = torch.zeros(batch, model.scale_tokens[scale], dtype=torch.int64, device=model.device)
        canvas, following = model.add(canvas, zeros, scale)
        inputs.append(following)  # type: ignore[arg-type]
    state = model.allocate(condition, batch, guidance > 0)
    model.reset(state, condition)
    if first:
        model.forward(state, inputs[:first], guidance)

    @torch.no_grad()
    def run() -> Any:
        out = model.forward(state, inputs, guidance)
        model.set_cached(state, first)
        return out

    return run
