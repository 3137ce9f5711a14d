"""A pipeline whose passes are captured keeps its engines: a call captures nothing again, and generates what it would alone."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from recorded_graph import RecordedGraph, captured_passes
from tiny_families import drafting_pipeline
from tiny_language_models import make_janus, needs_janus
from tiny_targets import take_gpu_paths

import vargen
from vargen.decoding import Engine, Sampling
from vargen.pipelines.engines import KeptEngines


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    take_gpu_paths(monkeypatch)
    monkeypatch.setattr(RecordedGraph, "made", 0)
    with captured_passes():
        yield


def tokens(pipe: Any, images: int = 1, method: str = "gumbel:window=4", **options: Any) -> Any:
    """Tokens of images with the seeds 0, 1, ..., and the number of graphs that the call captured."""
    before = RecordedGraph.made
    generators = [torch.Generator().manual_seed(number) for number in range(images)]
    options = {"temperature": 0.9, "top_k": 20, "guidance_scale": 3.0} | options
    found = pipe(
        ["a dog", "b", "a red apple", "cat"][:images], accelerator=method, generator=generators, output_type="latent", **options
    )
    return found.images.flatten(1).tolist(), RecordedGraph.made - before


def same_as_alone(pipe: Any, made: int, **options: Any) -> None:
    """Assert that a call gives what a pipeline that keeps no engine gives, and captures so many graphs."""
    found = tokens(pipe, **options)
    fresh = copy.copy(pipe)
    fresh._engines = KeptEngines()
    assert found == (tokens(fresh, **options)[0], made), options


CALLS: dict[str, tuple[int, dict[str, Any]]] = {  # graphs that a call captures after one of three images, and its arguments
    "the same": (0, {}),
    "another scale": (0, {"guidance_scale": 6.0}),
    "fewer images": (0, {"images": 2}),
    "other options": (0, {"temperature": 0.5, "top_k": 3}),
    "without filters": (1, {"top_k": None}),
    "more images": (1, {"images": 4}),
    "without guidance": (1, {"guidance_scale": 1.0}),
    "an interval": (2, {"guidance_interval": 5}),
    "another window": (1, {"method": "gumbel:window=5"}),
    "another method": (1, {"method": "ar"}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_captures_nothing_that_was_captured_before(name: str) -> None:
    pipe, (made, options) = drafting_pipeline(), CALLS[name]
    same_as_alone(pipe, 1, images=3)
    same_as_alone(pipe, made, **{"images": 3, **options})
    same_as_alone(pipe, 0, images=3)


@pytest.mark.parametrize(
    "method", ["ar", "sjd", "scd", "gsd", "eagle", "medusa", "lantern", "speculative", "mulo", "mulo-exact"]
)
def test_an_engine_of_any_method_serves_again(method: str) -> None:
    pipe = drafting_pipeline()
    for guidance_scale, made in ((3.0, None), (5.0, 0), (3.0, 0)):
        found, captured = tokens(pipe, 2, method, guidance_scale=guidance_scale)
        fresh = copy.copy(pipe)
        fresh._engines = KeptEngines()
        assert found == tokens(fresh, 2, method, guidance_scale=guidance_scale)[0]
        assert made is None or captured == made or method == "mulo"  # whose images take two passes here


def test_two_engines_are_kept() -> None:
    pipe = drafting_pipeline()
    for method, made in (("ar", 1), ("scd", 1), ("ar", 0), ("gsd", 1), ("ar", 0), ("scd", 1)):
        same_as_alone(pipe, made, method=method)


def test_other_networks_have_another_engine() -> None:
    pipe = drafting_pipeline()
    same_as_alone(pipe, 1)
    first = tokens(pipe)[0]
    pipe.transformer = copy.deepcopy(pipe.transformer)
    with torch.no_grad():
        pipe.transformer.output.weight.copy_(pipe.transformer.output.weight.flip(0).clone())
    same_as_alone(pipe, 1)
    assert tokens(pipe)[0] != first
    with torch.no_grad():
        pipe.transformer.output.weight.data = pipe.transformer.output.weight.data.flip(0).clone()
    same_as_alone(pipe, 1)


def test_a_call_that_ends_early_leaves_nothing_behind() -> None:
    pipe = drafting_pipeline()
    assert tokens(pipe, 3)[1] == 1
    stopped = lambda pipe, step, place, inputs: {"stop": step == 2}  # noqa: E731
    assert tokens(pipe, 3, callback_on_step_end=stopped)[1] == 0
    same_as_alone(pipe, 0, images=3)

    def fail(*arguments: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tokens(pipe, 3, callback_on_step_end=fail)
    same_as_alone(pipe, 1, images=3)


def test_a_call_within_a_call_has_an_engine_of_its_own() -> None:
    pipe, inner = drafting_pipeline(), []

    def call(pipe: Any, step: int, place: int, values: Any) -> None:
        if step == 3:
            inner.append(tokens(pipe, guidance_scale=5.0)[0])

    expected, alone = tokens(pipe)[0], tokens(pipe, guidance_scale=5.0)[0]
    assert tokens(pipe, callback_on_step_end=call)[0] == expected and inner == [alone]


def test_threads_and_copies_have_their_own() -> None:
    pipe, found = drafting_pipeline(), {}
    expected = {scale: tokens(pipe, 2, guidance_scale=scale)[0] for scale in (2.0, 5.0)}

    def run(scale: float) -> None:
        found[scale] = [tokens(pipe, 2, guidance_scale=scale)[0] for _ in range(3)]

    threads = [threading.Thread(target=run, args=(scale,)) for scale in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {scale: [each] * 3 for scale, each in expected.items()}
    assert not pickle.loads(pickle.dumps(pipe._engines))._kept


def test_without_memory_all_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = drafting_pipeline()
    same_as_alone(pipe, 1)
    assert pipe._engines._kept

    def fail(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(Engine, "_allocate", fail)
        tokens(pipe, method="scd")
    assert not pipe._engines._kept
    same_as_alone(pipe, 1)


def test_nothing_is_kept_where_passes_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = drafting_pipeline()
    with monkeypatch.context() as patch:
        patch.setattr("vargen.capture.make_graphs", lambda device: None)
        tokens(pipe)
    assert not pipe._engines._kept


def test_an_engine_that_captures_no_more_is_not_kept() -> None:
    pipe = drafting_pipeline()
    same_as_alone(pipe, 1)
    handle = pipe.transformer.register_forward_hook(lambda *arguments: None)
    for _ in range(2):
        same_as_alone(pipe, 0)
    handle.remove()
    same_as_alone(pipe, 1)


def test_an_engine_with_requests_is_not_started_again() -> None:
    pipe = drafting_pipeline()
    engine = Engine(pipe.decoding_model(3.0), "ar", batch_size=1)
    engine.submit(pipe.encode_condition(prompt=["a dog"])[0], torch.tensor([1]))
    with pytest.raises(ValueError, match="no requests"):
        engine.restart()


# -- language models --------------------------------------------------------------------------------------------------------


@needs_janus
def test_prompts_of_other_lengths_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vargen.models.transformers.decoding.captures_passes", lambda device: True)
    pipe = vargen.accelerate(*make_janus())

    def generate(pipe: Any, prompt: str, scale: float) -> Any:
        before = RecordedGraph.made
        generator = torch.Generator().manual_seed(3)
        options = {"accelerator": "gumbel:window=4", "output_type": "latent", "guidance_scale": scale}
        found = pipe(prompt, generator=generator, **options)
        return found.images.tolist(), RecordedGraph.made - before

    for prompt, scale, made in (("a dog", 3.0, 1), ("a red apple and a dog", 3.0, 0), ("dog", 6.0, 0), ("dog", 1.0, 1)):
        fresh = copy.copy(pipe)
        fresh._engines = KeptEngines()
        assert generate(pipe, prompt, scale) == (generate(fresh, prompt, scale)[0], made)


# -- slots ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llamagen", pytest.param("janus", marks=needs_janus)])
def test_images_with_other_scales_share_an_engine(family: str) -> None:
    """Each is the image that it is alone, by the model's scale or by its own."""
    pipe = drafting_pipeline() if family == "llamagen" else vargen.accelerate(*make_janus())
    condition, _ = pipe.encode_condition(prompt=["a dog"])
    engine, expected = Engine(pipe.decoding_model(2.0), "gumbel:window=4", batch_size=2), []
    for number, scale in enumerate((None, 7.0, 4.0)):
        engine.submit(replace(condition, scale=scale), torch.tensor([number]), Sampling(0.9, top_k=20))
        alone = Engine(pipe.decoding_model(scale or 2.0), "gumbel:window=4", batch_size=1)
        alone.submit(condition, torch.tensor([number]), Sampling(0.9, top_k=20))
        expected += [image.tokens.tolist() for image in alone.run()]
    found = {image.number: image.tokens.tolist() for image in engine.run()}
    assert [found[number] for number in range(3)] == expected
    assert len({str(each) for each in expected}) == 3
