"""The engines that a pipeline keeps between calls where passes are captured, so that the next call captures nothing again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vargen.decoding import Accelerator, DecodeOutput, Engine, Sampling
from vargen.decoding.decode import generate_images
from vargen.decoding.requests import Callback
from vargen.decoding.token_pass import list_networks

MAX_KEPT = 2


class KeptEngines:
    """The last engines of each thread. A copy of the pipeline starts with none.

    An engine serves calls with the same networks, method and kind of guidance: any guidance scale and options, any number of
    images up to its slots, and any prompt for which it has room.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def __reduce__(self) -> tuple[type[KeptEngines], tuple[()]]:
        return KeptEngines, ()

    def decode(
        self,
        pipe: Any,
        condition: Any,
        guidance: Any,
        seeds: Tensor,
        method: Accelerator,
        sampling: Sampling,
        callback: Callback | None,
        batch_size: int | None,
    ) -> DecodeOutput:
        """Generate the tokens of M images; arguments as of `vargen.decoding.decode`."""
        slots = len(seeds) if batch_size is None else min(batch_size, len(seeds))
        model = pipe.decoding_model(guidance)
        networks = [id(each) for each in (*pipe.components.values(), *list_networks(model))]
        key = networks, model.cost_key, str(model.device), guidance.rows_per_image, guidance.interval, method
        with self._borrow(key, condition, slots) as engine:
            if engine is None:
                engine = Engine(model, method, batch_size=slots)
            output = generate_images(engine, condition, seeds, sampling, callback)
            if engine.captures:
                engine.restart()
                self._kept.insert(0, (key, engine))
                del self._kept[MAX_KEPT:]
        return output

    @property
    def _kept(self) -> list[tuple[Any, Engine]]:
        if not hasattr(self._local, "kept"):
            self._local.kept = []
        return self._local.kept

    @contextmanager
    def _borrow(self, key: Any, condition: Any, slots: int) -> Iterator[Engine | None]:
        """Take an engine for a call: with the same slots, or more; None if there is none. Without memory, all are given up."""
        found = [
            (each.batch_size != slots, number)
            for number, (other, each) in enumerate(self._kept)
            if other == key and each.batch_size >= slots and each.has_room(condition)
        ]
        try:
            yield self._kept.pop(min(found)[1])[1] if found else None
        except torch.OutOfMemoryError:
            self._kept.clear()
            torch.cuda.empty_cache()
            raise
