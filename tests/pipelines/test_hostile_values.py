"""Whatever a JSON file of a model folder says, opening it ends in 10 seconds and 2 GB: with one line, or the same tokens.

Every setting of every file of every family gets every value below, each in a process of its own, which records the files that
are opened outside of the folder. `make test` takes a fixed sample.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from limited_process import open_and_sample, open_changed, run_limited
from tiny_families import drafting_pipeline, video_folder
from tiny_language_models import has_release, make_causal, make_chameleon, make_emu3, make_glm, make_janus
from tiny_models import infinity_pipeline, t5_pipeline, text_var_pipeline

from vargen.pipelines.video_settings import VideoSettings

VALUES = (-1, 0, "x", None, math.nan, 10**12, {"a": {"b": [[1]]}})
SAMPLE = 13  # every how many settings are in `make test`, each with one value
# Valid numbers of these give another image, as do words of a tokenizer, and stored defaults.
NUMERIC = {
    "norm_eps", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_base", "rope_theta", "rope_parameters",
    "vocabulary_map",
}  # fmt: skip
MAKERS: dict[str, Any] = {
    "janus": make_janus, "emu3": make_emu3, "chameleon": make_chameleon, "glm-image": make_glm,
    "emu3.5": partial(make_causal, "emu3.5"),
}  # fmt: skip
FAMILIES = ["llamagen", "t5", "var", "infinity", "video", *MAKERS]
OPTIONS: dict[str, Any] = {"emu3": {"size": (4, 5)}, "glm-image": {"size": (2, 3)}, "emu3.5": {"size": (3, 4)}}
# Files that are like those of another family.
SAME = {
    "llamagen": ("draft_", "low_res"),
    "t5": ("model_index", "tokenizer/", "transformer/", "vqvae/"),
    "var": ("tokenizer/", "text_encoder/", "draft_"),
    "infinity": ("tokenizer/", "text_encoder/", "draft_"),
    "video": ("draft_",),
    "emu3": ("tokenizer",),
    "emu3.5": ("tokenizer",),
    "chameleon": ("tokenizer", "preprocessor"),
}


def save_family(name: str, folder: Path) -> Path:
    """Save a tiny model of a family, with all components that it may have."""
    if name == "video":
        index = video_folder(folder) / "model_index.json"
        content = json.loads(index.read_text())
        index.write_text(json.dumps({**content, "defaults": {**vars(VideoSettings()), **content["defaults"]}}))
        return index.parent
    if name not in MAKERS:
        makers: Any = {
            "llamagen": drafting_pipeline, "t5": t5_pipeline, "var": text_var_pipeline, "infinity": infinity_pipeline,
        }  # fmt: skip
        makers[name]().save_pretrained(folder)
        return folder
    model, processor = MAKERS[name]()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def list_settings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of a JSON value, of lists and long mappings only the first one."""
    for number, key in enumerate(value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()):
        if number and (isinstance(value, list) or len(value) > 40):
            return
        yield (*path, key)
        yield from list_settings(value[key], (*path, key))


def list_places(folder: Path, skipped: tuple[str, ...]) -> list[tuple[str, tuple[Any, ...]]]:
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.json"))
    chosen = [file for file in files if not file.startswith(skipped)]
    return [(file, place) for file in chosen for place in list_settings(json.loads((folder / file).read_text()))]


def find_fault(file: str, place: tuple[Any, ...], answer: Any, foreign: list[str], expected: Any) -> str | None:
    """Return what is wrong with what opening a folder led to; None if nothing is."""
    if foreign:
        return f"opened {foreign}"
    if isinstance(answer, str):
        length = len(re.sub(r"/\S+/", "", answer))  # without the folder's, which differ in length
        return None if "\n" not in answer and length < 700 else f"more than a line: {answer}"
    may_differ = NUMERIC & {*place} or "tokenizer" in file or "defaults" in place
    return None if answer == expected or may_differ else f"other tokens, {answer}"


@pytest.mark.parametrize("part", ["sample", *(pytest.param(number, marks=pytest.mark.slow) for number in range(4))])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_of_any_setting(family: str, part: Any, tmp_path: Path) -> None:
    if not has_release(family):
        pytest.skip("an earlier transformers")
    folder, options, copy = save_family(family, tmp_path / "saved"), OPTIONS.get(family, {}), tmp_path / "copy"
    kind, expected = run_limited(open_and_sample, str(folder), **options)
    assert kind == "returned", expected
    places = list_places(folder, SAME.get(family, ()))
    wrong = {}
    for number, (file, place) in enumerate(places[::SAMPLE] if part == "sample" else places[part::4]):
        values = VALUES if part != "sample" else VALUES[number % len(VALUES) :][:1]
        kind, answers = run_limited(open_changed, str(folder), str(copy), file, place, values, options)
        shutil.rmtree(copy)
        found = [find_fault(file, place, *each, expected) for each in answers] if kind == "returned" else [f"{kind}: {answers}"]
        wrong |= {f"{file} {place} {value!r}": said for value, said in zip(values, found, strict=False) if said}
    assert not wrong, json.dumps(wrong, indent=1)
