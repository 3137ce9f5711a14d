"""Refactoring changes no token of next-scale images: presets, inpainting, image-to-image, the best candidate, int8 passes.

All but int8 passes are of the packaged model `emoji-var` in float64, where no two machines round so differently that another
token wins.

Int8 passes of this family round as the machine does: between integer products, their norms, attention and modulation are in
float32. What is certain is compared: the bits of the int8 weights, and, with a tolerance, the probabilities of recorded tokens.

New weights, noise or sampling change the record on purpose: then run `python tests/pipelines/test_recorded_scales.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vargen import VARPipeline, open_pipeline
from vargen.kernels.int8.load import find_compiled_blocker
from vargen.models.quantization import quantized_layers

RECORD = Path(__file__).parents[1] / "golden" / "recorded_scales.json"
PROMPTS, SEEDS = ["a red apple", "grinning cat, flat style"], [11, 12]
PRESETS = ("plain", "code", "economy")
LOG_PROB_TOLERANCE = 0.1  # of the mean of a scale: other instructions change it by up to 0.06, quantization by 0.16
BACKENDS = ("reference", "cpu")


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def open_float64() -> VARPipeline:
    pipe = VARPipeline.from_pretrained("emoji-var", torch_dtype=torch.float64)
    for part in (pipe.text_encoder, pipe.vqvae):
        part.double()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def open_int8() -> VARPipeline:
    pipe = open_pipeline("emoji-var", quantization="int8")
    assert isinstance(pipe, VARPipeline)
    for part in (pipe.text_encoder, pipe.vqvae):
        part.double()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def source_image(side: int) -> Tensor:
    """uint8 `[1, 3, Y, X]`: a disk on a gradient."""
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    disk = (2 * x - side) ** 2 + (2 * y - side) ** 2 < (side // 2) ** 2
    gradient = torch.stack([x, y, x + y]) * 255 // (2 * side)
    return torch.where(disk, torch.tensor([220, 40, 90])[:, None, None], gradient).to(torch.uint8)[None]


def source_mask(side: int) -> Tensor:
    """bool `[1, 1, Y, X]`: the right third, and a corner."""
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return ((3 * x > 2 * side) | (x + y < side // 3))[None, None]


def redness(images: Tensor, prompts: list[str]) -> Tensor:
    """How much more red than green and blue each image `[3, Y, X]` is, in percent."""
    return 100 * (images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3)))


def tokens_of(pipe: VARPipeline, **options: Any) -> list[list[int]]:
    options = {"prompt": PROMPTS, "generator": seeded(*SEEDS), "output_type": "latent", **options}
    result: Any = pipe(**options)
    return result.images.tolist()


def preset(name: str) -> Callable[[VARPipeline], Any]:
    return lambda pipe: tokens_of(pipe, accelerator=name)


def inpainted(pipe: VARPipeline) -> Any:
    side = pipe.image_size
    return tokens_of(pipe, image=source_image(side), mask_image=source_mask(side))


def variation(pipe: VARPipeline) -> Any:
    return tokens_of(pipe, image=source_image(pipe.image_size), strength=0.5)


def best_candidate(pipe: VARPipeline) -> Any:
    options: dict[str, Any] = {"num_candidates": 3, "scorer": redness, "output_type": "latent"}
    result: Any = pipe(PROMPTS, generator=seeded(*SEEDS), **options)
    stats = result.stats
    chosen = [seeds.index(seed) for seeds, seed in zip(stats.candidate_seeds, stats.seeds, strict=True)]
    scores = [[round(score) for score in each] for each in stats.scores]
    return {"tokens": result.images.tolist(), "chosen": chosen, "scores": scores}


RESULTS: dict[str, Callable[[VARPipeline], Any]] = {
    **{name: preset(name) for name in PRESETS},
    "inpainting": inpainted,
    "image to image": variation,
    "best candidate": best_candidate,
}


# -- int8 -----------------------------------------------------------------------------------------------------------------


def digest_weights(pipe: VARPipeline) -> str:
    digest = hashlib.sha256()
    for network in (pipe.transformer, pipe.draft_transformer):
        for name, layer in sorted(quantized_layers(network).items()):
            for part in (layer.weight, layer.weight_scale):
                digest.update(name.encode() + part.detach().numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def log_probs(pipe: VARPipeline, tokens: list[list[int]]) -> list[float]:
    """Mean log probability of given tokens, by scale, in one pass over all scales with the guidance of calls."""
    model = pipe.decoding_model(pipe.config.defaults["guidance_scale"])
    condition, _ = pipe.encode_condition(PROMPTS[: len(tokens)])
    parts = torch.tensor(tokens).split(list(model.scale_tokens), 1)
    state, canvas, inputs, logits = model.allocate(condition, len(tokens)), model.canvas(len(tokens)), [None], []
    model.reset(state, condition)
    for scale, part in enumerate(parts):
        logits.append(model.forward(state, inputs, 1.0))
        canvas, following = model.add(canvas, part, scale)
        inputs.append(None if following is None else following.float())
    found = [each.log_softmax(-1).gather(2, part[..., None]).mean() for each, part in zip(logits, parts, strict=True)]
    return [round(float(mean), 4) for mean in found]


def int8_results() -> dict[str, Any]:
    pipe = open_int8()
    tokens = tokens_of(pipe, prompt=PROMPTS[:1], generator=seeded(SEEDS[0]))
    return {
        "weights": digest_weights(pipe),
        "tokens": tokens,
        "log probs": log_probs(pipe, tokens),
    }


# -- tests ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


@pytest.fixture(scope="module")
def pipe() -> VARPipeline:
    return open_float64()


@pytest.fixture(scope="module")
def quantized() -> VARPipeline:
    return open_int8()


@pytest.mark.parametrize("name", RESULTS)
def test_images_are_the_recorded_ones(pipe: VARPipeline, record: dict[str, Any], name: str) -> None:
    assert RESULTS[name](pipe) == record[name]


@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_probabilities_are_near_the_recorded_ones(
    quantized: VARPipeline, record: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "cpu" and (reason := find_compiled_blocker()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("VARGEN_KERNELS", backend)
    expected = record["int8"]
    assert digest_weights(quantized) == expected["weights"]
    assert log_probs(quantized, expected["tokens"]) == pytest.approx(expected["log probs"], abs=LOG_PROB_TOLERANCE)


if __name__ == "__main__":
    os.environ["VARGEN_KERNELS"] = "reference"
    opened = open_float64()
    found = {name: make(opened) for name, make in RESULTS.items()} | {"int8": int8_results()}
    RECORD.write_text(json.dumps(found, separators=(",", ":")))
