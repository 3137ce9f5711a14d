"""Two actors generate and measure what one process does, bit for bit; losing an actor or a process loses nothing."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_runs import check_killed_command
from PIL import Image
from tiny_models import class_pipeline

from vargen.compat import installed_version
from vargen.eval.measurement import MetricModels, measure_images
from vargen.eval.ray import ray_backend
from vargen.eval.run import GenerationPlan, ImageFile, list_images, run_locally
from vargen.ray_cluster import SETTINGS, join_or_start_cluster

psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.slow

PARTS = """
import os, signal
from contextlib import suppress
from pathlib import Path

class Worker:
    "Records its process, which kills itself at the first unit of all."
    def __init__(self, argument):
        self.argument, self.record = argument, Path(os.environ["ACTORS"])
    def __call__(self, unit):
        with open(self.record, "a") as file:
            file.write(f"{os.getpid()}\\n")
        with suppress(FileExistsError):
            self.record.with_suffix(".killed").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.argument, unit

def level(images, prompts):
    from vargen.scoring.protocol import to_tensor
    return to_tensor(images).mean((1, 2, 3))

def net():
    import torch
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-class"
    class_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ray's files in a folder of their own; yields one whose module `ray_parts` Ray's processes import."""
    if installed_version("ray") is None:
        pytest.skip("ray, an extra, is not installed")
    parts = tmp_path_factory.mktemp("parts")
    (parts / "ray_parts.py").write_text(PARTS)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as own:
        patch.setenv("ACTORS", str(parts / "actors.txt"))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(parts), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_TMPDIR", own)  # short: names of sockets have at most 107 bytes
        patch.syspath_prepend(str(parts))
        yield parts
    sys.modules.pop("ray_parts", None)


@pytest.fixture
def joined(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cluster that this process has joined, which the backend takes and leaves."""
    import ray

    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    join_or_start_cluster(2)
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray has installed its own
    yield cluster
    ray.shutdown()


def runs(process: Any) -> bool:
    """Whether a process still runs; what has ended and waits for its parent (a zombie) does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def outliving(processes: list[Any]) -> list[Any]:
    """Those that still run after three minutes, which are killed: agents of Ray whose cluster is gone wait for a while."""
    deadline = time.monotonic() + 600
    while any(map(runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    alive = [process for process in processes if runs(process)]
    for process in alive:
        process.kill()
    return alive


def test_two_actors_measure_what_one_process_does(cluster: Path, tmp_path: Path) -> None:
    for i in range(4):
        Image.effect_noise((16, 16), 50).convert("RGB").save(tmp_path / f"{i}.png")
    files = list_images(tmp_path, ["a"] * 4) * 40
    files = [ImageFile(i, p.file, p.text, p.sha256) for i, p in enumerate(files)]
    models = MetricModels(("ray_parts:level",), "ray_parts:net", threads=1)
    backends = run_locally, ray_backend(2, "cpu", 1)
    here, there = (measure_images({"g": files}, models, None, backend)["g"] for backend in backends)
    assert here.columns.keys() == there.columns.keys() == {"ray_parts:level", "extractor"}
    for name, columns in here.columns.items():
        assert all(torch.equal(there.columns[name][key], value) for key, value in columns.items())
    rays = [process for process in psutil.process_iter(["cmdline"]) if os.environ["RAY_TMPDIR"] in str(process.info["cmdline"])]
    assert not outliving(rays), "Ray's processes remain"


def test_a_killed_command_leaves_no_process_and_is_resumed(model: Path, cluster: Path, tmp_path: Path) -> None:
    plan = GenerationPlan(str(model), str(tmp_path / "killed"), ("ar",), tuple(range(10)), num=40, batch=2, threads=1)
    cluster_of_it = check_killed_command(
        plan, "--backend", "ray", "--num-workers", "1", before_kill=lambda pid: psutil.Process(pid).children(recursive=True)
    )
    assert cluster_of_it and not outliving(cluster_of_it), "Ray's processes outlive the one that asked for them"


def test_actors_keep_the_type_of_errors_and_a_killed_one_is_replaced(joined: Path) -> None:
    """The only actor is killed at its first unit."""
    import ray

    with pytest.raises(TypeError, match="not callable"):
        list(ray_backend(2, "cpu", 1)(int, "7", [None]))
    found = list(ray_backend(1, "cpu", 1)(import_module("ray_parts").Worker, "given", list(range(6))))
    assert sorted(found) == [("given", unit) for unit in range(6)], "in any order, each once"
    assert len(set((joined / "actors.txt").read_text().split())) == 2, "no actor was killed and replaced"
    assert ray.is_initialized(), "the cluster that this process joined is left as it is"
