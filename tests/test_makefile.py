"""Where `make` takes torch from: gigabytes of CUDA come to no machine without a GPU, unless it is told so."""

import os
import shutil
import subprocess
import sys

import pytest

CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
# Stands for the Python of the environment that make would make: notes what pip is asked, and reaches an index or not.
PYTHON = """#!/bin/sh
case "$*" in
  *urlopen*) exit $UNREACHABLE;;
  "-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;
  "-m pip"*) echo "$*" >> "$LOG"; case "$*" in *"$BROKEN"*) exit 1;; esac;;
esac
"""
GPU = "#!/bin/sh\nexit $NO_GPU\n"


@pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("make"), reason="make on Linux is needed")
@pytest.mark.parametrize(
    ("machine", "index", "asked", "told"),
    [
        ({}, None, [f"--index-url {CPU_WHEELS} torch torchvision"], f"torch from {CPU_WHEELS}"),
        ({"NO_GPU": "0"}, None, ["torch torchvision"], ""),
        ({"UNREACHABLE": "1"}, None, ["torch torchvision"], "cannot be used: torch from the ordinary index"),
        (
            {"BROKEN": CPU_WHEELS},
            None,
            [f"--index-url {CPU_WHEELS} torch torchvision", "torch torchvision"],
            "cannot be used: torch from the ordinary",
        ),
        ({}, "", ["torch torchvision"], ""),
        ({}, "https://wheels.example/simple", ["--index-url https://wheels.example/simple torch torchvision"], ""),
        ({"NO_GPU": "0"}, CPU_WHEELS, [f"--index-url {CPU_WHEELS} torch torchvision"], ""),
        (
            {"BROKEN": "whl.example"},
            "https://whl.example/simple",
            ["--index-url https://whl.example/simple torch torchvision"],
            None,
        ),
    ],
)
def test_torch_comes_from_the_index_for_the_machine(repo_root, tmp_path, machine, index, asked, told):
    """`told` is None where make fails: an index that someone named is not silently replaced."""
    for name, text in (("python", PYTHON), ("nvidia-smi", GPU)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    shutil.copy(repo_root / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(repo_root / name, tmp_path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "TORCH_INDEX", "PYTHON"))}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path / "log"), "BROKEN": "nothing is"}
    environment |= {"UNREACHABLE": "0", "NO_GPU": "1", **machine}
    words = ["make", f"PYTHON={tmp_path / 'python'}", *([] if index is None else [f"TORCH_INDEX={index}"]), ".venv/.core"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (tmp_path / "log").is_file(), done
    installs = [line.removeprefix("-m pip install -c constraints.txt ") for line in (tmp_path / "log").read_text().splitlines()]
    if told is None:
        assert done.returncode != 0 and installs == asked
        return
    assert done.returncode == 0, done.stderr
    assert installs == [*asked, "-e ."], done.stdout
    assert told in done.stdout and ("torch from" in done.stdout) == bool(told)
