"""What a pass costs against the tokens it feeds, measured where it will run, and the number of threads that it is worth.

Measured once per network, dtype, guidance, batch, device, number of threads and machine, then remembered: in this process, and
for a month in a file of the cache folder, so that the first picture of the next process does not pay for it.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from vargen.decoding.next_token.draft import Tree
from vargen.decoding.next_token.protocols import TokenModel
from vargen.device import chosen_threads, cores, cpu_model, threads
from vargen.files import cache_folder, whole_file
from vargen.modes import quick_passes

logger = logging.getLogger("vargen")

BESIDE = 0.9  # of a step that drafts, what its passes take: drafts are judged and redrawn beside them
_WIDEST = 16  # tokens a pass by which a half-drawn image is made, and at which threads are judged for methods that draft
WORTH = 1.25  # how much faster a pass has to be with twice the threads, which other programs could use
_MONTH = 30 * 86400.0  # seconds

Place = tuple[Any, ...]
T = TypeVar("T")
_measured: dict[Place, dict[int, float]] = {}
_nameless: WeakKeyDictionary[TokenModel, dict[Place, dict[int, float]]] = WeakKeyDictionary()  # models without a cost key


def pass_costs(
    model: TokenModel, condition: Any, images: int, widths: Sequence[int], repeats: int = 3, anew: bool = False
) -> dict[int, float]:
    """Seconds of a pass that feeds W tokens to each of `images` half-drawn images, by W: the least of `repeats`.

    Args:
        anew: measure although a cost is remembered, as a report has to.
    """
    known = _known(model, images)
    missing = [width for width in widths if anew or width not in known]
    if missing:
        with quick_passes(torch.device(model.device)):
            state = _half_full(model, condition, images, max(missing))
            for round_ in range(repeats + 1):  # the first is a warm-up
                for width in missing:
                    seconds = _time(model, state, images, width)
                    known[width] = min(seconds, known.get(width, seconds)) if round_ > 1 else seconds
        _store(model, images, known)
    return {width: known[width] for width in widths}


def interpolated(seconds: Mapping[int, float], fed: int) -> float:
    """Seconds of a pass over so many tokens, on a straight line between measured ones; beyond these, those of the nearest."""
    below = max((known for known in seconds if known <= fed), default=min(seconds))
    above = min((known for known in seconds if known >= fed), default=max(seconds))
    share = (fed - below) / (above - below) if above > below else 0.0
    return seconds[below] + share * (seconds[above] - seconds[below])


@contextmanager
def suitable_threads(model: TokenModel, condition: Any, images: int, width: int) -> Iterator[int]:
    """The number of threads that passes over `width` tokens are worth here, for as long as the block runs.

    A number that a person chose stays. So does torch's for models that do not say by `cost_key` what their costs depend on.
    """
    if model.device.type != "cpu" or model.cost_key is None or chosen_threads() is not None:
        yield torch.get_num_threads()
        return
    with quick_passes(torch.device(model.device)):
        count = best_threads(model, condition, images, min(width, _WIDEST))
    with threads(count):
        yield count


def best_threads(model: TokenModel, condition: Any, images: int, width: int) -> int:
    """The largest of 1, 2, 4, ... threads, up to the cores, each of which makes a pass `WORTH` times as fast as half of it."""
    best, least, count, state = 1, float("inf"), 1, None
    while count <= cores():
        with threads(count):
            known = _known(model, images)
            if width not in known:
                if state is None:
                    with threads(1):
                        state = _half_full(model, condition, images, width)
                seconds = _time(model, state, images, width)
                # Beside other programs, threads that wait for each other take many times as long: one try tells.
                tries = 3 if seconds < 3 * least else 0
                known[width] = min([seconds, *(_time(model, state, images, width) for _ in range(tries))])
                _store(model, images, known)
        if not pays(known[width], least):
            break
        best, least, count = count, known[width], 2 * count
    return best


def pays(seconds: float, half_as_many: float) -> bool:
    """Whether a number of threads pays that make a pass take `seconds`, where half of them take `half_as_many`."""
    return seconds * WORTH <= half_as_many


def timed(run: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Seconds of a call, and its result.

    Seconds of the processor where one thread works, so that other programs do not count; else of the clock.
    """
    now = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    _wait(device)
    start = now()
    result = run()
    _wait(device)
    return now() - start, result


def _time(model: TokenModel, state: Any, images: int, width: int) -> float:
    """Seconds of one pass over a chain of `width` tokens."""
    tokens = torch.zeros(images, width, dtype=torch.int64, device=model.device)
    tree = Tree.of_chain(width - 1, model.device)
    return timed(lambda: model.forward(tokens, state, tree), torch.device(model.device))[0]


def _half_full(model: TokenModel, condition: Any, images: int, max_fed: int) -> Any:
    """A state that holds half of the grid: what a pass attends to is part of its cost."""
    half = model.grid[0] * model.grid[1] // 2
    fed = max(1, min(max(max_fed, _WIDEST), half))
    state, _ = model.prefill(condition, max(fed, max_fed))
    tree = Tree.of_chain(fed - 1, model.device)
    tokens = torch.zeros(images, fed, dtype=torch.int64, device=model.device)
    path = torch.arange(fed, device=model.device).expand(images, fed)
    for _ in range(half // fed):
        model.forward(tokens, state, tree)
        model.commit(state, path, torch.full((images,), fed, device=model.device), tree)
    return state


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- what is remembered -----------------------------------------------------------------------------------------------


def _known(model: TokenModel, images: int) -> dict[int, float]:
    """Seconds by width under the threads in force: as measured in this process, or else in another one on this machine."""
    place = (model.cost_key, images, str(model.device), torch.get_num_threads())
    mine = _nameless.setdefault(model, {}) if model.cost_key is None else _measured
    if place not in mine:
        mine[place] = _stored(model, images)
    return mine[place]


def _file() -> Path:
    return cache_folder() / "pass-costs.json"


def _name(model: TokenModel, images: int) -> str | None:
    """What a measurement is filed under; None for models whose costs are not kept."""
    key = model.cost_key
    return None if key is None else f"{key}, batch {images}, {torch.get_num_threads()} threads, {machine(model.device)}"


def machine(device: torch.device) -> str:
    """What runs the passes, and by which torch."""
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cpu_model()}, {cores()} cores"
    return f"{what}, torch {torch.__version__}"


def _read() -> dict[str, Any]:
    try:
        found = json.loads(_file().read_text("utf-8"))
    except (OSError, ValueError):  # none yet, or another program's
        return {}
    fresh = time.time() - _MONTH
    return {
        name: entry
        for name, entry in (found.items() if isinstance(found, dict) else ())
        if isinstance(entry, dict) and isinstance(entry.get("measured"), int | float) and entry["measured"] > fresh
    }


def _stored(model: TokenModel, images: int) -> dict[int, float]:
    name = _name(model, images)
    try:
        seconds = _read()[name]["seconds"] if name else {}
        return {int(width): float(value) for width, value in seconds.items() if float(value) > 0}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _store(model: TokenModel, images: int, seconds: dict[int, float]) -> None:
    """Keep what was measured; of two processes that write at once one is lost, and measures again another day."""
    name = _name(model, images)
    if name is None:
        return
    entry = {"measured": time.time(), "seconds": {str(width): value for width, value in sorted(seconds.items())}}
    try:
        with whole_file(_file()) as temporary:
            temporary.write_text(json.dumps({**_read(), name: entry}, indent=1), "utf-8")
    except OSError as error:  # a home that cannot be written
        logger.debug("measured costs are not kept: %s", error)


def thread_choices(device: torch.device) -> list[tuple[str, int, dict[int, float]]]:
    """What was measured on this machine: network and batch, tokens fed, and seconds of a pass by the number of threads."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for name, entry in _read().items():
        match = re.fullmatch(rf"(.*), (\d+) threads, {re.escape(machine(device))}", name)
        if match is None:
            continue
        for width, seconds in entry.get("seconds", {}).items():
            found.setdefault((match[1], int(width)), {})[int(match[2])] = float(seconds)
    return [(name, width, seconds) for (name, width), seconds in sorted(found.items()) if len(seconds) > 1]
