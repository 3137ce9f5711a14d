"""Compiled code for a CPU, which Numba makes in seconds, in another process, once for all processes of a user.

It is kept in the cache folder; the first image waits for it. Where it cannot be compiled, torch operators run: with the same
bits in next-token models, but in next-scale models they round differently. Where nothing can be written, each process compiles
it in a thread.

`python -m vargen.kernels.int8.load FOLDER FILE FUNCTION...` compiles passes to a folder, and marks them by a file as complete.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from vargen.compat import cache_folder, installed_version
from vargen.kernels.int8.instructions import cpu_instructions, instruction_set

logger = logging.getLogger("vargen")


def find_compiled_blocker() -> str | None:
    """Return the reason why compiled passes cannot run here; None if they can, once they are built."""
    if os.environ.get("VARGEN_KERNELS") == "reference":
        return "VARGEN_KERNELS=reference"
    instruction_set()  # raises for a wrong VARGEN_CPU
    if find_spec("numba") is None:
        return "Numba is not installed: pip install numba"
    return None


_SLOW = "; torch's operators for 8 bits are slow, so float32 may be faster"
_BYTE_OPERATORS = ("AVX-512 VNNI", "AVX-VNNI", "AMX int8", "Arm dot product")  # which torch's operators use
_loading = threading.Lock()  # Numba's settings are those of the process


class CompiledCode:
    """The passes of a kind of network and the sampling steps beside them.

    Args:
        name: part of messages.
        functions: names of those of `vargen.kernels.int8.passes` that are compiled.
    """

    steps: ClassVar[Any] = None  # the module `vargen.kernels.int8.sample`, if this process's last `load` found compiled code

    def __init__(self, name: str, *functions: str) -> None:
        self.name, self.functions = name, functions
        self.failure: str | None = None  # why it could not be compiled
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loaded: list[ModuleType] = []

    def load(self, wait: bool = True) -> Any:
        """Return the module of the passes; None where it cannot run, which is a ValueError if VARGEN_KERNELS is `cpu`.

        Args:
            wait: for the compiler; otherwise, None is returned while it works.
        """
        required = os.environ.get("VARGEN_KERNELS") == "cpu"
        reason = find_compiled_blocker() or self._start(wait)
        if reason is not None:
            CompiledCode.steps = None
            if required:
                raise ValueError(f"VARGEN_KERNELS=cpu needs compiled {self.name}: {reason}")
        if reason is not None or not self._loaded:
            return None
        passes, CompiledCode.steps = self._loaded
        return passes

    def is_built(self) -> bool:
        """Whether the code is loaded, or is in the cache folder."""
        return bool(self._loaded) or self._stamp().is_file()

    def _start(self, wait: bool) -> str | None:
        """Load the code if it is there, or start to compile it; return why that failed, if it did."""
        with self._lock:
            if self._loaded or self.failure is not None:
                return self.failure
            folder = self._stamp().parent
            if self._thread is None and not ((kept := _is_writable(folder)) and self.is_built()):  # Numba reads no others
                where = f"in {folder}" if kept else f"for this process only, because {folder} cannot be written"
                logger.warning("compiling %s for this CPU, which takes a few seconds, once: %s", self.name, where)
                work = self._run_compiler if kept else self._load
                self._thread = threading.Thread(target=self._try, args=(work,), daemon=True)
                self._thread.start()
            if self._thread is not None:
                self._thread.join(None if wait else 0)
                if self._thread.is_alive():
                    return None
            if not self._loaded and self.failure is None:
                self._try(partial(self._load, folder))
            return self.failure

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # whatever a compiler raises, operators still serve
            self.failure = f"compiling them failed ({error})"
            logger.warning("%s run by torch operators: %s", self.name, self.failure)

    def _run_compiler(self) -> None:
        """Compile to the folder in another process: a thread would take turns with the operators."""
        stamp = self._stamp()
        command = [sys.executable, "-m", __name__, str(stamp.parent), str(stamp), *self.functions]
        environment = {**os.environ, "VARGEN_CPU": instruction_set()}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environment)
        if done.returncode:
            message = done.stderr.decode(errors="replace").strip().splitlines()
            raise RuntimeError(message[-1] if message else f"exit status {done.returncode}")

    def _load(self, folder: Path | None = None) -> None:
        self._loaded = load_modules(self.functions, folder)

    def _stamp(self) -> Path:
        """File that marks the code as complete."""
        return _code_folder() / f"complete-{self.functions[0]}"


TOKEN_PASS = CompiledCode("int8 passes", "run_token_pass", "move_slots", "help_pass")  # of next-token transformers
LANGUAGE_PASS = CompiledCode("int8 passes of language models", "run_language_pass", "run_linear", "move_slots", "help_pass")
SCALE_PASS = CompiledCode("next-scale int8 passes", "run_scale_pass", "help_pass")


def warn_if_slow() -> None:
    """Log a warning if int8 passes run on this CPU, but may take longer than float32 ones."""
    name, reason = explain_int8_passes()
    if name == "operators" and reason.endswith(_SLOW):
        logger.warning("int8 passes run by torch operators: %s", reason)


def explain_int8_passes() -> tuple[str, str]:
    """Return how int8 passes run on this CPU, `"compiled"` or `"operators"`, and the reason."""
    slow = "" if set(_BYTE_OPERATORS) & set(cpu_instructions()) else _SLOW
    if reason := find_compiled_blocker() or TOKEN_PASS.failure:
        return "operators", reason + slow
    if not TOKEN_PASS.is_built():
        return "compiled", "once they are built, which the first image waits for"
    return "compiled", f"by {instruction_set()} instructions"


def load_modules(names: Sequence[str], folder: Path | None) -> list[ModuleType]:
    """Import the passes and the steps beside them, and compile all of the steps and some functions of the passes.

    Args:
        folder: from which they are loaded if they are there, and where they are kept; None: they are compiled and not kept.
    """
    from numba import config

    with _loading:
        before = config.CACHE_DIR, config.OPT
        config.CACHE_DIR = "" if folder is None else str(folder)
        config.OPT = type(config.OPT)(1)  # higher levels compile for longer, and the code is not faster
        try:
            passes, steps = modules = [import_module(f"{__package__}.{name}") for name in ("passes", "sample")]
            beside = [each for each in vars(steps).values() if hasattr(each, "argument_types")]
            for function in [*(getattr(passes, name) for name in names), *beside]:
                if folder is not None:
                    function.enable_caching()
                function.compile(function.argument_types)
            return modules
        finally:
            config.CACHE_DIR, config.OPT = before


def _code_folder() -> Path:
    """Folder of the code that the present sources, Numba and Python compile to on this CPU.

    Numba would miss changes of a function's callees: it looks at the place, time and size of one source file only.
    """
    versions = installed_version("numba"), installed_version("llvmlite"), sys.version, platform.machine(), cpu_instructions()
    digest = hashlib.sha256(repr((*versions, instruction_set())).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(f"{source} {source.stat().st_mtime_ns}".encode() + source.read_bytes())
    parent = Path(os.environ.get("NUMBA_CACHE_DIR") or cache_folder() / "compiled")
    return parent / f"vargen-{digest.hexdigest()[:16]}"


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    gc.disable()  # the compiler makes millions of objects, of which few can be freed
    load_modules(sys.argv[3:], Path(sys.argv[1]))
    Path(sys.argv[2]).touch()
