"""Models to benchmark: of a folder, or of an official size with random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vargen.decoding import ScaleModel
from vargen.models.guidance import Condition
from vargen.models.kv_cache import KVCache
from vargen.models.quantization import quantize_network, quantize_weights_on_gpu
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.families import ModelFamily
from vargen.pipelines.loading import list_families, open_pipeline, read_index
from vargen.pipelines.model_names import locate_folder


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
