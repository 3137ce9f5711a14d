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


# Everything for one generation; for the others each operation once, and each kind of attention.
COMPILE = """
import json
from benchmarks.kernels_static.costs import make_report
from benchmarks.kernels_static.shipped import list_cases
cases = list_cases()
few = {(case.operation, case.shape.split(",")[0] if case.operation.startswith("attention") else ""): case for case in cases}
reports = make_report((90,), cases), make_report((80, 100), list(few.values()))
print(json.dumps([kernel for report in reports for kernel in report["kernels"]]))
"""


@pytest.mark.slow
def test_kernels_fit(tmp_path: Path, repo_root: Path) -> None:
    """Registers and shared memory suffice; no more is spilled than ptxas puts aside for a step of occupancy. Keys and values
    come 16 bytes at a time, also of heads that are 100 wide, whose slots are padded, and their products are of tensor cores."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, cwd=repo_root)
    assert run.returncode == 0, run.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(run.stdout)
    launches = {(each["kernel"], each["capability"]) for each in found}
    names = {name for name, _ in launches}
    assert len(names) > 10 and launches == {(name, capability) for name in names for capability in (80, 90, 100)}
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
