"""A model is loaded in silence; memory that runs out meanwhile is reported in one line, with the bytes of its weights."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import text_pipeline

from vargen.assets import packaged_model_path
from vargen.compat import report_memory

EMOJI = packaged_model_path("emoji")
ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."


def through_another_library() -> None:
    try:
        raise RuntimeError(ALLOCATOR)
    except RuntimeError as error:
        raise OSError("Unable to load weights from checkpoint file") from error


def raising(error: Exception) -> Any:
    def call() -> None:
        raise error

    return call


@pytest.mark.parametrize(
    "load",
    [raising(RuntimeError(ALLOCATOR)), raising(MemoryError()), raising(torch.OutOfMemoryError("")), through_another_library],
)
def test_the_bytes_are_said(load: Any) -> None:
    size = sum(file.stat().st_size for file in EMOJI.rglob("*.safetensors"))
    with pytest.raises(MemoryError, match=rf"emoji.* {size:,} bytes") as error, report_memory(EMOJI):
        load()
    assert "\n" not in str(error.value) and "alloc_cpu" not in str(error.value)


SCRIPT = """
import resource, sys
from pathlib import Path
sys.modules["accelerate"] = None
import diffusers, transformers
import vargen.pipelines.llamagen
from vargen.pipelines.registry import open_pipeline
assert not diffusers.utils.is_accelerate_available()
assert open_pipeline(sys.argv[1]).transformer is not None
assert diffusers.utils.logging.is_progress_bar_enabled(), "other pipelines keep their bars"
print("opened", flush=True)
print("opened", file=sys.stderr, flush=True)
status = Path("/proc/self/status").read_text().splitlines()
now = 1024 * int(next(line for line in status if line.startswith("VmSize")).split()[1])
for more in (2, 60):  # too little for a header's mapping, and for the weights
    resource.setrlimit(resource.RLIMIT_AS, (now + more * 2**20, -1))
    try:
        open_pipeline("emoji")
    except MemoryError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_process_loads_in_silence_and_reports_that_it_may_have_no_more_memory(tmp_path: Path) -> None:
    """Also without accelerate there is no notice of a package that is not needed."""
    text_pipeline().save_pretrained(tmp_path / "model")
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.startswith("opened\n") and done.stderr.startswith("opened\n"), (done.stdout, done.stderr)
    reported = re.findall(r"^memory does not suffice to load .*emoji.* bytes", done.stdout, re.MULTILINE)
    assert len(reported) == 2, done.stderr[-2000:]
