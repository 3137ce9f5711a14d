"""The torchvision guard: it heals exactly one failure, and only after that failure has happened."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vargen.compat import installed_version

_GUARD = "from vargen.compat import ensure_torchvision; assert ensure_torchvision() is True; "

# Fails as the CUDA wheel does over a CPU-only torch: a submodule is loaded, then an operator is missing.
_UNLOADABLE = """
import torch
from torchvision import extension
@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold): ...
@torch.library.register_fake("torchvision::qnms")
def qnms(dets, scores, iou_threshold): ...
"""


def run(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, with folders put before site-packages."""
    path = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)


def fake_torchvision(folder: Path, init: str) -> Path:
    (folder / "torchvision").mkdir(parents=True)
    (folder / "torchvision/__init__.py").write_text(init)
    (folder / "torchvision/extension.py").write_text("")
    return folder


def test_everything_above_torchvision_imports_under_the_guard() -> None:
    if installed_version("torchvision") is None:
        pytest.skip("torchvision is not installed")
    done = run(
        _GUARD
        + "import torchvision; from torchvision.transforms import v2; from transformers import CLIPModel;"
        + "from diffusers import DiffusionPipeline; print(torchvision.__version__)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(installed_version("torchvision") or "")


def test_the_guard_is_needed_here() -> None:
    """The control: without the guard these imports fail, where torchvision's binary does not load."""
    if installed_version("torchvision") is None:
        pytest.skip("torchvision is not installed")
    done = run("import torchvision")
    if done.returncode == 0:
        pytest.skip("NOT TESTED HERE: this torchvision loads over this torch, so there is no failure to heal")
    assert "operator torchvision::nms does not exist" in done.stderr
    assert run("from diffusers import DiffusionPipeline").returncode != 0
    assert run("from transformers import CLIPModel").returncode != 0


def test_the_guard_heals_a_process_where_transformers_failed_first() -> None:
    if installed_version("torchvision") is None or run("import torchvision").returncode == 0:
        pytest.skip("NOT TESTED HERE: this torchvision loads over this torch, so there is no failure to heal")
    done = run(
        "try:\n    from transformers import CLIPModel\nexcept Exception: pass\n"
        "else: raise SystemExit('no failure')\n"
        + _GUARD
        + "\nfrom transformers import CLIPModel\nfrom diffusers import DiffusionPipeline"
    )
    assert done.returncode == 0, done.stderr


def test_missing_operators_are_declared_after_the_failure(tmp_path: Path) -> None:
    code = (
        "import logging; logging.basicConfig(level='INFO')\n"
        + _GUARD
        + "assert ensure_torchvision()\n"  # a second call changes nothing
        + "import gc, torch, torchvision; gc.collect()\n"
        + "assert torch.ops.torchvision.nms.default and torch.ops.torchvision.qnms.default"
    )
    done = run(code, fake_torchvision(tmp_path, _UNLOADABLE))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("INFO:vargen:") == 1, done.stderr
    assert "torchvision::nms does not exist" in done.stderr


def test_nothing_is_declared_when_torchvision_imports(tmp_path: Path) -> None:
    """A binary that does load defines these operators itself: a second definition would be an error."""
    code = _GUARD + "import torch; assert not hasattr(torch.ops.torchvision, 'nms')"
    done = run(code, fake_torchvision(tmp_path, ""))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        ("raise RuntimeError('the disk is on fire')", "RuntimeError: the disk is on fire"),
        ("import a_missing_dependency", "No module named 'a_missing_dependency'"),
        ("raise RuntimeError('operator torchvision::roi does not exist')", "operator torchvision::roi"),
    ],
)
def test_another_failure_is_not_hidden(tmp_path: Path, init: str, expected: str) -> None:
    done = run(_GUARD, fake_torchvision(tmp_path, init))
    assert done.returncode != 0
    assert expected in done.stderr


def test_without_torchvision_the_core_imports() -> None:
    done = run(
        "import sys; sys.modules['torchvision'] = None\n"  # as absent, for import and for find_spec
        "from vargen.compat import ensure_torchvision; assert ensure_torchvision() is False\n"
        "assert 'torch' not in sys.modules\n"
        "from diffusers import DiffusionPipeline; from transformers import T5EncoderModel"
    )
    assert done.returncode == 0, done.stderr


def test_installed_version() -> None:
    assert installed_version("torch")
    assert installed_version("no-such-distribution-of-ours") is None
