"""Two actors generate and measure what one process does, bit for bit; losing an actor or the driver loses nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import class_pipeline

from vargen.compat import installed_version
from vargen.evaluation.generation import GenerationPlan, generate_images, run_locally
from vargen.evaluation.image_files import ImageFile, UnreadableImageError, list_images
from vargen.evaluation.measurement import MetricModels, measure_images
from vargen.evaluation.ray_backend import ray_backend
from vargen.evaluation.run_directory import read_manifest

psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.slow
METHODS = ("ar", "gsd:budget=3,window=4")

PARTS = """
import os, time, torch
from vargen.evaluation.generation import ImageGenerator

class SlowGenerator(ImageGenerator):
    "Says which process it is in; takes long enough to be killed while it works."
    def __call__(self, unit):
        with open(os.environ["ACTORS"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(0.4)
        return super().__call__(unit)

def level(images, prompts):
    from vargen.scoring.protocol import to_tensor
    return to_tensor(images).mean((1, 2, 3))

def net():
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


def make_plan(model: Path, output: Path, num: int = 14) -> GenerationPlan:
    return GenerationPlan(str(model), str(output), METHODS, tuple(range(10)), num=num, batch=2, threads=1)


def images(output: Path) -> dict[str, bytes]:
    return {str(file.relative_to(output)): file.read_bytes() for file in sorted(output.glob("images/**/*.png"))}


def lines(output: Path) -> list[tuple[str, int]]:
    return [(r["method"], r["index"]) for file in output.glob("manifest/*.jsonl") for r in read_manifest(file)]


def runs(process: Any) -> bool:
    """Whether a process still runs; what has ended and waits for its parent (a zombie) does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def outliving(processes: list[Any]) -> list[Any]:
    """Those that still run after a minute, which are killed."""
    deadline = time.monotonic() + 60
    while any(map(runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    alive = [process for process in processes if runs(process)]
    for process in alive:
        process.kill()
    return alive


def test_two_actors_draw_and_measure_what_one_process_does(model: Path, cluster: Path, tmp_path: Path) -> None:
    assert generate_images(make_plan(model, tmp_path / "one")) == 28
    assert generate_images(make_plan(model, tmp_path / "two"), backend=ray_backend(2, "cpu", 1)) == 28
    assert images(tmp_path / "one") == images(tmp_path / "two")
    assert len(lines(tmp_path / "two")) == len(set(lines(tmp_path / "two"))) == 28
    pictures = list_images(tmp_path / "one/images", ["a"] * 28) * 6
    pictures = [ImageFile(i, p.file, p.text, p.sha256) for i, p in enumerate(pictures)]
    parts = MetricModels(("ray_parts:level",), "ray_parts:net", threads=1)
    backends = run_locally, ray_backend(2, "cpu", 1)
    here, there = (measure_images({"g": pictures}, parts, None, backend)["g"] for backend in backends)
    assert here.columns.keys() == there.columns.keys() == {"ray_parts:level", "extractor"}
    for name, columns in here.columns.items():
        assert all(torch.equal(there.columns[name][key], value) for key, value in columns.items())
    Path(pictures[70].file).write_bytes(b"")
    loaded = "ray" in sys.modules
    with pytest.raises(UnreadableImageError, match=Path(pictures[70].file).name):  # as here, in its own words
        measure_images({"g": pictures}, parts, None, ray_backend(2, "cpu", 1))
    rays = [process for process in psutil.process_iter(["cmdline"]) if os.environ["RAY_TMPDIR"] in str(process.info["cmdline"])]
    assert not outliving(rays) and ("ray" in sys.modules) == loaded, "Ray stays in the process that asked, or beside it"


def is_actor(pid: int) -> bool:
    """Whether a process is still one of Ray's workers: after its end the number may be anyone's."""
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def slowly(engine: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    parts = import_module("ray_parts")
    return lambda _, argument, units: engine(parts.SlowGenerator, argument, units)


def test_a_killed_actor_is_replaced_and_nothing_is_lost_or_twice(model: Path, cluster: Path, tmp_path: Path) -> None:
    record = cluster / "actors.txt"
    record.unlink(missing_ok=True)
    killed: list[int] = []

    def kill_one() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            written = record.read_text() if record.exists() else ""
            pids = written[: written.rfind("\n") + 1].split()  # of whole lines: half a number is another process
            if len(pids) >= 5 and is_actor(int(pids[-1])):
                killed.append(int(pids[-1]))
                os.kill(killed[0], signal.SIGKILL)
                return
            time.sleep(0.02)

    killer = threading.Thread(target=kill_one)
    killer.start()
    assert generate_images(make_plan(model, tmp_path / "killed"), backend=slowly(ray_backend(2, "cpu", 1))) == 28
    killer.join()
    assert killed and len(set(record.read_text().split())) >= 3, "no actor was killed and replaced"
    generate_images(make_plan(model, tmp_path / "whole"))
    assert images(tmp_path / "killed") == images(tmp_path / "whole")
    assert len(lines(tmp_path / "killed")) == len(set(lines(tmp_path / "killed"))) == 28


def test_the_end_of_rays_process_is_an_error_and_what_came_back_is_kept(model: Path, cluster: Path, tmp_path: Path) -> None:

    def stumbling(*work: Any) -> Iterator[Any]:
        results = slowly(ray_backend(2, "cpu", 1))(*work)
        yield next(results)
        (driver,) = (p for p in psutil.Process().children() if "ray_backend" in " ".join(p.cmdline()))
        of_it.extend(driver.children(recursive=True))
        driver.kill()
        yield from results

    of_it: list[Any] = []
    with pytest.raises(RuntimeError, match="exit status -9; what came back is kept: run the same again"):
        generate_images(make_plan(model, tmp_path / "killed"), backend=stumbling)
    assert not outliving(of_it), "Ray's processes outlive the one that began them"
    before = lines(tmp_path / "killed")
    assert before
    assert generate_images(make_plan(model, tmp_path / "killed")) == 28 - len(before)
    generate_images(make_plan(model, tmp_path / "whole"))
    assert images(tmp_path / "killed") == images(tmp_path / "whole")


def test_a_killed_driver_goes_on(model: Path, cluster: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", "from vargen.cli.main import main; main()", "eval", "--generate-only", "--model", str(model)]
    words += ["--num-images", "60", "--batch-size", "2", "--threads", "1", "--methods", "ar,sjd"]
    words += ["--backend", "ray", "--num-workers", "2", "-o"]
    process = subprocess.Popen([*words, str(tmp_path / "killed")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while process.poll() is None and len(lines(tmp_path / "killed")) < 8 and time.monotonic() < deadline:
        time.sleep(0.02)
    cluster_of_it = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not outliving(cluster_of_it), "Ray's processes outlive the one that asked for them"
    before = lines(tmp_path / "killed")
    assert 8 <= len(before) < 120, "the kill came too late or too early to show anything"
    subprocess.run([*words, str(tmp_path / "killed")], check=True, capture_output=True)
    plan = GenerationPlan(str(model), str(tmp_path / "whole"), ("ar", "sjd"), tuple(range(10)), num=60, batch=2, threads=1)
    generate_images(plan)
    assert images(tmp_path / "killed") == images(tmp_path / "whole") and len(images(tmp_path / "whole")) == 120
    after = lines(tmp_path / "killed")
    assert after[: len(before)] == before and len(after) == len(set(after)) == 120
