"""Compatibility with other packages: the torchvision guard, shadowed package names, version probes."""

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from vargen.values import one_line

logger = logging.getLogger("vargen")

_F = TypeVar("_F", bound=Callable[..., Any])

tokenizer_lock = Lock()  # shared by all tokenizers and held for every use of one; see `tokenized`
# Operators are unregistered when their torch.library.Library is collected.
_declared: list[Any] = []


def cache_folder() -> Path:
    """Return the folder of downloads, data sets and measurements: `$VARGEN_CACHE`, or `~/.cache/vargen`."""
    return Path(os.environ.get("VARGEN_CACHE") or Path.home() / ".cache" / "vargen")


@functools.cache
def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, without importing it; None without one."""
    from importlib.metadata import PackageNotFoundError, version  # importing it takes longer than the rest of this module

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def ensure_torchvision() -> bool:
    """Make torchvision importable, and with it what imports it; return whether it is installed.

    The torchvision wheel on PyPI is built for CUDA. With a CPU-only torch its binary does not load, and the import fails with
    `operator torchvision::nms does not exist`. Only then are the two missing operators declared, without a kernel, so that
    calling them still fails, and the import is repeated. Declaring them earlier would clash with a binary that does load.
    Nothing is imported by this function, which `import vargen` calls, and which may be called again.
    """
    if _guard not in sys.meta_path:
        sys.meta_path.insert(0, _guard)
    return importlib.util.find_spec("torchvision") is not None


class _TorchvisionGuard(MetaPathFinder):
    """Finds torchvision as usual, for a loader that repeats its import."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "torchvision" else None
        if spec is not None and spec.loader is not None:
            once = spec.loader.exec_module
            spec.loader.exec_module = lambda module: _import_twice(once, module)  # type: ignore[method-assign]
        return spec


def _import_twice(once: Callable[[Any], None], module: Any) -> None:
    try:
        return once(module)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        reason = str(error)
    # Outside the except clause, so that a second failure is not reported as raised while handling the first.
    for name in [each for each in sys.modules if each.startswith("torchvision.")]:  # submodules that did load
        del sys.modules[name]
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
    once(module)
    logger.info("torchvision's compiled operators (nms, image decoding) do not load with this torch (%s)", reason)


_guard = _TorchvisionGuard()


def import_torch_fidelity(module: str) -> Any:
    """Import a module of torch-fidelity, which computes metrics of images."""
    if not ensure_torchvision() or importlib.util.find_spec("torch_fidelity") is None:
        raise ImportError('torch-fidelity is not installed: pip install "vargen[eval]"')
    return importlib.import_module(f"torch_fidelity.{module}")


def defer_to_installed_package(name: str, folder: str) -> None:
    """Return a top-level name that a folder of this repository shadows to the installed distribution of that name.

    With the repository root first on sys.path (`python app.py`, `python -m pytest`), `import kernels` in another
    library would find our folder. The folder's `__init__` calls this function when it is imported under such a
    bare name, and the package of that name further down the path replaces it in sys.modules.

    If there is no such package, the import yields an empty package. It must not fail: transformers 5 imports whatever it
    finds under a name to read its version, and does not catch an error.
    """
    root = os.path.realpath(os.path.dirname(folder))
    spec = PathFinder.find_spec(name, [place for place in sys.path if os.path.realpath(place or os.getcwd()) != root])
    sys.modules[name].__path__ = []  # prevents importing our modules a second time under other names
    if spec is not None and spec.loader is not None:
        # The import system returns the entry in sys.modules after the folder's own __init__ has run.
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def tokenized(tokenizer: Any, texts: Any, **options: Any) -> Any:
    """Call a transformers tokenizer, one thread at a time: truncation and padding are its own state."""
    with tokenizer_lock, report_panics("prompt cannot be read by this model's tokenizer, which is damaged"):
        return tokenizer(texts, **options)


@contextlib.contextmanager
def report_panics(message: str, *others: type[Exception]) -> Iterator[None]:
    """Raise ValueError instead of a panic of the library `tokenizers` and of the `others`."""
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        # A panic of Rust is no Exception, and can only be known by the name of its class.
        if not isinstance(error, others) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{message}: {one_line(error)}") from error


def drop_empty_notices() -> None:
    """Filter out the message of diffusers 0.39 that no module has to stay in float32 in a cast."""
    logger = logging.getLogger("diffusers.models.modeling_utils")
    if _names_modules not in logger.filters:
        logger.addFilter(_names_modules)


def _names_modules(record: logging.LogRecord) -> bool:
    return "kept in float32: []" not in record.getMessage()


def without_autocast(function: _F) -> _F:
    """Decorator: run in the dtypes of the weights, whatever `torch.autocast` or `torch.set_default_device` surrounds the call.

    The networks choose their own dtypes: with autocast on top, new keys and values would differ in dtype from the cache.
    """

    @functools.wraps(function)
    def plain(*args: Any, **options: Any) -> Any:
        import torch

        with contextlib.ExitStack() as stack:
            for kind in ("cpu", "cuda", "mps", "xpu"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if torch.empty(0).device.type != "cpu":  # a fraction of the time of `torch.get_default_device`
                stack.enter_context(torch.device("cpu"))
            return function(*args, **options)

    return plain  # type: ignore[return-value]
