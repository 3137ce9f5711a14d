"""docs/models.md says which methods a model runs, as `pipe.list_methods()` does. As a script, it writes the table again."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_language_models import (
    has_release,
    make_causal,
    make_chameleon,
    make_emu3,
    make_glm,
    make_janus,
    make_mammoth_moda2,
    make_vqgan,
)
from tiny_models import class_pipeline, class_var_pipeline, infinity_pipeline

import vargen
from vargen.compat import installed_version
from vargen.decoding import PRESETS

PAGE = Path(__file__).parents[2] / "docs/models.md"
BEGIN, END = "<!-- by tests/pipelines/test_methods_of_models.py -->\n", "<!-- end -->\n"
# What a reason of `list_methods` names -> what is missing. Not every family has a component for a low-resolution model.
MISSING = {
    "codebook": "codebook",
    "low resolution": "low-resolution model",
    "trained for the model": "trained head",
    "draft": "draft model",
}


def language_model(make: Any, **options: Any) -> Any:
    return vargen.accelerate(*make(num_hidden_layers=4), **options)


MODELS = {
    "`emoji`, `emoji-var`": (partial(vargen.open_pipeline, "emoji"), partial(vargen.open_pipeline, "emoji-var")),
    "LlamaGen, VAR, Infinity": (
        partial(class_pipeline, n_layer=6),
        partial(class_var_pipeline, draft=False),
        partial(infinity_pipeline, draft=False),
    ),
    "Janus, Chameleon, Emu3, Emu3.5, Liquid": (
        partial(language_model, make_janus),
        partial(language_model, make_chameleon),
        partial(language_model, make_emu3, size=(4, 5)),
        partial(language_model, partial(make_causal, "emu3.5"), size=(3, 4), vision_tokenizer=make_vqgan()),
        partial(language_model, partial(make_causal, "liquid"), size=(9, 9), vision_tokenizer=make_vqgan()),
    ),
    "GLM-Image": (partial(language_model, make_glm, size=(2, 3)),),
    "SimpleAR, Tar": tuple(partial(language_model, partial(make_causal, name), size=(9, 9)) for name in ("simplear", "tar")),
    "MammothModa2, X-Omni": (
        partial(language_model, make_mammoth_moda2, size=(3, 4)),
        partial(language_model, partial(make_causal, "x-omni"), size=(3, 4)),
    ),
}
RUNS_HERE = {
    "Janus, Chameleon, Emu3, Emu3.5, Liquid": has_release("janus", "chameleon", "emu3"),
    "SimpleAR, Tar": has_release("emu3"),
    "MammothModa2, X-Omni": has_release("mammoth-moda2", "x-omni"),
    "GLM-Image": (installed_version("transformers") or "0") >= "5",
}


def describe(pipe: Any, name: str, reason: str | None) -> str:
    """What the table says of a method: also where a second part is missing that a user cannot add."""
    if reason is None:
        return "yes"
    missing = next(missing for words, missing in MISSING.items() if words in reason)
    cannot = missing == "codebook"
    if missing == "low-resolution model":
        cannot = "low_res" not in pipe.family.components
    if missing == "trained head":
        cannot = needs_codebook(pipe, name) or refuses_heads(pipe)
    return "no" if cannot else f"with a {missing}"


def needs_codebook(pipe: Any, name: str) -> bool:
    """Whether the acceptance rule of a method needs a codebook that a pipeline lacks."""
    try:
        PRESETS[name].acceptance.bind(pipe.decoding_model())
    except ValueError as error:
        return "codebook" in str(error)
    return False


def refuses_heads(pipe: Any) -> bool:
    """Whether no head can be trained for a model."""
    try:
        return hasattr(pipe, "language_model") and not pipe.language_model.head_settings
    except ValueError:
        return True


def describe_methods(makers: Iterable[Any]) -> dict[str, str]:
    """The cells of a column; models that share it run the same methods."""
    found: dict[str, str] = {}
    for pipe in (make() for make in makers):
        for method in pipe.list_methods():
            cell = describe(pipe, method.name, method.unsupported_reason)
            assert found.setdefault(method.name, cell) == cell, method.name
    return found


def read_table(page: str) -> tuple[list[str], dict[str, list[str]]]:
    """The models of the table, and the cells of each method."""
    header, _, *lines = page.split(BEGIN)[1].split(END)[0].splitlines()
    cells = {}
    for line in lines:
        names, *row = [cell.strip() for cell in line.strip("|").split("|")]
        cells.update(dict.fromkeys(re.findall("`([^`]+)`", names), row))
    return [cell.strip() for cell in header.strip("|").split("|")[1:]], cells


def make_table(models: dict[str, dict[str, str]]) -> str:
    """Methods with equal cells share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(name for found in models.values() for name in found):
        rows.setdefault(tuple(found.get(name, "–") for found in models.values()), []).append(f"`{name}`")
    lines = [("methods", *models), ("---",) * (len(models) + 1), *((" ".join(names), *row) for row, names in rows.items())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@pytest.mark.parametrize("model", MODELS)
def test_the_page_says_what_a_model_runs(model: str) -> None:
    if not RUNS_HERE.get(model, True):
        pytest.skip("needs a newer transformers")
    models, cells = read_table(PAGE.read_text("utf-8"))
    column = models.index(model)
    assert {name: row[column] for name, row in cells.items() if row[column] != "–"} == describe_methods(MODELS[model])


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    known, rows = read_table(text) if "|" in text.split(BEGIN)[1].split(END)[0] else ([], {})
    found = {}
    for name, makers in MODELS.items():
        if RUNS_HERE.get(name, True):
            found[name] = describe_methods(makers)
        elif name in known:  # as another set of packages wrote it
            found[name] = {method: row[known.index(name)] for method, row in rows.items() if row[known.index(name)] != "–"}
    PAGE.write_text(before + BEGIN + make_table(found) + END + after, "utf-8")
