"""Compiled CPU passes (`vargen.kernels.cpu_pass`): whether they run here, and compiling them once for all processes of a user.

Numba compiles them in seconds, in another process, and keeps the code in the cache folder. Until it is there, passes run by
torch operators, with the same bits. Where nothing can be written, they are compiled in a thread of each process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
import threading
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from vargen.compat import cache_folder, installed_version

logger = logging.getLogger("vargen")

_SOURCES = ("int8_format", "cpu_vector", "cpu_steps", "cpu_attention", "cpu_pass", "cpu_sample", "cpu_build")
_FOLDER_ENV = "NUMBA_CACHE_DIR"  # Numba's own variable
# By name, the flags of torch (or else of Linux) that a CPU with the instructions has.
_INSTRUCTIONS = {
    "AVX2": ("avx2",),
    "AVX-512": ("avx512_f", "avx512f"),
    "AVX-512 VNNI": ("avx512_vnni",),
    "AVX-VNNI": ("avx_vnni",),
    "AVX-512 BF16": ("avx512_bf16",),
    "AMX int8": ("amx_int8",),
    "AMX bf16": ("amx_bf16",),
    "Arm dot product": ("dot", "asimddp"),
    "Arm bf16": ("bf16",),
}
_SLOW = "; this CPU has no 8-bit dot products, so float32 may be faster"
BYTE_PRODUCTS = ("AVX-512 VNNI", "AVX-VNNI", "AMX int8", "Arm dot product")


@lru_cache(maxsize=1)
def cpu_instructions() -> tuple[str, ...]:
    """Return the names of this CPU's instructions that matter for passes, such as `"AVX-512 VNNI"`."""
    import torch

    flags = {name for name, value in getattr(torch.cpu, "get_capabilities", dict)().items() if value}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags |= {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}
    except OSError:  # not Linux
        pass
    return tuple(name for name, known in _INSTRUCTIONS.items() if flags & set(known))


def find_compiled_blocker() -> str | None:
    """Return the reason why compiled passes cannot run here; None if they can."""
    if os.environ.get("VARGEN_KERNELS") == "reference":
        return "VARGEN_KERNELS=reference"
    if "AVX-512 VNNI" not in cpu_instructions():
        return "compiled passes need AVX-512 VNNI, which this CPU does not have"
    if find_spec("numba") is None:
        return "Numba is not installed: pip install vargen[cpu]"
    return _state.failure


def warn_if_slow() -> None:
    """Log a warning if int8 passes run on this CPU, but may take longer than float32 ones."""
    name, reason = explain_int8_passes()
    if name == "operators" and reason.endswith(_SLOW):
        logger.warning("int8 passes run by torch operators: %s", reason)


def explain_int8_passes() -> tuple[str, str]:
    """Return how int8 passes run on this CPU, `"compiled"` or `"operators"`, and the reason."""
    slow = "" if set(BYTE_PRODUCTS) & set(cpu_instructions()) else _SLOW
    if reason := find_compiled_blocker():
        return "operators", reason + slow
    if _state.module is None and not _stamp(_code_folder()).is_file():
        return "compiled", "once they are built, which the first image starts"
    return "compiled", "this CPU has AVX-512 VNNI, and Numba is installed"


class _State:
    """What this process knows of the compiled passes: the module once loaded, the process or thread that builds it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.module: ModuleType | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.thread: threading.Thread | None = None
        self.failure: str | None = None


_state = _State()


def load_compiled_passes(wait: bool | None = None) -> Any:
    """Return the module `vargen.kernels.cpu_pass`, compiled; None where it cannot run, and while it is being built.

    Args:
        wait: build it now instead of beside this process. Default: whether VARGEN_KERNELS is `cpu`.

    Raises:
        ValueError: if VARGEN_KERNELS is `cpu`, and compiled passes cannot run here.
    """
    required = os.environ.get("VARGEN_KERNELS") == "cpu"
    if (reason := find_compiled_blocker()) is not None:
        if required:
            raise ValueError(f"VARGEN_KERNELS=cpu needs compiled passes: {reason}")
        return None
    with _state.lock:
        if _state.module is None:
            _build(_code_folder(), required if wait is None else wait)
        return _state.module


def loaded_passes() -> Any:
    """Return the module that `load_compiled_passes` has loaded in this process, or None; starts nothing."""
    return None if os.environ.get("VARGEN_KERNELS") == "reference" else _state.module


def _build(folder: Path, wait: bool) -> None:
    """Load the compiled code if it is there, or start to build it."""
    if _stamp(folder).is_file():
        _state.module = load_code(folder)
        return
    if _state.process is None and _state.thread is None:
        kept = _is_writable(folder)
        where = f"in {folder}" if kept else f"for this process only, because {folder} cannot be written"
        logger.warning("compiling int8 passes for this CPU, which takes a few seconds, once: %s", where)
        if not kept:
            _state.thread = threading.Thread(target=_build_here, daemon=True)
            _state.thread.start()
        else:
            command = [sys.executable, "-m", "vargen.kernels.cpu_build", str(folder), str(_stamp(folder))]
            _state.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
    if _state.thread is not None:
        if wait:
            _state.thread.join()
        return
    process = _state.process
    assert process is not None
    if wait:
        process.wait()
    if process.poll() is None:
        return
    if _stamp(folder).is_file():
        _state.module = load_code(folder)
    else:
        message = process.stderr.read().decode(errors="replace").strip().splitlines() if process.stderr else []
        _fail(message[-1] if message else f"exit status {process.returncode}")


def _build_here() -> None:
    try:
        _state.module = load_code(None)
    except Exception as error:  # whatever a compiler raises, operators still serve
        _fail(str(error))


def _fail(message: str) -> None:
    _state.failure = f"compiling them failed ({message})"
    logger.warning("int8 passes run by torch operators: %s", _state.failure)


def load_code(folder: Path | None) -> ModuleType:
    """Import the passes, whose code is in a folder or, for None, compiled now; returns after the first call of each."""
    from numba import config

    before = config.CACHE_DIR, config.OPT
    config.CACHE_DIR = "" if folder is None else str(folder)
    config.OPT = type(config.OPT)(1)  # higher levels compile for longer, and the code is not faster
    try:
        from vargen.kernels import cpu_build, cpu_pass

        cpu_build.call_once(cpu_pass)
    finally:
        config.CACHE_DIR, config.OPT = before
    return cpu_pass


def _code_folder() -> Path:
    """Folder of the code that the present sources, Numba and Python compile to. Numba keeps one version per CPU in it."""
    digest = hashlib.sha256(f"{installed_version('numba')} {installed_version('llvmlite')} {sys.version}".encode())
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    parent = Path(os.environ.get(_FOLDER_ENV) or cache_folder() / "compiled")
    return parent / f"vargen-{digest.hexdigest()[:16]}"


def _stamp(folder: Path) -> Path:
    """File that marks the code for this CPU as complete."""
    cpu = hashlib.sha256(" ".join((platform.machine(), *cpu_instructions())).encode())
    return folder / f"complete-{cpu.hexdigest()[:12]}"


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
