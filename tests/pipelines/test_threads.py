"""Calls of one pipeline from several threads at once: each generates what it generates alone, and ends for itself."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tiny_models import class_pipeline


def run_beside(pipe: Any, first: Callable[..., None], second: Callable[..., None]) -> list[Any]:
    """Statistics of two calls, whose callbacks wait for each other at their first step."""
    meet = threading.Barrier(2, timeout=30)

    def call(each: Callable[..., None], scale: float) -> Any:
        def callback(pipe: Any, step: int, timestep: int, kwargs: dict[str, Any]) -> None:
            if step == 0:
                meet.wait()
            each(pipe, step, scale)

        asked = {"class_labels": 3, "accelerator": "ar", "guidance_scale": scale}
        return pipe(**asked, callback_on_step_end=callback).stats

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(call, each, scale) for each, scale in ((first, 2.0), (second, 1.0))]
        return [future.result(timeout=60) for future in futures]


def test_an_interrupt_in_a_callback_ends_its_own_call() -> None:
    def stop(pipe: Any, step: int, scale: float) -> None:
        if step == 2:
            pipe._interrupt = True

    stopped, whole = run_beside(class_pipeline(), stop, lambda *_: None)
    assert stopped.stopped and stopped.passes == 3
    assert not whole.stopped and whole.passes == 16


def test_an_interrupt_from_another_thread_ends_all_calls() -> None:
    pipe = class_pipeline()

    def stop(pipe: Any, step: int, scale: float) -> None:
        if step == 3 and scale == 2.0:
            other = threading.Thread(target=setattr, args=(pipe, "_interrupt", True))
            other.start()
            other.join()
            done.set()
        elif step == 3:
            done.wait(30)

    done = threading.Event()
    assert all(stats.stopped for stats in run_beside(pipe, stop, stop))
