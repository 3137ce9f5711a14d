"""Kernels compiled ahead of time for GPUs that are not here, in a process in which Triton does not interpret."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton, an extra, is not installed")


def compile_all(capability: int, cache: Path, root: Path) -> list[dict[str, Any]]:
    """Every launch that is shipped, compiled for a generation of GPUs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.kernels_static.costs", "--json", str(capability)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)["kernels"]


@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(100, marks=pytest.mark.slow)]
)
def test_kernels_fit(capability: int, tmp_path: Path, repo_root: Path) -> None:
    """Registers and shared memory suffice; no more is spilled than ptxas puts aside for a step of occupancy. Keys and values
    come 16 bytes at a time, also of heads that are 100 wide, whose slots are padded, and their products are of tensor cores."""
    found = compile_all(capability, tmp_path, repo_root)
    assert {each["capability"] for each in found} == {capability}
    names = {"attend", "merge", "sample", "race", "judge", "walk", "traverse", "group", "near", "match", "keep"}
    assert names == {each["kernel"] for each in found}
    wrong = [each for each in found if each["spills"] > 32 or each["registers"] > 255 or each["shared"] > each["shared_limit"]]
    assert not wrong, wrong
    low = [each for each in found if each["kernel"] == "attend" and "float32" not in each["shape"]]
    assert len(low) > 15
    assert all(each["wide_copies"] and each["tensor_cores"] for each in low)


def test_interpreting_processes_refuse_to_compile(repo_root: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "benchmarks.kernels_static.costs"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=repo_root)
    assert run.returncode == 1 and "TRITON_INTERPRET is set" in run.stderr and "Traceback" not in run.stderr
