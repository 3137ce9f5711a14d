"""`vargen verify`: it tells exact from relaxed, and says when it cannot tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

MINE = """
from vargen import Accelerator
from vargen.decoding import Jacobi, Speculative, speculative_sampling
from vargen.evaluation.exactness import refusal_from_p

good = Accelerator("good", Jacobi(3, "maximal"), speculative_sampling)
wrong = Accelerator("wrong", Jacobi(4), refusal_from_p)
long = Accelerator("long", Speculative(30), speculative_sampling)
other = 5
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"methods_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_exact_and_relaxed_methods_are_told_apart(run: Any, mine: str) -> None:
    result = run("verify", "scd:window=3", "gsd", f"{mine}:long", "--samples", "40000", "--json")
    assert result.exit_code == 0, result.stderr
    scd, gsd, long = json.loads(result.stdout)
    assert (scd["claims"], scd["exact"], scd["can_tell"]) == ("exact", True, True)
    assert (gsd["claims"], gsd["exact"]) == ("relaxed", False)
    assert scd["name"] == "scd:window=3"
    assert long["exact"], "its chain is cut to the models"
    assert len(scd["findings"]) == 5 and all(each["floor"] > 0 and each["spread"] > 0 for each in scd["findings"])


def test_a_wrong_method_of_ones_own_ends_with_1(run: Any, mine: str) -> None:
    result = run("verify", f"{mine}:wrong", f"{mine}:good", "--samples", "40000")
    assert result.exit_code == 1
    assert "wrong claims to be exact and is not exact" in result.stdout
    assert "good claims to be exact and is exact" in result.stdout
    assert "all detected: rejected token resampled from p" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["arr"], "did you mean 'ar'"),
        (["no_such_module:x"], "could not be imported"),
        (["json:nothing"], "could not be imported"),
        (["..:x"], "must be module:name"),
        (["sjd:window=x"], "window"),
        (["json:dumps"], "must be an Accelerator or a ScaleSchedule, got function"),
        (["ar", "--samples", "10"], "samples"),
    ],
)
def test_bad_input(run: Any, arguments: list[str], message: str) -> None:
    result = run("verify", *arguments)
    assert result.exit_code == 2 and message in result.stderr
