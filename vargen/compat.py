"""What other packages make necessary: the torchvision guard, shadowed names, version probes."""

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from threading import Lock
from typing import Any, TypeVar

logger = logging.getLogger("vargen")

_F = TypeVar("_F", bound=Callable[..., Any])

_guard_lock = Lock()
tokenizer_lock = Lock()  # of all tokenizers, for their every use; see `tokenized`
# A torch.library.Library takes its operators with it when it is collected: keep it as long as the process.
_declared: list[Any] = []

_OPERATOR_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None if it is not installed. Imports nothing of it."""
    from importlib.metadata import PackageNotFoundError, version  # costs more than the rest of this module

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_matplotlib(purpose: str) -> None:
    """Say before hours of work, not after them, that a plot cannot be drawn. Imports nothing of matplotlib.

    Args:
        purpose: begins the message, such as "--plot needs".

    Raises:
        ImportError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"{purpose} matplotlib: pip install matplotlib")


def ensure_torchvision() -> bool:
    """Make torchvision importable, and with it transformers' and diffusers' classes, which import it.

    The torchvision wheel in the public index is built for CUDA. Over a CPU-only torch its binary does not
    load, and the import dies on `operator torchvision::nms does not exist`. Only then are the two operators
    that it misses declared (without a kernel: calling them still fails) and the import is repeated. Declaring
    them earlier would clash with a binary that does load. Call this before importing vision classes of
    transformers, or anything of diffusers. It may be called any number of times.

    Returns:
        Whether torchvision can be used; False if it is not installed.

    Raises:
        RuntimeError: torchvision is installed and fails for another reason, or still fails after the repair.
        ImportError: torchvision is installed and misses something else that it needs.
    """
    with _guard_lock:
        try:
            importlib.import_module("torchvision")
            return True
        except ModuleNotFoundError as error:
            if error.name != "torchvision":
                raise
            return False
        except RuntimeError as error:
            if "torchvision::" not in str(error):
                raise
            reason = str(error)
        # Out of the except clause, so that a second failure does not read as a failure of the handler.
        _drop_modules("torchvision")
        _declare_operators()
        importlib.import_module("torchvision")
        logger.info(
            "torchvision's compiled operators do not load with this torch (%s); "
            "its transforms and models work, its compiled operators (nms, image decoding) do not",
            reason,
        )
        return True


def lend_moved_functions() -> None:
    """Put functions of transformers where image-reward 1.5 imports them from. Releases from 4.56 have them elsewhere."""
    from transformers import modeling_utils, pytorch_utils

    for name in ("apply_chunking_to_forward", "find_pruneable_heads_and_indices", "prune_linear_layer"):
        if not hasattr(modeling_utils, name) and hasattr(pytorch_utils, name):
            setattr(modeling_utils, name, getattr(pytorch_utils, name))


def _declare_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + _OPERATOR_SCHEMA)
    _declared.append(library)


def _drop_modules(package: str) -> None:
    """Forget a half-loaded package: a failed import leaves its finished submodules behind."""
    for name in [n for n in sys.modules if n == package or n.startswith(package + ".")]:
        del sys.modules[name]


def defer_to_installed_package(name: str, folder: str) -> None:
    """Give a top-level name that a folder of this repository shadows back to the distribution it belongs to.

    With the repository root first on sys.path (`python app.py`, `python -m pytest`), `import kernels` by
    another library would find our folder. The folder's `__init__` calls this when it is imported under such
    a bare name: the package of that name further down the path takes its place in sys.modules.

    Where there is none, the import passes and gives an empty package without submodules or version. It must
    not fail: transformers 5 imports what it finds under a name to learn its version, and takes "none" for
    "not available", but lets an error through.

    Args:
        name: the bare name being imported, for example "kernels".
        folder: the folder that was found under it.
    """
    spec = _find_beside(name, folder)
    if spec is None or spec.loader is None:
        sys.modules[name].__path__ = []  # our modules are never importable twice, under two names
        return
    module = importlib.util.module_from_spec(spec)
    # The import system returns what stands in sys.modules when the folder's own __init__ has run.
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _find_beside(name: str, folder: str) -> ModuleSpec | None:
    root = os.path.realpath(os.path.dirname(folder))
    path = [entry for entry in sys.path if os.path.realpath(entry or os.getcwd()) != root]
    for finder in sys.meta_path:
        # The others (built-in, frozen, those of editable installs) do not look at sys.path.
        spec = finder.find_spec(name, path if finder is PathFinder else None, None)
        if spec is not None and spec.loader is not None:
            return spec
    return None


def tokenized(tokenizer: Any, texts: Any, **options: Any) -> Any:
    """What a tokenizer of transformers makes of texts; from several threads, one after the other.

    A fast tokenizer keeps truncation and padding in itself, sets them at each call, and raises "Already borrowed" if another
    thread reads them.
    """
    with tokenizer_lock:
        return tokenizer(texts, **options)


def drop_empty_notices() -> None:
    """Drop what diffusers 0.39 logs when a network is cast of which no module has to stay in float32: a list of none."""
    logger = logging.getLogger("diffusers.models.modeling_utils")
    if _names_modules not in logger.filters:
        logger.addFilter(_names_modules)


def _names_modules(record: logging.LogRecord) -> bool:
    return "kept in float32: []" not in record.getMessage()


def without_autocast(function: _F) -> _F:
    """A decorator: run in the dtypes of the weights, whatever `torch.autocast` surrounds the call.

    Networks here choose their own dtypes; with autocast on top, what a cache holds and what is written to it would differ.
    """

    @functools.wraps(function)
    def plain(*args: Any, **options: Any) -> Any:
        import torch

        with contextlib.ExitStack() as stack:
            for kind in ("cpu", "cuda", "mps", "xpu"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **options)

    return plain  # type: ignore[return-value]
