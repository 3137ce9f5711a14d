"""Passes of next-scale models as graphs, which a pipeline keeps: the same images, whatever was generated before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from recorded_graph import RecordedGraph, captured_passes
from tiny_models import class_var_pipeline, infinity_pipeline, text_var_pipeline
from tiny_targets import take_gpu_paths

from vargen.pipelines.engines import KeptEngines

SCALES = 4
PROMPTS = ["a dog", "a red apple", "b"]


@pytest.fixture(autouse=True)
def on_gpu_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    take_gpu_paths(monkeypatch)
    monkeypatch.setattr(RecordedGraph, "made", 0)
    monkeypatch.setattr(RecordedGraph, "replays", 0)


PIPES: dict[str, Any] = {"class": class_var_pipeline, "text": text_var_pipeline, "bits": infinity_pipeline}


@pytest.fixture(params=PIPES)
def pipe(request: pytest.FixtureRequest) -> Any:
    return PIPES[request.param]()


def generate(pipe: Any, images: int = 2, seed: int = 0, **options: Any) -> torch.Tensor:
    generators = [torch.Generator().manual_seed(seed + number) for number in range(images)]
    chosen = [(seed + number) % 3 for number in range(images)]  # other conditions in each call
    texts: Any = {"prompt": [PROMPTS[number] for number in chosen]}
    names: Any = {"class_labels": chosen} if pipe.is_class_conditional else texts
    options = {"guidance_scale": 3.0, "temperature": 0.9, "top_k": 12} | options
    if pipe.vocab_size < 12:
        options |= {"top_k": options["top_k"] and 2, "top_p": 0.9}
    return pipe(**names, generator=generators, output_type="latent", **options).images


def eagerly(pipe: Any, **options: Any) -> torch.Tensor:
    """By a pipeline that captures and keeps nothing."""
    fresh = copy.copy(pipe)
    fresh._engines = KeptEngines()
    return generate(fresh, **options)


def same(pipe: Any, **options: Any) -> int:
    """Assert that a call generates what it would eagerly. Returns the number of graphs that it captured."""
    expected, made = eagerly(pipe, **options), RecordedGraph.made
    with captured_passes(), torch.inference_mode():  # as a pass on a CPU is, which is recorded
        found = generate(pipe, **options)
    assert torch.equal(found, expected), options
    return RecordedGraph.made - made


@pytest.mark.parametrize("schedule", ["plain", "code", "economy"])
def test_images_of_graphs_are_those_of_eager_passes(pipe: Any, schedule: str) -> None:
    """A pass of each scale but the first of each model, and a sum of each, are captured with the second image."""
    count = 2 * SCALES - (2 if schedule == "code" else 1)
    graphs = [same(pipe, seed=seed, accelerator=schedule) for seed in (0, 5, 9)]
    assert graphs == [0, count, 0] and RecordedGraph.replays == count


CALLS: dict[str, dict[str, Any]] = {
    "another scale": {"guidance_scale": 6.0},
    "other options": {"temperature": 0.5, "top_k": 5},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_captures_nothing_that_was_captured_before(pipe: Any, name: str) -> None:
    assert [same(pipe, seed=seed) for seed in (0, 5)] == [0, 2 * SCALES - 1]
    assert same(pipe, seed=3, **CALLS[name]) == 0 and same(pipe, seed=4) == 0


def test_calls_of_another_kind_have_their_own(pipe: Any) -> None:
    for options in ({}, {"guidance_scale": 1.0}, {"images": 3}, {"accelerator": "code"}, {"top_k": None}, {"images": 1}):
        for seed in (0, 1, 2):
            same(pipe, seed=seed, **options)


def test_moved_weights_are_captured_again(pipe: Any) -> None:
    assert [same(pipe, seed=seed) for seed in (0, 1, 2)] == [0, 2 * SCALES - 1, 0]
    before = eagerly(pipe)
    weight = pipe.transformer.head.weight
    weight.data = weight.data.flip(0).clone()
    assert [same(pipe, seed=seed) for seed in (0, 1, 2)] == [0, 2 * SCALES - 1, 0]
    assert not torch.equal(eagerly(pipe), before)


def test_a_source_image_and_a_stop_leave_the_graphs_right(pipe: Any) -> None:
    """Given scales, kept tokens, changed tokens and an early end, between calls whose passes are replayed."""
    image = pipe.decode_tokens(eagerly(pipe, images=1, seed=8), output_type="pt")[0]
    mask = torch.zeros(image.shape[-2:])
    mask[: len(mask) // 2] = 1
    _ = [same(pipe, seed=seed) for seed in (0, 1, 2)]

    def change(pipe: Any, step: int, place: int, values: Any) -> None:
        values["latents"][:, -1] = 0

    def stop(pipe: Any, step: int, place: int, values: Any) -> dict[str, bool]:
        return {"stop": step == 1}

    for options in ({"image": image, "mask_image": mask}, {"image": image, "strength": 0.5}):
        for seed in (3, 4, 5):
            same(pipe, seed=seed, **options)
        assert same(pipe, seed=6) == 0
        same(pipe, seed=6, images=3, batch_size=2, **options)
    for callback in (change, stop):
        same(pipe, seed=7, callback_on_step_end=callback)
        assert same(pipe, seed=6) == 0


def test_networks_with_hooks_are_not_captured(pipe: Any) -> None:
    handle = pipe.transformer.blocks[0].register_forward_hook(lambda *arguments: None)
    assert [same(pipe, seed=seed) for seed in (0, 1, 2)] == [0, 0, 0]
    handle.remove()
    assert sum(same(pipe, seed=seed) for seed in (0, 1, 2)) == 2 * SCALES - 1
