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


# The largest of each kernel and dtype for every generation; every variant for one.
COMPILE = """
import json
from benchmarks.kernels_static.costs import make_report
from benchmarks.kernels_static.shipped import *
V = max(VOCABULARIES)
every = [attention("7B", 16, 1024, torch.float32), attention("7B", 64, 1024), attention("LlamaGen-3B", 32, 1024)]
every += [sampling(V, 1, token=True), sampling_from_probs(V, 32), *acceptance(V, 32), *small_cases(32)]
every += [commit("LlamaGen-3B", 32)]
more = [attention("LlamaGen-B", 32, 1024, torch.float16), attention("7B", 16, 1024, chain=True), attention("grouped", 16, 1024)]
more += [attention(model, T, 1024) for model, T in (("LlamaGen-B", 128), ("LlamaGen-3B", 1), ("LlamaGen-3B", 128))]
more += [attention("emoji", 16, 256, torch.float32), attention("emoji", 16, 256), sampling(V, 32, filters=False)]
more += [*acceptance(V, 32, counted=True), *acceptance(V, 32, sampled=False)]
reports = make_report((80, 90, 100), every), make_report((90,), more)
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
    assert len(low) >= 11 and {each["capability"] for each in low} == {80, 90, 100}
    assert all(each["wide_copies"] and each["tensor_cores"] for each in low)


def test_interpreting_processes_refuse_to_compile(repo_root: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "benchmarks.kernels_static.costs"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=repo_root)
    assert run.returncode == 1 and "TRITON_INTERPRET is set" in run.stderr and "Traceback" not in run.stderr
