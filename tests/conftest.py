"""What every test needs: no network, caches of its own, one torch thread per xdist worker.

The variables are set here, before a test module imports torch or huggingface_hub, which read them once; the
subprocesses that tests start inherit them.
"""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_caches = tempfile.TemporaryDirectory(prefix="vargen-tests-")

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    GRADIO_ANALYTICS_ENABLED="False",
    VARGEN_CACHE=f"{_caches.name}/vargen",
    HF_HOME=f"{_caches.name}/hf",
    TRITON_CACHE_DIR=f"{_caches.name}/triton",
    TORCHINDUCTOR_CACHE_DIR=f"{_caches.name}/inductor",
    GRADIO_TEMP_DIR=f"{_caches.name}/gradio",
)
# Code of compiled passes, which takes seconds to build, is kept from run to run; its folder is named after its sources.
os.environ.setdefault("NUMBA_CACHE_DIR", f"{tempfile.gettempdir()}/vargen-tests-numba-{os.getuid()}")
if not Path("/dev/nvidiactl").exists():
    # No NVIDIA GPU: Triton interprets its kernels in NumPy. It reads this when it is imported, which any library may do.
    os.environ["TRITON_INTERPRET"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    # Several workers with a thread pool each fight for the cores: far slower than one thread each.
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")


# Tests that meet packages with a version of their own in each set of packages: the other sets run these only. torch is the same
# in all sets, so that what needs only torch and NumPy is tested once, as is the quality of the packaged weights.
PACKAGE_TESTS = (
    "cli",
    "convert",
    "demo",
    "eval",
    "in_place",
    "models/test_compact.py",
    "models/test_networks.py",
    "models/test_text_encoder.py",
    "models/test_token_models.py",
    "models/test_trained_drafters.py",
    "models/test_video_decoders.py",
    "models/test_weights.py",
    "pipelines",
    "scoring",
    "serving",
    "test_reading.py",
    "training/test_heads.py",
)


# Calls of pipelines whose results depend on torch alone.
TORCH_TESTS = (
    "pipelines/test_accelerators.py",
    "pipelines/test_ambient_state.py",
    "pipelines/test_best_of.py",
    "pipelines/test_captured_scales.py",
    "pipelines/test_kept_engines.py",
    "pipelines/test_language_model_results.py",
    "pipelines/test_masks.py",
    "pipelines/test_recorded_results.py",
    "pipelines/test_recorded_scales.py",
    "pipelines/test_recorded_video.py",
    "pipelines/test_small_grids.py",
    "pipelines/test_start_images.py",
    "pipelines/test_threads.py",
    "pipelines/test_var_scales.py",
    "pipelines/test_video_results.py",
)


# What takes long for what it is: training, the quality of the packaged weights, whole processes, and pages in a browser.
EXTENDED_TESTS = (
    "assets",
    "benchmarks/test_gpu.py",
    "demo/test_app.py",
    "demo/test_browser.py",
    "recipes",
    "serving/test_soak.py",
    "test_compat.py",
    "training/test_heads.py",
    "training/test_router.py",
)
# Of these, the other sets of packages run only the following.
EXTENDED_ON_ALL_SETS = ("demo/test_browser.py", "test_compat.py", "training/test_heads.py")
# Files with tests that wait for other processes for long, or take longest: they begin, so that others run beside them.
LONGEST = (
    "eval/test_ray_backend.py",
    "demo/test_app.py",
    "decoding/test_exactness.py",
    "serving/test_soak.py",
    "recipes/test_scripts.py",
    "benchmarks/test_gpu.py",
    "eval/test_generation.py",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    folder = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(folder)
        names = {path.as_posix(), path.parts[0]}
        is_extended = bool(names.intersection(EXTENDED_TESTS))
        if is_extended:
            item.add_marker(pytest.mark.extended)
        if names.intersection(EXTENDED_ON_ALL_SETS if is_extended else PACKAGE_TESTS) and not names.intersection(TORCH_TESTS):
            item.add_marker(pytest.mark.packages)
    yield  # -m leaves tests out
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    first: list[list[pytest.Item]] = [[] for _ in range(workers)]
    rest = []
    for item in items:
        path = item.path.relative_to(folder).as_posix()
        (first[LONGEST.index(path) % workers] if path in LONGEST else rest).append(item)
    for each in first:
        each.sort(key=lambda item: LONGEST.index(item.path.relative_to(folder).as_posix()))
    # xdist gives each worker a run of items of the same length; what is long begins each.
    total, items[:] = len(items), []
    for number, each in enumerate(first, 1):
        while rest and len(items) + len(each) < total * number // workers:
            each.append(rest.pop(0))
        items += each
    items += rest


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections leave this machine for no test; loopback and Unix sockets stay open."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"tests have no network: connection to {address!r} refused")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def video_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A video model of random weights, which tests leave as it is."""
    from tiny_video_folder import video_folder

    return video_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def text_pipe() -> Any:
    from tiny_models import text_pipeline

    return text_pipeline()


@pytest.fixture(scope="session")
def class_pipe() -> Any:
    from tiny_models import class_pipeline

    return class_pipeline()


@pytest.fixture(scope="session")
def scale_pipe() -> Any:
    from tiny_models import class_var_pipeline

    return class_var_pipeline()
