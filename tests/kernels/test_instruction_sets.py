"""Every instruction set that this CPU has computes the same bits, at any width and in any batch; VARGEN_CPU selects one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import vargen.kernels
from vargen.kernels.int8 import instructions
from vargen.kernels.int8.format import pack_matrix
from vargen.kernels.int8.instructions import LAYOUTS, SETS, cpu_instructions, instruction_set

# The first is what other tests run by.
OTHERS = [name for name, needed in SETS.items() if not needed or needed & set(cpu_instructions())][1:]
# What compares compiled passes and steps with operators, and with records of results.
TESTS = ("models/test_int8_passes.py", "models/test_var_int8.py", "decoding/test_compiled_steps.py")
RECORDED = ("pipelines/test_recorded_results.py", "pipelines/test_recorded_scales.py")


@pytest.mark.extended
@pytest.mark.parametrize("name", OTHERS)
def test_passes_have_the_bits_of_operators_and_of_records(name: str, repo_root: Path, tmp_path: Path) -> None:
    """Each set compiles code of its own, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "int8 or compiled or pass"]
    files = [str(repo_root / "tests" / each) for each in (*TESTS, *RECORDED)]
    environment = {**os.environ, "VARGEN_CPU": name, "VARGEN_KERNELS": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *files], env=environment, cwd=repo_root, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]


def outputs_of(command: list[str | Path], repo_root: Path, file: Path, environment: dict[str, str]) -> dict[str, np.ndarray]:
    done = subprocess.run(
        [*command, repo_root / "tests/support/int8_outputs.py", file],
        env=environment, capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(file) as found:
        return dict(found)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "cpu", "environment"),
    [
        ("neon-dotprod", "cortex-a76", {}),  # which is chosen, as LLVM's generic CPU
        ("plain", "cortex-a72", {"VARGEN_CPU": "plain", "NUMBA_CPU_NAME": "cortex-a72", "NUMBA_CPU_FEATURES": "+neon"}),
    ],
)
def test_passes_of_arm_have_the_bits_of_this_machine(
    name: str, cpu: str, environment: dict[str, str], repo_root: Path, tmp_path: Path
) -> None:
    """Passes of tiny networks, sampling and commits, under an emulator, which stops at instructions that a CPU lacks."""
    root, emulator = Path(os.environ.get("VARGEN_ARM_ROOT", "")), shutil.which("qemu-aarch64")
    python = root / "usr/bin/python3.11"
    if emulator is None or not python.is_file():
        pytest.skip("needs Python for Arm: sh tests/support/make_arm_root.sh FOLDER; export VARGEN_ARM_ROOT=FOLDER")
    package = tmp_path / "vargen"  # as it is where it is installed
    package.mkdir()
    for source in (*Path(vargen.__path__[0]).iterdir(), Path(vargen.kernels.__path__[0])):
        (package / source.name).symlink_to(source)
    places = {"PYTHONPATH": f"{tmp_path}:{root / 'site'}", "PYTHONDONTWRITEBYTECODE": "1"}
    command: list[str | Path] = [emulator, "-cpu", cpu, "-L", root, python]
    found = outputs_of(command, repo_root, tmp_path / "arm.npz", {**places, **environment})
    expected = outputs_of([sys.executable], repo_root, tmp_path / "here.npz", {**os.environ, "OMP_NUM_THREADS": "1"})
    assert (str(found.pop("set")), str(expected.pop("set"))) == (name, instruction_set())
    assert found.keys() == expected.keys()
    assert not [each for each in expected if found[each].tobytes() != expected[each].tobytes()]


@pytest.mark.parametrize("name", SETS)
def test_a_packed_matrix_has_the_inputs_of_a_step_side_by_side(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "cpu_instructions", lambda: ("AVX-512 VNNI", "AVX2", "Arm dot product"))
    monkeypatch.setenv("VARGEN_CPU", name)
    weight = np.random.default_rng(0).integers(-127, 128, (70, 10)).astype(np.int8)
    packed = pack_matrix(weight, np.ones(70, np.float32))
    columns, together, _, offset = LAYOUTS[name]
    values = packed.values.reshape(128 // columns, 12 // together, columns, together)
    for n, c in ((0, 0), (69, 9), (33, 5)):
        assert values[n // columns, c // together, n % columns, c % together] == weight[n, c]
    assert (packed.start[:70] == -offset * weight.sum(1, dtype=np.int32)).all() and not packed.start[70:].any()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("AVX2", "AVX-512", "AVX-512 VNNI"), "avx512-vnni"),
        (("AVX2", "AVX-VNNI"), "avx-vnni"),
        (("AVX2",), "avx2"),
        (("Arm dot product", "Arm bf16"), "neon-dotprod"),
        (("Arm bf16",), "plain"),
        ((), "plain"),
    ],
)
def test_the_fastest_set_is_used(flags: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "cpu_instructions", lambda: flags)
    monkeypatch.delenv("VARGEN_CPU", raising=False)
    assert instruction_set() == expected


@pytest.mark.parametrize(
    ("given", "message"), [("avx3", "must be one of .*avx2"), ("avx512-vnni", "must be a set that this CPU has .avx2, plain")]
)
def test_a_set_that_is_not_there_is_refused(given: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "cpu_instructions", lambda: ("AVX2",))
    monkeypatch.setenv("VARGEN_CPU", given)
    with pytest.raises(ValueError, match=f"VARGEN_CPU {message}"):
        instruction_set()
