"""What a pass costs against the tokens it feeds, measured where it will run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from vargen.decoding.types import TokenModel, Tree

_measured: WeakKeyDictionary[Any, dict[tuple, float]] = WeakKeyDictionary()  # per network: (images, tokens, device, threads)


def pass_costs(model: TokenModel, condition: Any, images: int, widths: Sequence[int], repeats: int = 3) -> dict[int, float]:
    """Seconds of a pass that feeds W tokens to each of `images` images, for each W of `widths`: the least of `repeats`.

    Measured once per network, batch, device and number of threads, in rounds over all widths, then remembered.
    """
    known = _measured.setdefault(getattr(model, "network", model), {})
    place = (images, str(model.device), torch.get_num_threads(), getattr(model, "halves", 1))
    missing = [width for width in widths if (width, *place) not in known]
    if missing:
        state, _ = model.prefill(condition, max(missing))
        for round_ in range(repeats + 1):  # the first is a warm-up
            for width in missing:
                tokens = torch.zeros(images, width, dtype=torch.int64, device=model.device)
                _wait(model.device)
                start = time.perf_counter()
                model.forward(tokens, state, Tree.of_chain(width - 1, model.device))
                _wait(model.device)
                seconds = time.perf_counter() - start
                known[(width, *place)] = min(seconds, known.get((width, *place), seconds)) if round_ > 1 else seconds
    return {width: known[(width, *place)] for width in widths}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
