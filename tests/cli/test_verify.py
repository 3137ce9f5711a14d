"""`vargen verify`: exact, relaxed and wrong methods, and parts of a user's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

MINE = """
import torch
from vargen import Accelerator
from vargen.decoding import Jacobi, Purpose, Speculative, acceptance_rule, speculative_sampling
from vargen.decoding.experimental import recursive_rejection
from vargen.verify.controls import resample_from_p, couple_by_one_uniform

good = Accelerator("good", Jacobi(3, "maximal"), speculative_sampling)
wrong = resample_from_p
long = Accelerator("long", Speculative(30), speculative_sampling)
drafter = Jacobi(4, couple_by_one_uniform)
tree_rule = recursive_rejection
other = 5

@acceptance_rule(exact=True)
def undeclared(probs, draft, noise, relaxation):
    uniforms = 1 - noise.uniform(Purpose.ACCEPT)

@acceptance_rule(exact=True)
def elsewhere(probs, draft, noise, relaxation):
    return speculative_sampling(probs, draft, noise.shift(1).fold_in(1), relaxation)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"methods_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_exact_and_relaxed_methods(run: Any, mine: str) -> None:
    result = run("verify", "scd:window=3", "gsd", f"{mine}:long", "--json")
    assert result.exit_code == 0, result.stderr
    scd, gsd, long = json.loads(result.stdout)
    assert (scd["claims"], scd["exact"], scd["detects_controls"]) == ("exact", True, True)
    assert (gsd["claims"], gsd["exact"], gsd["keeps_its_claim"]) == ("relaxed", False, True)
    assert scd["name"] == "scd:window=3" and scd["worst"] < 1e-6
    assert long["exact"], "its chain is cut to the models"
    assert all(each["drafts"] > 0 for each in scd["findings"])


def test_parts_of_ones_own(run: Any, mine: str) -> None:
    result = run("verify", f"{mine}:wrong", f"{mine}:good", f"{mine}:tree_rule", f"{mine}:drafter")
    assert result.exit_code == 1
    for name, verdict in (("wrong", "not exact"), ("good", "exact"), ("tree_rule", "exact"), ("drafter", "not exact")):
        assert f"{name} claims to be exact and is {verdict}:" in result.stdout
    assert "Lumina-mGPT 2.0" in result.stdout and "all detected" in result.stdout


def test_a_method_with_shared_noise_is_compared_with_sequential_decoding(run: Any) -> None:
    result = run("verify", "gumbel:window=3")
    assert result.exit_code == 0 and "compared with sequential decoding, token by token: all are the same" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MINE:undeclared"], "may only be compared with a probability"),
        (["MINE:elsewhere"], "does not end where its tests say"),
    ],
)
def test_bad_input(run: Any, mine: str, arguments: list[str], message: str) -> None:
    result = run("verify", *(each.replace("MINE", mine) for each in arguments))
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())
