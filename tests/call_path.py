"""Print the frames from a call to the loop, its functions outside of decoding, kernels and models, and those of other doors.

python tests/call_path.py [METHOD]
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from vargen import open_pipeline

ROOT = Path(__file__).parents[1]
LOOP = "vargen/decoding/engine.py:Engine.step"  # runs a pass, until the images are done


def name_of(frame: FrameType) -> str | None:
    """Return file and name of a function of vargen, without comprehensions and lambdas."""
    path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
    if not path.is_relative_to(ROOT) or {".venv", "tests"} & {*path.parts} or name.endswith(">"):
        return None
    return f"{path.relative_to(ROOT)}:{name}"


def trace(prepare: Callable[[], Callable[[], Any]]) -> tuple[list[str], list[str]]:
    """Run the call that `prepare` returns, also in threads that this starts; returns its frames to the loop, and functions."""
    frames: list[str | None] = []
    functions: dict[str, None] = {}

    def record(frame: FrameType | None, event: str, _: Any) -> None:
        if not calls or event != "call" or frame is None or (name := name_of(frame)) is None:
            return
        if not name.startswith(("vargen/decoding", "vargen/models", "kernels")):
            functions[name] = None
        if name == LOOP and not frames:
            while frame is not None:
                frames.append(name_of(frame))
                frame = frame.f_back

    calls: list[Any] = []
    threading.setprofile(record)
    try:
        calls.append(prepare())
        sys.setprofile(record)
        calls[0]()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return [name for name in reversed(frames) if name], list(functions)


def trace_request() -> list[str]:
    """Return the functions of a request for an image, from its first byte to its last, without the pipeline's."""
    from fastapi.testclient import TestClient

    from vargen.serving.api import build_app
    from vargen.serving.engine import GenerationThread
    from vargen.serving.server import warm_up

    def prepare() -> Callable[[], Any]:
        pipe = open_pipeline("emoji")
        generation = GenerationThread(pipe, "gumbel")
        client = TestClient(build_app(warm_up(pipe, generation, "emoji"), generation))
        client.get("/health")
        return lambda: client.post("/v1/images/generations", json={"prompt": "a red apple"}).raise_for_status()

    return [name for name in trace(prepare)[1] if not name.startswith("pipelines")]


def trace_click() -> list[str]:
    """Return the functions of a click on Generate, without the pipeline's."""
    from vargen.demo.page import Models, build_page

    def prepare() -> Callable[[], Any]:
        functions = {each.name: each for each in build_page(Models("emoji", open_pipeline("emoji"))).fns.values()}
        run = functions["run_open_mode"]
        values = {component: component.value for component in run.inputs}

        def click() -> None:
            functions["set_running"].fn(7, False, False)
            list(run.fn(values))
            functions["set_idle"].fn()

        return click

    return [name for name in trace(prepare)[1] if not name.startswith("pipelines")]


def main(method: str = "gumbel") -> None:
    pipe = open_pipeline("emoji")
    pipe("a red apple")  # warm
    frames, functions = trace(lambda: lambda: pipe("a red apple", accelerator=method))
    print(f"{len(frames)} frames from the call to the loop:", *frames, sep="\n  ")
    print(f"{len(functions)} functions outside of decoding, kernels and models:", *functions, sep="\n  ")
    functions = trace_request()
    print(f"{len(functions)} functions of a request outside of the pipeline:", *functions, sep="\n  ")
    functions = trace_click()
    print(f"{len(functions)} functions of a click on the page outside of the pipeline:", *functions, sep="\n  ")


if __name__ == "__main__":
    main(*sys.argv[1:2])
