"""The committed sheet of what kernels cost is that of the kernels which are shipped; what only a compiler knows is looked at in
`test_aot.py`."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("triton") is None:
    pytest.skip("Triton, an extra, is not installed", allow_module_level=True)

from kernels_static import costs
from kernels_static.aot import SHARED_LIMIT
from kernels_static.shipped import list_cases

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
AGAIN = "make it again: python -m benchmarks.kernels_static.costs"


@pytest.fixture(scope="module")
def page() -> Path:
    return max(BENCHMARKS.glob("kernels_static_*.md"))


@pytest.fixture(scope="module")
def document(page: Path) -> dict[str, Any]:
    return json.loads(page.with_suffix(".json").read_text())


def test_the_sheet_lists_what_is_shipped(document: dict[str, Any]) -> None:
    """Every launch for every generation of GPUs, in order, with its grid and its warps."""
    expected = [
        (case.operation, case.shape, launch.name, launch.num_programs, launch.options["num_warps"], capability)
        for case, launch in costs.list_launches(list_cases())
        for capability in SHARED_LIMIT
    ]
    names = ("operation", "shape", "kernel", "programs", "warps", "capability")
    listed = [tuple(each[name] for name in names) for each in document["kernels"]]
    assert listed == expected, AGAIN
    assert len(set(listed)) == len(listed), "two launches of one name: the page shows one of them alone"
    assert document["operations"] == [costs.describe_operation(case) for case in list_cases()], AGAIN


def test_the_page_shows_the_sheet(page: Path, document: dict[str, Any]) -> None:
    text = page.read_text()
    assert costs.format_tables(document) in text, AGAIN
    assert f"Triton {document['triton']}" in text.replace("\n", " ")
