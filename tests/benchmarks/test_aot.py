"""Kernels compiled ahead of time for GPUs that are not here, in a process in which Triton does not interpret."""

import json
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton, an extra, is not installed")


# Every variant, each for one generation of GPUs in rotation.
COMPILE = """
import json
from benchmarks.kernels_static.costs import make_report
from benchmarks.kernels_static.shipped import *
V = max(VOCABULARIES)
cases = [attention("7B", 16, 1024, torch.float32), attention("7B", 64, 1024), attention("LlamaGen-3B", 32, 1024)]
cases += [attention("LlamaGen-B", 32, 1024, torch.float16), attention("7B", 16, 1024, chain=True)]
cases += [attention("grouped", 16, 1024), attention("LlamaGen-B", 128, 1024)]
cases += [attention("LlamaGen-3B", 1, 1024), attention("LlamaGen-3B", 128, 1024)]
cases += [attention("emoji", 16, 256, torch.float32), attention("emoji", 16, 256), sampling(V, 32, filters=False)]
cases += [sampling(V, 1, token=True), sampling_from_probs(V, 32), *small_cases(32), commit("LlamaGen-3B", 32)]
cases += [*acceptance(V, 32), *acceptance(V, 32, counted=True), *acceptance(V, 32, sampled=False)]
generations = 80, 90, 100
reports = [make_report((generation,), cases[place::3]) for place, generation in enumerate(generations)]
print(json.dumps([kernel for report in reports for kernel in report["kernels"]]))
"""
SHARED = 166_912  # bytes of shared memory of a block, on the generation that has least


@pytest.mark.slow
def test_kernels_fit(tmp_path: Path, repo_root: Path) -> None:
    """Registers and shared memory suffice; no more is spilled than ptxas puts aside for a step of occupancy. Keys and values
    come 16 bytes at a time, also of heads that are 100 wide, whose slots are padded, and their products are of tensor cores."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, cwd=repo_root)
    assert run.returncode == 0, run.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(run.stdout)
    assert len({each["kernel"] for each in found}) > 10
    wrong = [each for each in found if each["spills"] > 32 or each["registers"] > 255 or each["shared"] > SHARED]
    assert not wrong, wrong
    low = [each for each in found if each["kernel"] == "attend" and "float32" not in each["shape"]]
    assert len(low) == 9 and {each["capability"] for each in low} == {80, 90, 100}
    assert all(each["wide_copies"] and each["tensor_cores"] for each in low)


def test_interpreting_processes_refuse_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels_static.aot.INTERPRETED", True)
    monkeypatch.setattr(sys, "argv", ["costs"])
    with pytest.raises(SystemExit, match="TRITON_INTERPRET is set"):
        runpy.run_module("kernels_static.costs", run_name="__main__")
