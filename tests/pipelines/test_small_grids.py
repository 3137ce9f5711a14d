"""Every preset runs on models with fewer tokens than its window; pipelines refuse a window that was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from table_methods import table_model
from tiny_models import class_pipeline, tiny_transformer
from typer.testing import CliRunner

from vargen.cli.main import app
from vargen.decoding import PRESETS, Accelerator, DynamicTree, Sampling, decode, list_methods, resolve_method
from vargen.decoding.experimental import SpeculativeTree, recursive_rejection
from vargen.pipelines.llamagen import LlamaGenPipeline
from vargen.pipelines.loading import inspect_model
from vargen.serving.engine import GenerationThread
from vargen.serving.tasks import ImageTask

CONDITION, SEEDS = torch.tensor([0, 1, 1]), torch.tensor([5, 6, 7])
PRESET_NAMES = [preset.name for preset in list_methods("next-token")]


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("name", PRESET_NAMES)
def test_every_preset_runs_on_a_small_grid(name: str, rows: int) -> None:
    tokens = 2 if rows == 1 else rows**2
    expected = decode(table_model(tokens, rows), CONDITION, SEEDS, "ar").tokens
    for options in ({}, {"batch_size": 2}):
        found = decode(table_model(tokens, rows), CONDITION, SEEDS, name, **options)
        assert found.finished and found.tokens.shape == (3, tokens)
        assert not PRESETS[name].sequential_tokens or torch.equal(found.tokens, expected)


@pytest.mark.parametrize(
    "method", ["gumbel:window=5", "scd:window=17", "speculative:length=5", "gumbel:window=99", "pac:depth=4,nodes=40"]
)
def test_a_size_that_was_asked_for_is_limited_to_the_grid(folder: Path, method: str) -> None:
    pipe: Any = LlamaGenPipeline.from_pretrained(folder)
    inspect_model(folder).validate_method(resolve_method(method))
    trees = Accelerator("mine", SpeculativeTree(DynamicTree(9, 99, 2)), recursive_rejection)
    for accelerator in (method, trees):
        assert pipe(class_labels=3, accelerator=accelerator, output_type="latent").images.shape == (1, 2, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class-conditional model of 2 x 2 tokens."""
    path, pipe = tmp_path_factory.mktemp("models") / "small", class_pipeline(grid_size=2)
    pipe.register_modules(draft_transformer=tiny_transformer("class", grid_size=2, n_layer=1))
    pipe.save_pretrained(path)
    return path


def test_pipelines_commands_and_service_take_every_preset_that_they_list(folder: Path, tmp_path: Path) -> None:
    pipe: Any = LlamaGenPipeline.from_pretrained(folder)
    unsupported = {each.name: each.unsupported_reason for each in pipe.list_methods() if each.unsupported_reason}
    assert not any("grid" in reason for reason in unsupported.values()), unsupported
    assert not {"gumbel", "scd", "gsd", "speculative", "pac"} & set(unsupported)
    for method in pipe.list_methods():
        if method.unsupported_reason is None:
            inspect_model(folder).validate_method(PRESETS[method.name])
            assert pipe(class_labels=3, accelerator=method.name, output_type="latent").images.shape == (1, 2, 2)
    with GenerationThread(pipe, "gumbel", slots=2) as generation:
        [handle] = generation.submit([ImageTask(3, 1, Sampling())])
        assert handle.result(60).passes <= 4
    words = ["--class-label", "3", "--model", str(folder), "--accelerator", "gumbel", "-o", str(tmp_path / "a.png")]
    result = CliRunner().invoke(app, ["generate", *words])
    assert result.exit_code == 0, result.output
