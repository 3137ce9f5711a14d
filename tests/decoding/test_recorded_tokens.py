"""Refactoring changes no token: every preset draws on the packaged model what it drew when this record was made.

In float64, where no two machines round so differently that another token wins. New weights, noise or sampling change the record
on purpose: then `python tests/decoding/test_recorded_tokens.py` writes it anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vargen import LlamaGenPipeline
from vargen.decoding import DEFAULT_METHOD

RECORD = Path(__file__).parents[1] / "golden" / "recorded_tokens.json"
METHODS = list(json.loads(RECORD.read_text())["methods"])


def recordable(pipe: LlamaGenPipeline) -> list[str]:
    """What the model can run, without the default: its windows follow measured costs, and its pictures are those of ar."""
    return [method.name for method in pipe.methods() if method.reason is None and method.name != DEFAULT_METHOD]


def open_pipeline() -> LlamaGenPipeline:
    parts = ("transformer", "draft_transformer", "eagle", "medusa", "text_encoder")
    double = dict.fromkeys(parts, torch.float64)
    pipe = LlamaGenPipeline.from_pretrained("emoji", torch_dtype=double)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: LlamaGenPipeline, method: str, prompts: list[str], seeds: list[int]) -> dict[str, Any]:
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    result = pipe(prompts, accelerator=method, generator=generators, output_type="latent")
    return {"tokens": result.images.flatten(1).tolist(), "passes": result.stats.passes}


@pytest.fixture(scope="module")
def pipe() -> LlamaGenPipeline:
    return open_pipeline()


def test_every_preset_that_the_model_can_run_is_on_record(pipe: LlamaGenPipeline) -> None:
    assert set(METHODS) == set(recordable(pipe))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_tokens_and_passes_are_those_on_record(pipe: LlamaGenPipeline, method: str) -> None:
    record = json.loads(RECORD.read_text())
    assert draw(pipe, method, record["prompts"], record["seeds"]) == record["methods"][method]


if __name__ == "__main__":
    kept = json.loads(RECORD.read_text())
    pipeline = open_pipeline()
    kept["methods"] = {method: draw(pipeline, method, kept["prompts"], kept["seeds"]) for method in recordable(pipeline)}
    RECORD.write_text(json.dumps(kept, separators=(",", ":")))
