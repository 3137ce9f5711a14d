"""Print the functions of vargen that a call runs: `python tests/call_path.py [METHOD]`.

Frames from `__call__` to the loop, and distinct functions outside of decoding, kernels and models, in the order of first calls.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from vargen import open_pipeline

ROOT = Path(__file__).parents[1]
LOOP = "vargen/decoding/engine.py:Engine."  # runs passes until the images are done


def trace_call(pipe: Any, method: str = "gumbel") -> tuple[list[str], list[str]]:
    """Return the frames from `__call__` to the loop, and the functions outside of decoding, kernels and models."""
    frames: list[str] = []
    functions: dict[str, None] = {}

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (name := name_of(frame)) is None:
            return
        if not name.startswith(("vargen/decoding", "vargen/models", "kernels")):
            functions[name] = None
        if name.startswith(LOOP) and name.endswith(("run", "step")) and not frames:
            here: FrameType | None = frame
            while here is not None:
                frames.extend([found] if (found := name_of(here)) else [])
                here = here.f_back

    sys.setprofile(record)
    try:
        pipe("a red apple", accelerator=method)
    finally:
        sys.setprofile(None)
    return [name for name in reversed(frames) if "call_path" not in name], list(functions)


def name_of(frame: FrameType) -> str | None:
    """Return file and name of a function of vargen; None for others, and for comprehensions and lambdas."""
    code = frame.f_code
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT) or ".venv" in path.parts or code.co_name.startswith("<"):
        return None
    return f"{path.relative_to(ROOT)}:{code.co_qualname}".removesuffix(".<locals>")


if __name__ == "__main__":
    pipe = open_pipeline("emoji")
    pipe.set_progress_bar_config(disable=True)
    pipe("a red apple")  # warm
    frames, functions = trace_call(pipe, *sys.argv[1:2])
    print(f"{len(frames)} frames from the call to the loop:", *frames, sep="\n  ")
    print(f"{len(functions)} functions outside of decoding, kernels and models:", *functions, sep="\n  ")
