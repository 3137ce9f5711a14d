"""docs/support.md is what the registries say, and what it calls tested is tested."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from vargen.assets import packaged_models
from vargen.decoding import PRESETS


@pytest.fixture(scope="module")
def script(repo_root: Path) -> dict[str, Any]:
    return runpy.run_path(str(repo_root / "docs/support_matrix.py"))


@pytest.fixture(scope="module")
def page(repo_root: Path) -> str:
    return (repo_root / "docs/support.md").read_text("utf-8")


def rows(text: str) -> list[list[str]]:
    """The cells of every method's row."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]


def test_the_page_is_what_the_registries_say(script: dict[str, Any], page: str) -> None:
    assert page == script["make_page"](), "make it again: python docs/support_matrix.py"


def test_every_model_and_every_method_has_its_row(script: dict[str, Any], page: str) -> None:
    assert all(f"\n## `{name}`\n" in page for name in packaged_models())
    found = rows(page)
    assert {row[0].strip("`") for row in found} == set(PRESETS)
    for row in found:
        assert row[1] == PRESETS[row[0].strip("`")].kind and len(row) == 3 + len(script["COLUMNS"])
        assert all(cell in ("tested", "expected") or cell.startswith("refused (") for cell in row[3:]), row


def test_a_refusal_has_its_reason_below_the_table(page: str) -> None:
    for section in page.split("\n## ")[1:]:
        numbers = {cell[9:-1] for row in rows(section) for cell in row[3:] if cell.startswith("refused (")}
        assert all(f"\n{number}. " in section for number in numbers)


def test_what_is_called_tested_is_tested(script: dict[str, Any], repo_root: Path) -> None:
    for each in script["EVIDENCE"]:
        text = (repo_root / each.test).read_text("utf-8")
        assert each.model in text and ("list_methods(" in text or "recorded_tokens.json" in text), each
    record = json.loads((repo_root / "tests/golden/recorded_tokens.json").read_text("utf-8"))
    of_tokens = {name for name, preset in PRESETS.items() if preset.paradigm == "next-token"}
    (left_out,) = [each.left_out for each in script["EVIDENCE"] if "recorded" in each.test]
    assert of_tokens - set(left_out) == set(record["methods"])
