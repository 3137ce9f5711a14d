"""Compiled code for a CPU, which Numba makes in seconds, in another process, once for all processes of a user.

It is kept in the cache folder. Until it is there, torch operators run: with the same bits in next-token models, but in
next-scale models they round differently. Where nothing can be written, it is compiled in a thread of each process.
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
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from vargen.compat import cache_folder, installed_version
from vargen.kernels.int8.cpu import BYTE_PRODUCTS, cpu_instructions, find_compiled_blocker

logger = logging.getLogger("vargen")

_SOURCES = (
    "format", "vector", "steps", "attention", "token_pass", "sample", "scale_pass", "build",
)  # fmt: skip
_FOLDER_ENV = "NUMBA_CACHE_DIR"  # Numba's own variable
_SLOW = "; this CPU has no 8-bit dot products, so float32 may be faster"
_loading = threading.Lock()  # Numba's settings are those of the process


class CompiledCode:
    """A module of functions, built in parts, each in its own process, so that several cores build at once.

    Args:
        name: part of messages.
        parts: names in `vargen.kernels.int8.build.LOADERS`, the longest first.

    Attributes:
        failure: why it could not be built; None if it was, or was not yet.
    """

    def __init__(self, name: str, *parts: str) -> None:
        self.name, self.parts = name, parts
        self.failure: str | None = None
        self._lock = threading.Lock()
        self._module: ModuleType | None = None
        self._current: ModuleType | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._thread: threading.Thread | None = None

    def load(self, wait: bool | None = None) -> Any:
        """Return the module; None where it cannot run, and while it is being built.

        Args:
            wait: build it now instead of beside this process. Default: whether VARGEN_KERNELS is `cpu`.
        """
        required = os.environ.get("VARGEN_KERNELS") == "cpu"
        if (reason := find_compiled_blocker() or self.failure) is not None:
            self._current = None
            if required:
                raise ValueError(f"VARGEN_KERNELS=cpu needs compiled {self.name}: {reason}")
            return None
        with self._lock:
            if self._module is None:
                self._build(required if wait is None else wait)
            self._current = self._module
            return self._module

    def loaded(self) -> Any:
        """Return what the last `load` in this process returned, None before the first; starts nothing."""
        return self._current

    def is_built(self) -> bool:
        """Whether the code is loaded, or is in the cache folder."""
        return self._module is not None or not self._list_missing()

    def _build(self, wait: bool) -> None:
        """Load the code if it is there, or start to build it."""
        folder, missing = _code_folder(), self._list_missing()
        if not missing:
            self._module = load_parts(self.parts, folder)
            return
        if not self._processes and self._thread is None:
            kept = _is_writable(folder)
            where = f"in {folder}" if kept else f"for this process only, because {folder} cannot be written"
            logger.warning("compiling %s for this CPU, which takes a few seconds, once: %s", self.name, where)
            if not kept:
                self._thread = threading.Thread(target=self._build_here, daemon=True)
                self._thread.start()
            else:
                self._processes = [
                    subprocess.Popen(
                        [sys.executable, "-m", "vargen.kernels.int8.build", part, str(folder), str(_stamp(part))],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.PIPE,
                    )
                    for part in missing
                ]
        if self._thread is not None:
            if wait:
                self._thread.join()
            return
        for process in self._processes:
            if wait:
                process.wait()
            if process.poll() is None:
                return
        if not self._list_missing():
            self._module = load_parts(self.parts, folder)
            return
        process = next((each for each in self._processes if each.returncode), self._processes[0])
        message = process.stderr.read().decode(errors="replace").strip().splitlines() if process.stderr else []
        self._fail(message[-1] if message else f"exit status {process.returncode}")

    def _build_here(self) -> None:
        try:
            self._module = load_parts(self.parts, None)
        except Exception as error:  # whatever a compiler raises, operators still serve
            self._fail(str(error))

    def _fail(self, message: str) -> None:
        self.failure = f"compiling them failed ({message})"
        logger.warning("%s run by torch operators: %s", self.name, self.failure)

    def _list_missing(self) -> list[str]:
        return [part for part in self.parts if not _stamp(part).is_file()]


TOKEN_PASS = CompiledCode("int8 passes", "token layers", "token output")  # of next-token transformers
TOKEN_STEPS = CompiledCode("sampling steps", "token steps")  # beside these passes
SCALE_PASS = CompiledCode("next-scale int8 passes", "scale layers", "scale output")


def warn_if_slow() -> None:
    """Log a warning if int8 passes run on this CPU, but may take longer than float32 ones."""
    name, reason = explain_int8_passes()
    if name == "operators" and reason.endswith(_SLOW):
        logger.warning("int8 passes run by torch operators: %s", reason)


def explain_int8_passes() -> tuple[str, str]:
    """Return how int8 passes run on this CPU, `"compiled"` or `"operators"`, and the reason."""
    slow = "" if set(BYTE_PRODUCTS) & set(cpu_instructions()) else _SLOW
    if reason := find_compiled_blocker() or TOKEN_PASS.failure:
        return "operators", reason + slow
    if not TOKEN_PASS.is_built():
        return "compiled", "once they are built, which the first image starts"
    return "compiled", "this CPU has AVX-512 VNNI, and Numba is installed"


def load_parts(parts: Sequence[str], folder: Path | None) -> ModuleType:
    """Import the module of these parts, whose code is in a folder or, for None, compiled now."""
    from numba import config

    with _loading:
        before = config.CACHE_DIR, config.OPT
        config.CACHE_DIR = "" if folder is None else str(folder)
        config.OPT = type(config.OPT)(1)  # higher levels compile for longer, and the code is not faster
        try:
            from vargen.kernels.int8.build import LOADERS

            return [LOADERS[part]() for part in parts][-1]
        finally:
            config.CACHE_DIR, config.OPT = before


def _stamp(part: str) -> Path:
    """File that marks a part for this CPU as complete."""
    cpu = hashlib.sha256(" ".join((part, platform.machine(), *cpu_instructions())).encode())
    return _code_folder() / f"complete-{cpu.hexdigest()[:12]}"


def _code_folder() -> Path:
    """Folder of the code that the present sources, Numba and Python compile to. Numba keeps one version per CPU in it."""
    digest = hashlib.sha256(f"{installed_version('numba')} {installed_version('llvmlite')} {sys.version}".encode())
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    parent = Path(os.environ.get(_FOLDER_ENV) or cache_folder() / "compiled")
    return parent / f"vargen-{digest.hexdigest()[:16]}"


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
