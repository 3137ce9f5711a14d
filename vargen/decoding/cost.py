"""What a pass costs against the tokens it feeds, measured where it will run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from vargen.decoding.types import TokenModel, Tree

BESIDE = 0.9  # of a step that drafts, what its passes take: drafts are judged and redrawn beside them

_measured: WeakKeyDictionary[Any, dict[tuple, float]] = WeakKeyDictionary()  # per network: (images, tokens, device, threads)


def pass_costs(model: TokenModel, condition: Any, images: int, widths: Sequence[int], repeats: int = 3) -> dict[int, float]:
    """Seconds of a pass that feeds W tokens to each of `images` half-drawn images, by W: the least of `repeats`.

    Measured once per network, batch, device and number of threads, in rounds over all widths, then remembered.
    """
    known = _measured.setdefault(getattr(model, "network", model), {})
    place = (images, str(model.device), torch.get_num_threads(), getattr(model, "halves", 1))
    missing = [width for width in widths if (width, *place) not in known]
    if missing:
        state = _half_full(model, condition, images, max(missing))
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


def _half_full(model: TokenModel, condition: Any, images: int, widest: int) -> Any:
    """A state that holds half of the grid: what a pass attends to is part of its cost."""
    state, _ = model.prefill(condition, widest)
    tree = Tree.of_chain(widest - 1, model.device)
    tokens = torch.zeros(images, widest, dtype=torch.int64, device=model.device)
    path = torch.arange(widest, device=model.device).expand(images, widest)
    for _ in range(model.grid[0] * model.grid[1] // 2 // widest):
        model.forward(tokens, state, tree)
        model.commit(state, path, torch.full((images,), widest, device=model.device), tree)
    return state


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
