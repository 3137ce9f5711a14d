"""The engines that a pipeline keeps between calls, whose captured passes the next call uses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from vargen.decoding import DecodeOutput, Engine, decode_scales
from vargen.decoding.decode import generate_images
from vargen.decoding.requests import Callback
from vargen.decoding.scales import ScalePasses
from vargen.decoding.token_pass import list_networks
from vargen.kernels.dispatch import read_kernel_setting
from vargen.kernels.host import Clock, captures_passes

if TYPE_CHECKING:
    from vargen.pipelines.generation import ImageRequest

MAX_KEPT = 2
MOST_WASTE = 4  # slots of an engine for each image of a call that it serves


class KeptEngines(threading.local):
    """The last engines of each thread. A deep copy or a pickle of the pipeline starts with none.

    An engine serves calls with the same networks, method and kind of guidance: any guidance scale and options, from a quarter
    of its slots to all of them, and any prompt for which it has room. Passes over scales serve the same number of images.
    """

    def __init__(self) -> None:
        # Of each engine, the last one used first: its key, the networks that it reads, and itself.
        self._kept: list[tuple[Any, Sequence[Any], Any]] = []

    def __reduce__(self) -> tuple[type[KeptEngines], tuple[()]]:
        return KeptEngines, ()

    @contextmanager
    def freed_without_memory(self) -> Iterator[None]:
        """Give up the engines of this thread if memory runs out within the block."""
        try:
            yield
        except torch.OutOfMemoryError:
            self._kept.clear()
            torch.cuda.empty_cache()
            raise

    def decode(self, pipe: Any, request: ImageRequest, callback: Callback | None) -> DecodeOutput:
        """Generate the tokens of a request by an `Engine`."""
        condition, seeds = replace(request.condition, scale=request.guidance.scale), request.seeds.noise_seeds
        slots = len(seeds) if request.batch_size is None else min(request.batch_size, len(seeds))
        model = pipe.decoding_model(request.guidance)
        if not captures_passes(torch.device(model.device)):
            engine = Engine(model, request.method, batch_size=slots)
            return generate_images(engine, condition, seeds, request.sampling, callback)
        described = [getattr(each, "description", None) for each in (model, model.draft_model)]
        parts = [*list_networks(model), getattr(pipe, "vqvae", None), *described]

        def fits(engine: Engine) -> bool:
            return slots <= engine.batch_size <= MOST_WASTE * slots and engine.has_room(condition)

        key = _make_key(request, model, parts)
        engine = self._take(key, parts, fits) or Engine(model, request.method, batch_size=slots)
        output = generate_images(engine, condition, seeds, request.sampling, callback)
        if engine.captures:
            engine.restart()
            self._keep(key, parts, engine)
        return output

    def decode_scales(self, pipe: Any, request: ImageRequest, callback: Callback | None) -> DecodeOutput:
        """Generate the tokens of a request by `ScalePasses`."""
        condition, seeds = replace(request.condition, scale=request.guidance.scale), request.seeds.noise_seeds
        model = pipe.decoding_model(request.guidance)
        parts = [*model.networks, *(model.draft_model.networks if model.draft_model else ())]
        rows = 0 if condition.caption_embeds is None else condition.caption_embeds.shape[1]
        key = *_make_key(request, model, parts), rows, len(seeds)
        fixed, passes = request.fixed, self._take(key, parts, lambda passes: True)
        if passes is None:
            clock = Clock(torch.device(model.device), False)
            passes = ScalePasses(model, request.method.bind(model), condition, len(seeds), clock)
        output = decode_scales(
            passes.model,
            condition,
            seeds,
            request.method,
            request.sampling,
            fixed_scales=() if fixed is None else fixed.scales,
            fixed_tokens=None if fixed is None or fixed.kept_area is None else fixed,
            callback=callback,
            passes=passes,
        )
        if passes.captured is not None and passes.captured.is_active:
            self._keep(key, parts, passes)
        return output

    def _take(self, key: Any, parts: Sequence[Any], fits: Callable[[Any], bool]) -> Any:
        """Take an engine that serves a call, out of those that are kept; None without one."""
        # Those of other networks would keep these in memory.
        self._kept[:] = [each for each in self._kept if list(map(id, each[1])) == list(map(id, parts))]
        for number, (other, _, engine) in enumerate(self._kept):
            if other == key and fits(engine):
                return self._kept.pop(number)[2]
        del self._kept[MAX_KEPT - 1 :]  # a new one needs memory
        return None

    def _keep(self, key: Any, parts: Sequence[Any], engine: Any) -> None:
        self._kept.insert(0, (key, parts, engine))
        del self._kept[MAX_KEPT:]


def _make_key(request: ImageRequest, model: Any, parts: Sequence[Any]) -> tuple[Any, ...]:
    """Return what has to be the same for a call that an engine serves, beside its `parts`."""
    guidance, device = request.guidance, torch.device(model.device)
    weights = [next(each.parameters(), None) for each in parts if isinstance(each, torch.nn.Module)]
    places = [None if each is None else (each.dtype, each.device) for each in weights]
    kind = guidance.rows_per_image, guidance.interval, request.method
    return model.cost_key, device, places, kind, read_kernel_setting()
