"""Refactoring changes no result of the packaged model `emoji`: int8 passes, images that join a batch, and the best candidate.

The records of other families are beside this one: `test_recorded_scales.py`, `test_recorded_video.py` and
`test_recorded_language_models.py`. Presets in float64 are in `tests/decoding/test_recorded_tokens.py`.

Int8 passes compute in integers and in steps that round as IEEE 754 says, so that logits have the same bits on any CPU,
compiled or not; the captions that they read are in float64. Only sampling from these logits is in float32, and its tokens were
seen to be the same with and without vector instructions. The other results are of networks in float64, where no two machines
round so differently that another token wins.

New weights, noise or sampling change the record on purpose: then run `python tests/pipelines/test_recorded_results.py`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vargen import LlamaGenPipeline, open_pipeline
from vargen.decoding import Engine, FinishedImage, Sampling, Tree
from vargen.kernels.int8.load import find_compiled_blocker
from vargen.pipelines.seeds import resolve_seeds

RECORD = Path(__file__).parents[1] / "golden" / "recorded_results.json"
PROMPTS = ["a red apple", "grinning cat, flat style", "house with a garden"]
SEEDS = [11, 12, 13]
SUBMITTED = [0, 4, 10]  # passes of the batch before each image is requested
PASSES_ALONE = 16  # after which images generated alone are compared; all of them when the record is written
NUM_CANDIDATES = 2
INT8_PASSES = {"ar": 40, "gumbel": 10}
BACKENDS = ("reference", "cpu")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def open_float64() -> LlamaGenPipeline:
    pipe = LlamaGenPipeline.from_pretrained("emoji", torch_dtype=torch.float64)
    pipe.text_encoder.double()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def open_int8() -> LlamaGenPipeline:
    pipe = open_pipeline("emoji", quantization="int8")
    assert isinstance(pipe, LlamaGenPipeline)
    pipe.text_encoder.double()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: LlamaGenPipeline, number: int, method: str, passes: int | None = None) -> list[int]:
    """Tokens of an image alone: all, or those that it has after so many passes."""

    def stop(pipe: Any, step: int, timestep: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {"stop": step + 1 == passes}

    options: dict[str, Any] = {"accelerator": method, "output_type": "latent", "callback_on_step_end": stop}
    result: Any = pipe(PROMPTS[number], generator=seeded(SEEDS[number]), **options)
    return result.images.flatten()[: result.stats.tokens].tolist()


@torch.no_grad()
def digest_logits(pipe: LlamaGenPipeline) -> str:
    """Of the prefill and of a pass over 8 tokens: tokens alone would show no small change of these bits."""
    model = pipe.decoding_model(pipe.config.defaults["guidance_scale"])
    condition, _ = pipe.encode_condition(PROMPTS[0])
    cache, out = model.start(condition, 8)
    passed = model.forward(torch.arange(8)[None] * 31, cache, Tree.make_chain(7, model.device))
    return hashlib.sha256(out.logits.numpy().tobytes() + passed.logits.numpy().tobytes()).hexdigest()


def joined_images(pipe: LlamaGenPipeline) -> dict[str, Any]:
    """Images that are requested one after the other, while the batch runs."""
    defaults = dict(pipe.config.defaults)
    engine = Engine(pipe.decoding_model(defaults.pop("guidance_scale")), "gumbel", batch_size=len(PROMPTS))
    steps, found = 0, dict[int, FinishedImage]()
    while len(found) < len(PROMPTS):
        for prompt, seed, start in zip(PROMPTS, SEEDS, SUBMITTED, strict=True):
            if start == steps:
                condition, _ = pipe.encode_condition(prompt)
                engine.submit(condition, resolve_seeds(seeded(seed), 1).noise_seeds, Sampling(**defaults))
        for image in engine.step():
            assert image.error is None
            found[image.number] = image
        steps += 1
    images = [found[number] for number in range(len(PROMPTS))]
    return {"tokens": [image.tokens.tolist() for image in images], "passes": [image.stats.passes for image in images]}


def redness(images: Tensor, prompts: list[str]) -> Tensor:
    """How much more red than green and blue each image `[3, Y, X]` is, in percent."""
    return 100 * (images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3)))


def best_candidate(pipe: LlamaGenPipeline) -> dict[str, Any]:
    options: dict[str, Any] = {"accelerator": "gumbel", "num_candidates": NUM_CANDIDATES, "output_type": "latent"}
    result: Any = pipe(PROMPTS[0], generator=seeded(SEEDS[0]), scorer=redness, **options)
    tokens, (scores,), (seeds,) = result.images.flatten().tolist(), result.stats.scores, result.stats.candidate_seeds
    return {"tokens": tokens, "chosen": seeds.index(result.stats.seeds[0]), "scores": [round(score) for score in scores]}


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


@pytest.fixture(scope="module")
def pipe() -> LlamaGenPipeline:
    return open_float64()


@pytest.fixture(scope="module")
def quantized() -> LlamaGenPipeline:
    return open_int8()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", INT8_PASSES)
def test_int8_passes_generate_the_recorded_tokens(
    quantized: LlamaGenPipeline, method: str, backend: str, record: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "cpu" and (reason := find_compiled_blocker()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("VARGEN_KERNELS", backend)
    assert generate(quantized, 0, method, INT8_PASSES[method]) == record["int8"][method]


@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_logits_have_the_recorded_bits(
    quantized: LlamaGenPipeline, backend: str, record: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "cpu" and (reason := find_compiled_blocker()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("VARGEN_KERNELS", backend)
    assert digest_logits(quantized) == record["int8"]["logits"]


def test_images_that_join_a_batch_are_the_recorded_ones_and_those_generated_alone(
    pipe: LlamaGenPipeline, record: dict[str, Any]
) -> None:
    found = joined_images(pipe)
    assert found == record["joined images"]
    for number, tokens in enumerate(found["tokens"]):
        alone = generate(pipe, number, "gumbel", PASSES_ALONE)
        assert len(alone) > 2 * PASSES_ALONE and alone == tokens[: len(alone)]


def test_the_recorded_candidate_is_the_best(pipe: LlamaGenPipeline, record: dict[str, Any]) -> None:
    assert best_candidate(pipe) == record["best candidate"]
    assert record["best candidate"]["chosen"] > 0, "the first candidate would show no selection"


if __name__ == "__main__":
    opened, opened_int8 = open_float64(), open_int8()
    int8: dict[str, Any] = {method: generate(opened_int8, 0, method, passes) for method, passes in INT8_PASSES.items()}
    int8["logits"] = digest_logits(opened_int8)
    joined = joined_images(opened)
    assert joined["tokens"] == [generate(opened, number, "gumbel") for number in range(len(PROMPTS))]
    found = {"int8": int8, "joined images": joined, "best candidate": best_candidate(opened)}
    RECORD.write_text(json.dumps(found, separators=(",", ":")))
