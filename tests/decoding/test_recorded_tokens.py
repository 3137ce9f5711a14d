"""Refactoring changes no token: every preset still generates the recorded tokens with the packaged model.

The record holds the tokens after `PASSES` passes, in float64, where no two machines round so differently that another token
wins. New weights, noise or sampling change the record on purpose: then run `python tests/decoding/test_recorded_tokens.py`.
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
PASSES = 10  # mulo, the fastest, then has most of the 256 tokens of an image; ar has 10
METHODS = list(json.loads(RECORD.read_text())["methods"])


def recordable(pipe: LlamaGenPipeline) -> list[str]:
    """Presets that the model can run, except the default: its windows follow costs, and its images equal those of ar."""
    return [
        method.name for method in pipe.list_methods() if method.unsupported_reason is None and method.name != DEFAULT_METHOD
    ]


def open_pipeline() -> LlamaGenPipeline:
    components = ("transformer", "draft_transformer", "eagle", "medusa", "text_encoder")
    pipe = LlamaGenPipeline.from_pretrained("emoji", torch_dtype=dict.fromkeys(components, torch.float64))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: LlamaGenPipeline, method: str, prompts: list[str], seeds: list[int]) -> dict[str, Any]:
    def stop(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        pipe._interrupt = step + 1 == PASSES
        return {}

    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    result = pipe(prompts, accelerator=method, generator=generators, output_type="latent", callback_on_step_end=stop)
    return {"tokens": result.images.flatten(1).tolist(), "num_tokens": result.stats.tokens}


@pytest.fixture(scope="module")
def pipe() -> LlamaGenPipeline:
    return open_pipeline()


def test_every_preset_that_the_model_can_run_is_on_record(pipe: LlamaGenPipeline) -> None:
    assert set(METHODS) == set(recordable(pipe))


@pytest.mark.parametrize("method", METHODS)
def test_presets_generate_the_recorded_tokens(pipe: LlamaGenPipeline, method: str) -> None:
    record = json.loads(RECORD.read_text())
    assert generate(pipe, method, record["prompts"], record["seeds"]) == record["methods"][method]


if __name__ == "__main__":
    record = json.loads(RECORD.read_text())
    pipeline = open_pipeline()
    record["methods"] = {name: generate(pipeline, name, record["prompts"], record["seeds"]) for name in recordable(pipeline)}
    RECORD.write_text(json.dumps(record, separators=(",", ":")))
