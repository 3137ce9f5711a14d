"""Print the frames from a call to the loop, and its functions outside of decoding, kernels and models."""

import sys
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


def main(method: str = "gumbel") -> None:
    frames: list[str | None] = []
    functions: dict[str, None] = {}

    def record(frame: FrameType | None, event: str, _: Any) -> None:
        if event != "call" or frame is None or (name := name_of(frame)) is None:
            return
        if not name.startswith(("vargen/decoding", "vargen/models", "kernels")):
            functions[name] = None
        if name == LOOP and not frames:
            while frame is not None:
                frames.append(name_of(frame))
                frame = frame.f_back

    pipe = open_pipeline("emoji")
    pipe("a red apple")  # warm
    sys.setprofile(record)
    pipe("a red apple", accelerator=method)
    sys.setprofile(None)
    found = [name for name in reversed(frames) if name]
    print(f"{len(found)} frames from the call to the loop:", *found, sep="\n  ")
    print(f"{len(functions)} functions outside of decoding, kernels and models:", *functions, sep="\n  ")


if __name__ == "__main__":
    main(*sys.argv[1:2])
