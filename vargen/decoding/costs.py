"""Measure the cost of a pass on a CPU by the number of tokens it feeds, and select the number of threads.

Costs are measured once per network, dtype, guidance, batch, device, number of threads and machine: in this process,
and for a month in a file of the cache folder, so that the first image of the next process does not wait for measurements.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from vargen.decoding.interfaces import TokenModel
from vargen.decoding.tree import Tree
from vargen.decoding.video.interfaces import BlockModel
from vargen.device import available_cores, cpu_model, limit_threads, user_thread_count
from vargen.files import atomic_file, cache_folder
from vargen.kernels.host import inference_mode_for
from vargen.kernels.int8.instructions import cpu_instructions

logger = logging.getLogger("vargen")

_CACHE_FILE = "pass-costs.json"  # in the cache folder
_LIFETIME = 30 * 86400.0  # seconds
# Seconds by width; of models without a cost key by the model.
_costs_by_key: dict[str, dict[int, float]] = {}
_costs_without_key: WeakKeyDictionary[Any, dict[str, dict[int, float]]] = WeakKeyDictionary()
_PROBE_WIDTH = 16  # tokens per pass when filling a half-finished image; largest width that selects threads
MIN_THREAD_SPEEDUP = 1.25  # required speedup from doubling the threads, which other programs could use
# Limit in seconds on filling a state; no round of measurements starts after three times this limit. One round suffices for
# passes in a dtype that the CPU emulates: the packaged model's first image in bfloat16 took 16 seconds more than the next.
_ENOUGH = 0.5


def candidate_widths(max_width: int) -> list[int]:
    """List the numbers of tokens per pass among which controllers choose, up to `max_width` and including it."""
    widths = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    return [width for width in widths if width < max_width] + [max_width]


def measure_pass_costs(model: TokenModel, condition: Any, images: int, widths: Sequence[int]) -> dict[int, float]:
    """Measure the seconds of passes over `images` half-finished images, by the number of tokens fed to each.

    Returns the minimum of a few measurements for each of `widths`.
    """
    known = find_costs(model, images)
    if missing := [width for width in widths if width not in known]:
        with inference_mode_for(torch.device(model.device)):
            state = _make_half_filled_state(model, condition, images, max(missing))
            begun = time.perf_counter()
            for round_ in range(4):  # the first round is a warm-up
                if round_ and time.perf_counter() - begun > 3 * _ENOUGH:
                    break
                for width in missing:
                    seconds = _time_pass(model, state, images, width)
                    known[width] = min(seconds, known.get(width, seconds)) if round_ > 1 else seconds
        save_costs(model, images, known)
    return {width: known[width] for width in widths}


def token_threads(model: TokenModel, condition: Any, images: int, width: int) -> int | None:
    """Like `select_threads`, for passes that feed `width` tokens to each of `images` half-finished images."""
    width = min(width, _PROBE_WIDTH)

    def passes() -> Callable[[], float]:
        state = _make_half_filled_state(model, condition, images, width)
        return lambda: _time_pass(model, state, images, width)

    with inference_mode_for(torch.device(model.device)):
        return select_threads(model, images, width, passes)


def block_threads(model: BlockModel, condition: Any) -> int | None:
    """Like `select_threads`, for passes over the first block of a video."""
    frames = model.block_shape[0]

    def passes() -> Callable[[], float]:
        state = model.start(condition, frames)
        noisy = torch.zeros(1, *model.block_shape, dtype=torch.float32, device=model.device)
        return lambda: time_call(lambda: model.forward(state, (), noisy, model.levels[0]))

    with torch.no_grad():
        return select_threads(model, 1, frames, passes)


def select_threads(
    model: TokenModel | BlockModel, images: int, width: int, passes: Callable[[], Callable[[], float]]
) -> int | None:
    """Select the number of CPU threads for passes.

    It is the largest of 1, 2, 4, ..., up to the number of cores, such that each doubling speeds up a pass by at least
    `MIN_THREAD_SPEEDUP`.

    Args:
        passes: returns a function that times a pass, in seconds.

    Returns:
        None, for torch's default, if the user set a number, off the CPU, and for models without a cost key.
    """
    if model.device.type != "cpu" or model.cost_key is None or user_thread_count() is not None:
        return None
    best, least, count, timed_pass = 1, float("inf"), 1, None
    while count <= available_cores():
        with limit_threads(count):
            known = find_costs(model, images)
            if width not in known:
                if timed_pass is None:
                    with limit_threads(1):
                        timed_pass = passes()
                seconds = timed_pass()
                # With other programs running, threads that wait for each other are many times slower: one try shows it.
                tries = 3 if seconds < min(3 * least, _ENOUGH / 4) else 0
                known[width] = min([seconds, *(timed_pass() for _ in range(tries))])
                save_costs(model, images, known)
        if known[width] * MIN_THREAD_SPEEDUP > least:
            break
        best, least, count = count, known[width], 2 * count
    return best


def time_call(run: Callable[[], object]) -> float:
    """Return the seconds of a call on a CPU: with one thread its own time, so that other programs have no effect."""
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = now()
    run()
    return now() - start


def _time_pass(model: TokenModel, state: Any, images: int, width: int) -> float:
    """Time one pass over a chain of `width` tokens, in seconds."""
    tokens = torch.zeros(images, width, dtype=torch.int64, device=model.device)
    tree = Tree.make_chain(width - 1, model.device)
    return time_call(lambda: model.forward(tokens, state, tree))


def _make_half_filled_state(model: TokenModel, condition: Any, images: int, max_fed: int) -> Any:
    """Return a state whose cache holds half of the grid, since the cost of a pass depends on what it attends to.

    If passes are slow, attention is a small part of their cost, and filling stops after `_ENOUGH` seconds.
    """
    half = model.grid[0] * model.grid[1] // 2
    fed = max(1, min(max(max_fed, _PROBE_WIDTH), half))
    state, _ = model.start(condition, max(fed, max_fed))
    tree = Tree.make_chain(fed - 1, model.device)
    tokens = torch.zeros(images, fed, dtype=torch.int64, device=model.device)
    path = torch.arange(fed, device=model.device).expand(images, fed)
    begun = time.perf_counter()
    for _ in range(half // fed):
        if time.perf_counter() - begun > _ENOUGH:
            break
        model.forward(tokens, state, tree)
        model.commit(state, path, torch.full((images,), fed, device=model.device), tree)
    return state


# -- the cache of measured costs --------------------------------------------------------------------------------------


def find_costs(model: TokenModel | BlockModel, images: int) -> dict[int, float]:
    """Seconds by width for the current number of threads, measured in this process or else loaded from the cache file."""
    key = _cache_key(model, images)
    if model.cost_key is None:
        return _costs_without_key.setdefault(model, {}).setdefault(key, {})
    if key not in _costs_by_key:
        stored = _read_cache().get(key, {"seconds": {}})
        _costs_by_key[key] = {int(width): value for width, value in stored["seconds"].items()}
    return _costs_by_key[key]


def _cache_key(model: TokenModel | BlockModel, images: int) -> str:
    """What a measurement depends on: the model, the batch, the number of threads, the hardware and the torch version."""
    if model.device.type == "cuda":
        hardware = torch.cuda.get_device_name(model.device)
    else:  # virtual machines report different processors by one name
        hardware = f"{cpu_model()}, {' '.join(cpu_instructions())}, {available_cores()} cores"
    return f"{model.cost_key}, batch {images}, {torch.get_num_threads()} threads, {hardware}, torch {torch.__version__}"


def _read_cache() -> dict[str, Any]:
    """Return the entries of the cache file that are not too old; none if the file is missing or damaged."""
    fresh = time.time() - _LIFETIME
    try:
        entries = json.loads((cache_folder() / _CACHE_FILE).read_text("utf-8"))
        valid = all(int(width) > 0 < value for entry in entries.values() for width, value in entry["seconds"].items())
        return {key: entry for key, entry in entries.items() if entry["measured"] > fresh} if valid else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def save_costs(model: TokenModel | BlockModel, images: int, seconds: dict[int, float]) -> None:
    """Write measured costs to the cache file. If two processes write at once, one result is lost and measured again later."""
    if model.cost_key is None:
        return
    entry = {"measured": time.time(), "seconds": {str(width): value for width, value in sorted(seconds.items())}}
    try:
        with atomic_file(cache_folder() / _CACHE_FILE) as temporary:
            temporary.write_text(json.dumps({**_read_cache(), _cache_key(model, images): entry}, indent=1), "utf-8")
    except OSError as error:  # the cache folder is not writable
        logger.debug("measured costs are not kept: %s", error)
