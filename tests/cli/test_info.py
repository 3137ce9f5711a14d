"""`vargen info`."""

import json
from pathlib import Path
from typing import Any

import pytest

from vargen import __version__
from vargen.cli import info
from vargen.decoding import PRESETS


def test_info_as_json(run: Any) -> None:
    result = run("info", "--json")
    assert result.exit_code == 0 and result.stderr == ""
    document = json.loads(result.stdout)
    parts = {"versions", "machine", "threads", "default_device", "default_dtype", "kernels", "graphs", "models", "presets"}
    parts |= {"cpu_instructions", "int8_passes"}
    assert set(document) == parts and document["kernels"].startswith(("reference: ", "triton: "))
    assert document["int8_passes"].startswith(("compiled: ", "operators: "))
    assert document["graphs"].startswith(("captured", "run one by one"))
    assert document["versions"]["vargen"] == __version__ and document["versions"]["torch"]
    assert {"cpu", "cores", "threads", "bfloat16_in_hardware", "gpus", "torch"} <= set(document["machine"])


def test_presets(run: Any) -> None:
    document = json.loads(run("info", "presets", "--json").stdout)
    assert [preset["name"] for preset in document] == list(PRESETS)
    assert all(
        set(preset) == {"name", "paradigm", "kind", "summary", "defaults", "source", "experimental"} for preset in document
    )
    core = run("info", "presets").stdout
    assert " gumbel " in core and " early-exit " not in core and "--all" in core
    printed = run("info", "presets", "--all").stdout
    assert max(map(len, printed.splitlines())) <= 100, "wider than the terminals that people have"
    words = " ".join(printed.split())
    for preset in document:
        assert f" {preset['name']} {preset['kind']} {preset['summary']} " in words and preset["source"] in words
        assert all(f"{name} " in words for name in preset["defaults"])
    assert all(f"models: {family}" in words for family in {preset["paradigm"] for preset in document})


def test_a_packaged_model_shows_its_size_and_card(
    run: Any, text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    import vargen.assets

    shutil.copytree(text_model, tmp_path / "assets" / "tiny")
    card = "---\nlicense: apache-2.0\n---\n# Tiny\n\n![picture](x.png)\n\nDraws noise, and\nlittle else. More.\n"
    (tmp_path / "assets" / "tiny" / "README.md").write_text(card)
    monkeypatch.setattr(vargen.assets, "_FOLDER", tmp_path / "assets")
    (model,) = json.loads(run("info", "--json").stdout)["models"]
    assert model["name"] == "tiny" and model["megabytes"] > 1 and model["summary"] == "Draws noise, and little else"
    assert "Draws noise, and little else" in run("info").stdout
    assert info.describe_folder("none", tmp_path)["summary"] == ""
