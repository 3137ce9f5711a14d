"""In which format a model computes by default on a CPU, read from its configuration alone: without torch."""

from __future__ import annotations

from pathlib import Path

from vargen.folders.json_files import read_object
from vargen.kernels.int8.load import SCALE_PASS, TOKEN_PASS, CompiledCode, find_compiled_blocker

_CODE = {"LlamaGenTransformer": TOKEN_PASS, "VARTransformer": SCALE_PASS}


def default_quantization(folder: Path) -> str | None:
    """Return the format in which a folder's transformer runs on a CPU by default; None is floating point.

    It is int8 if its weights are stored so and compiled code runs: by torch operators, 8-bit products may be slow.
    """
    return None if _find_code(folder) is None else "int8"


def start_compiling(folder: Path) -> None:
    """Start to build the code by which a folder's transformer runs by default, if it is not there, beside what comes next."""
    code = _find_code(folder)
    if code is not None and not code.is_built():
        code.load(wait=False)


def _find_code(folder: Path) -> CompiledCode | None:
    file = folder / "transformer" / "config.json"
    config = read_object(file) if file.is_file() else {}
    code = _CODE.get(str(config.get("_class_name"))) if config.get("weight_format") == "int8" else None
    return code if code is not None and find_compiled_blocker() is None else None
