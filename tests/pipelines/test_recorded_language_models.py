"""Refactoring changes no token of image language models: tiny ones of transformers, in float64, with guidance.

Weights are counter-based uniform noise, the same numbers on any machine and with any release of torch; each depends on the name
of its parameter. Networks are those of transformers, whose norms stay in float32: tokens were seen to be the same with and
without vector instructions. Its tokenizers differ from one major release to the next, and so do the ids of prompts: there is a
record for each.

Other weights, noise or sampling change the record on purpose. It is written again for the installed release, thus once in each
set of packages: `PYTHONPATH=tests/support python tests/pipelines/test_recorded_language_models.py`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_language_models import has_release, make_emu3, make_glm, make_janus

import vargen
from vargen.decoding.noise import Noise, Purpose

RECORD = Path(__file__).parents[1] / "golden" / "recorded_language_models.json"
SPREAD = 0.3
PROMPTS = ["a red apple", "a blue car on the moon"]
METHODS = ["ar", "gumbel"]
MODELS: dict[str, tuple[Callable[..., tuple[Any, Any]], dict[str, Any], dict[str, Any]]] = {  # sizes, options of calls
    "janus": (make_janus, {}, {"guidance_scale": 3.0}),
    "emu3": (make_emu3, {"size": (4, 5)}, {"guidance_scale": 3.0}),
    "glm-image": (make_glm, {"size": (2, 3)}, {}),  # published without guidance
}


def set_weights(model: torch.nn.Module) -> None:
    """Weights of a spread that lets tokens depend on the prompt; those of a parameter depend on its name."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            seeds, positions = torch.tensor([zlib.crc32(name.encode())]), torch.arange(parameter.numel())[None]
            uniforms = Noise(seeds, positions).uniform64(Purpose.CHOICE)
            parameter.copy_(((uniforms - 0.5) * (12**0.5 * SPREAD)).view(parameter.shape))


def generate(name: str, method: str) -> list[list[int]]:
    make, sizes, options = MODELS[name]
    model, processor = make()
    set_weights(model.double())
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(PROMPTS))]
    pipe = vargen.accelerate(model, processor, **sizes)
    pipe.set_progress_bar_config(disable=True)
    result: Any = pipe(PROMPTS, accelerator=method, generator=generators, output_type="latent", **options)
    return result.tokens.tolist()


def major_release() -> str:
    return f"transformers {transformers.__version__.partition('.')[0]}"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_language_models_generate_the_recorded_tokens(name: str, method: str) -> None:
    if not has_release(name):
        pytest.skip(f"{name} needs a newer transformers")
    assert generate(name, method) == json.loads(RECORD.read_text())[major_release()][name]


if __name__ == "__main__":
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record[major_release()] = {name: generate(name, METHODS[0]) for name in MODELS if has_release(name)}
    RECORD.write_text(json.dumps(record, separators=(",", ":"), sort_keys=True))
