"""The engines that a pipeline keeps between calls where passes are captured, so that the next call captures nothing again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from vargen.clock import Clock
from vargen.decoding import DecodeOutput, Engine, decode_scales
from vargen.decoding.decode import generate_images
from vargen.decoding.requests import Callback
from vargen.decoding.scales import ScalePasses
from vargen.decoding.token_pass import list_networks
from vargen.device import captures_passes
from vargen.kernels.dispatch import read_kernel_setting

if TYPE_CHECKING:
    from vargen.pipelines.generation import GenerationRequest

MAX_KEPT = 2
MOST_WASTE = 4  # slots of an engine for each image of a call that it serves


class KeptEngines:
    """The last engines of each thread. A deep copy or a pickle of the pipeline starts with none.

    An engine serves calls with the same networks, method and kind of guidance: any guidance scale and options, from a quarter
    of its slots to all of them, and any prompt for which it has room. Passes over scales serve the same number of images.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def __reduce__(self) -> tuple[type[KeptEngines], tuple[()]]:
        return KeptEngines, ()

    def clear(self) -> None:
        """Give up the engines of this thread, and return their memory."""
        self._kept.clear()
        torch.cuda.empty_cache()

    def decode(self, pipe: Any, request: GenerationRequest, callback: Callback | None) -> DecodeOutput:
        """Generate the tokens of a request by an `Engine`."""
        condition, seeds = replace(request.condition, scale=request.guidance.scale), request.seeds.noise_seeds
        slots = len(seeds) if request.batch_size is None else min(request.batch_size, len(seeds))
        model = pipe.decoding_model(request.guidance)

        def spare(each: Engine) -> int:
            return each.batch_size - slots if each.batch_size <= MOST_WASTE * slots and each.has_room(condition) else -1

        described = [getattr(each, "description", None) for each in (model, model.draft_model)]
        parts = [*list_networks(model), getattr(pipe, "vqvae", None), *described]
        with self._borrow(request, model, parts, 0, spare) as kept:
            engine = kept.engine or Engine(model, request.method, batch_size=slots)
            output = generate_images(engine, condition, seeds, request.sampling, callback)
            if engine.captures:
                engine.restart()
                kept.engine = engine
        return output

    def decode_scales(self, pipe: Any, request: GenerationRequest, callback: Callback | None, fixed: Any) -> DecodeOutput:
        """Generate the tokens of a request by `ScalePasses`."""
        condition, seeds = replace(request.condition, scale=request.guidance.scale), request.seeds.noise_seeds
        model = pipe.decoding_model(request.guidance)
        rows = 0 if condition.caption_embeds is None else condition.caption_embeds.shape[1]
        spare = lambda each: 0 if len(each.seeds) == len(seeds) else -1  # noqa: E731
        networks = [*model.networks, *(model.draft_model.networks if model.draft_model else ())]
        with self._borrow(request, model, networks, rows, spare) as kept:
            stages, clock = request.method.bind(model), Clock(torch.device(model.device), False)
            passes = kept.engine or ScalePasses(model, stages, condition, len(seeds), clock)
            output = decode_scales(
                passes.model,
                condition,
                seeds,
                request.method,
                request.sampling,
                fixed_scales=fixed.scales,
                fixed_tokens=fixed.kept,
                callback=callback,
                passes=passes,
            )
            kept.engine = passes if passes.captured and passes.captured.is_active else None
        return output

    @property
    def _kept(self) -> list[tuple[Any, Sequence[Any], Any]]:
        """Of each engine, the last one used first: its key, the networks that it reads, and itself."""
        if not hasattr(self._local, "kept"):
            self._local.kept = []
        return self._local.kept

    @contextmanager
    def _borrow(
        self, request: GenerationRequest, model: Any, parts: Sequence[Any], width: int, spare: Callable[[Any], int]
    ) -> Iterator[SimpleNamespace]:
        """Take an engine for a call, as `engine`: with the same slots, or more; None if there is none. Keep what is there then.

        Args:
            parts: objects that an engine for the call reads.
            width: another number that has to be the same.
            spare: number of slots of an engine that the call does not need; negative if it cannot serve.
        """
        guidance, device = request.guidance, torch.device(model.device)
        weights = [next(each.parameters(), None) for each in parts if isinstance(each, torch.nn.Module)]
        places = [None if each is None else (each.dtype, each.device) for each in weights]
        kind = guidance.rows_per_image, guidance.interval, request.method, width
        key = model.cost_key, device, places, kind, captures_passes(device), read_kernel_setting()
        # Those of other networks would keep these in memory.
        self._kept[:] = [each for each in self._kept if list(map(id, each[1])) == list(map(id, parts))]
        found = [(spare(engine), number) for number, (other, _, engine) in enumerate(self._kept) if other == key]
        best = min((each for each in found if each[0] >= 0), default=None)
        if best is None:
            del self._kept[MAX_KEPT - 1 :]  # a new one needs memory
        kept = SimpleNamespace(engine=None if best is None else self._kept.pop(best[1])[2])
        yield kept
        if kept.engine is not None:
            self._kept.insert(0, (key, parts, kept.engine))
            del self._kept[MAX_KEPT:]
