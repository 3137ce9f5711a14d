"""What a pipeline of every registered family does: conventions of diffusers, seeds, batches, callbacks, bad input, files."""

import copy
import io
import json
import math
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from rejects import rejects
from tiny_families import TINY, Tiny, made, no_passes, seeded, seeds_of

from vargen import open_pipeline
from vargen.image_metadata import read_parameters
from vargen.pipelines.loading import find_pipeline_class, inspect_model, list_families
from vargen.pipelines.regeneration import regenerate

ALL = slice(0, 3)


@pytest.fixture(scope="module", params=TINY)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tiny, Any]:
    tiny = TINY[request.param]
    return tiny, tiny.open(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture
def new(opened: tuple[Tiny, Any], tmp_path: Path) -> Any:
    """A pipeline that a test may change."""
    return opened[0].open(tmp_path / "new")


def test_every_registered_family_is_tested() -> None:
    assert {tiny.pipeline for tiny in TINY.values()} == set(list_families())


def test_output_types_agree(opened: tuple[Tiny, Any]) -> None:
    tiny, pipe = opened
    images: Any = {kind: made(tiny.call(pipe, output_type=kind)) for kind in ("pil", "np", "pt", "latent")}
    array, side = images["np"], tiny.side
    assert array.shape[-3:] == (side, side, 3) and 0 <= array.min() <= array.max() <= 1
    assert np.array_equal(array, np.moveaxis(images["pt"].numpy(), -3, -1))
    pil = images["pil"][0] if isinstance(images["pil"][0], list) else images["pil"]
    assert all(isinstance(image, Image.Image) and image.size == (side, side) for image in pil)
    assert np.abs(np.stack(pil).reshape(array.shape) - array * 255).max() <= 0.51
    if pipe.paradigm != "video":
        assert images["latent"].dtype == torch.int64 and images["latent"].numel() == pipe.num_tokens
        assert np.allclose(pipe.decode_tokens(images["latent"], output_type="np"), array)
    (by_place,) = tiny.call(pipe, output_type="latent", return_dict=False)
    assert torch.equal(by_place, images["latent"])


def test_a_row_of_a_batch_is_what_it_is_alone(opened: tuple[Tiny, Any]) -> None:
    tiny, pipe = opened
    for method in tiny.methods:
        together = tiny.call(pipe, ALL, seeded(7, 8, 9), method, output_type="latent")
        assert seeds_of(together) == [7, 8, 9]
        for row in range(3):
            assert torch.equal(made(together)[row], made(tiny.call(pipe, row, 7 + row, method, output_type="latent"))[0])
        if pipe.paradigm != "video":
            parts = tiny.call(pipe, ALL, seeded(7, 8, 9), method, output_type="latent", batch_size=2)
            assert torch.equal(made(parts), made(together)) and parts.stats.passes > together.stats.passes


def test_calls_in_several_threads_generate_what_they_do_alone(opened: tuple[Tiny, Any]) -> None:
    tiny, pipe = opened
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda seed: made(tiny.call(pipe, seed % 3, seed)), range(12)))
    assert all(torch.equal(each, made(tiny.call(pipe, seed % 3, seed))) for seed, each in enumerate(together))


def test_seeds_and_conditions_matter(opened: tuple[Tiny, Any]) -> None:
    tiny, pipe = opened
    first, again, other_seed, other_row = (
        made(tiny.call(pipe, row, seed, output_type="latent")) for row, seed in ((0, 1), (0, 1), (0, 2), (1, 1))
    )
    assert torch.equal(first, again) and not torch.equal(first, other_seed) and not torch.equal(first, other_row)


def used() -> torch.Generator:
    """A generator from which numbers were sampled."""
    generator = seeded(5)[0]
    torch.rand(3, generator=generator)
    return generator


GENERATORS = {
    "one for all": (lambda: seeded(7)[0], 7),
    "a used one": (used, None),
    "a list of any kind": (lambda: [used(), torch.Generator(), seeded(2**64 - 1)[0]], None),
    "the same three times": (lambda: seeded(2**40) * 3, 2**40),
    "none": (lambda: None, 9),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_the_seeds_in_the_statistics_generate_the_same_again(opened: tuple[Tiny, Any], kind: str) -> None:
    (tiny, pipe), (generator, expected) = opened, GENERATORS[kind]
    torch.manual_seed(9)
    result = tiny.call(pipe, ALL, generator(), output_type="latent")
    seeds = seeds_of(result)
    assert len(set(seeds)) == 3 and expected in (None, seeds[0])
    for row, seed in enumerate(seeds):
        again = tiny.call(pipe, row, seed, output_type="latent")
        assert torch.equal(made(again)[0], made(result)[row]) and seeds_of(again) == [seed]
    if kind == "none":
        assert seeds_of(tiny.call(pipe, generator=None)) != [9], "the global generator has advanced"


def test_the_global_generator_is_not_reseeded(opened: tuple[Tiny, Any]) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    opened[0].call(opened[1])
    assert torch.equal(torch.rand(1), expected)


def test_the_progress_bar_counts_to_its_total(opened: tuple[Tiny, Any]) -> None:
    tiny, pipe = opened
    shown = io.StringIO()
    pipe.set_progress_bar_config(file=shown, disable=False, mininterval=0)
    try:
        tiny.call(pipe)
    finally:
        pipe.set_progress_bar_config(disable=True)
    total = tiny.options["num_blocks"] if tiny.options else pipe.num_tokens
    assert f"{total}/{total}" in shown.getvalue()


# -- callbacks ------------------------------------------------------------------------------------------------------------


def test_callbacks_stop_interrupt_and_raise_for_their_own_call(opened: tuple[Tiny, Any]) -> None:
    tiny, pipe = opened
    expected, steps = tiny.call(pipe), []

    def stop(given: Any, step: int, timestep: int, tensors: dict[str, Any]) -> dict[str, Any]:
        steps.append(step)
        assert given is pipe and (pipe.paradigm == "video" or "latents" in tensors)
        return {"stop": step == 1}

    def interrupt(given: Any, step: int, timestep: int, tensors: dict[str, Any]) -> dict[str, Any]:
        given._interrupt = step == 1
        return tensors

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for callback in (stop, interrupt):
        assert tiny.call(pipe, callback_on_step_end=callback).stats.stopped
    assert steps == [0, 1]
    with pytest.raises(ZeroDivisionError):
        tiny.call(pipe, callback_on_step_end=fail)
    after = tiny.call(pipe)
    assert not after.stats.stopped and not pipe.interrupt and torch.equal(made(after), made(expected))
    assert json.loads(json.dumps(after.stats.to_dict()))["accelerator"] == next(iter(tiny.methods))


def test_a_callback_returns_a_dictionary_or_none(opened: tuple[Tiny, Any]) -> None:
    tiny, pipe = opened
    for answer in (True, False, 0, "stop", [1], torch.zeros(1)):
        with pytest.raises(TypeError, match="callback_on_step_end"):
            tiny.call(pipe, callback_on_step_end=lambda *_, answer=answer: answer)


# -- bad input ------------------------------------------------------------------------------------------------------------

BAD = [
    ("generator", seeded(1, 2)), ("generator", "7"), ("output_type", "jpeg"), ("output_type", ["pil"]), ("accelerator", "aar"),
    ("accelerator", int), ("callback_on_step_end", 7), ("callback_on_step_end_tensor_inputs", 7),
    ("callback_on_step_end_tensor_inputs", ["noise"]), ("scorer", "nobody"), ("scorer", 3), ("seed", 7), ("height", 7),
    ("acelerator", 7),
]  # fmt: skip
BAD_PROMPTS = ["", "\u200b", "\ufe0f \u200d", "\u2066\u2069", ["a cat", "  "], [], 7, ["a cat", None], None]


@pytest.mark.parametrize(("argument", "value"), BAD)
def test_bad_arguments_are_named_before_anything_runs(opened: tuple[Tiny, Any], argument: str, value: Any) -> None:
    tiny, pipe = opened
    method = "sdvg" if argument == "scorer" and pipe.paradigm == "video" else None
    with no_passes(pipe), pytest.raises((ValueError, TypeError), match=argument) as caught:
        tiny.call(pipe, method=method, **{argument: value})
    assert "\n" not in str(caught.value)


def test_bad_conditions_are_named_before_anything_runs(opened: tuple[Tiny, Any]) -> None:
    tiny, pipe = opened
    for value in BAD_PROMPTS if tiny.argument == "prompt" else (10, -1, "kity", None, 1.5):
        with no_passes(pipe), pytest.raises((ValueError, TypeError), match=r"prompt|class.(label|name)"):
            pipe(**{tiny.argument: value})


def test_an_empty_negative_prompt_is_none(opened: tuple[Tiny, Any]) -> None:
    tiny, pipe = opened
    if pipe.paradigm != "video":
        plain = tiny.call(pipe, output_type="latent").images
        for blank in ("", "  ", None, [""], ["", ""]):
            assert torch.equal(tiny.call(pipe, output_type="latent", negative_prompt=blank).images, plain)


def test_why_a_method_is_not_available_is_what_a_call_says(opened: tuple[Tiny, Any]) -> None:
    tiny, pipe = opened
    for method in pipe.list_methods():
        if method.unsupported_reason is not None:
            with pytest.raises(ValueError) as caught:
                tiny.call(pipe, method=method.name)
            assert str(caught.value) == method.unsupported_reason


def test_weights_that_are_not_finite_make_no_image(opened: tuple[Tiny, Any], new: Any) -> None:
    with torch.no_grad():
        for weight in list(new.transformer.parameters())[-2:]:
            weight.view(-1)[0] = math.nan
    with pytest.raises(RuntimeError, match=r"NaN|finite"):
        opened[0].call(new)


# -- files and memory -----------------------------------------------------------------------------------------------------


def test_a_saved_image_is_generated_again_from_its_file(opened: tuple[Tiny, Any], tmp_path: Path) -> None:
    tiny, pipe = opened
    if pipe.fps is not None:
        return
    result = tiny.call(pipe, output_type="pil", generator=torch.Generator().manual_seed(7))
    assert re.fullmatch(r"<ImagePipelineOutput: \d images?, \d+ passes, .* tokens per pass, .* s, seeds? 7.*>", repr(result))
    parameters = read_parameters(result.save(tmp_path / "a.png"))
    with Image.open(tmp_path / "a.png") as original:
        assert regenerate(pipe, parameters, original).same_tokens
    rejects(lambda: result.save(tmp_path / "a.jpg"), "path")
    if pipe.paradigm == "next-token":
        log_probs = [
            tiny.call(pipe, slice(0, 2), seeded(1, 2), return_log_probs=True, batch_size=size).log_probs for size in (None, 1)
        ]
        assert log_probs[0].shape == (2, pipe.num_tokens) and torch.allclose(*log_probs, atol=1e-4)
    assert made(tiny.call(type(pipe).from_pipe(pipe))).equal(made(tiny.call(pipe)))


def test_a_saved_folder_is_described_and_opens(opened: tuple[Tiny, Any], tmp_path: Path) -> None:
    tiny, pipe = opened
    pipe.save_pretrained(tmp_path / "saved")
    info, again = inspect_model(tmp_path / "saved"), open_pipeline(tmp_path / "saved")
    assert type(again) is type(pipe) and find_pipeline_class(tmp_path / "saved") is type(pipe)
    for name in ("num_tokens", "num_baseline_passes", "fps", "vocab_size", "num_classes", "is_class_conditional"):
        assert getattr(info, name) == getattr(pipe, name), name
    parts = [{name for name, part in each.components.items() if part is not None} for each in (info, pipe)]
    assert type(info) is type(pipe) and parts[0] == parts[1] and info.transformer.device.type == "meta"
    assert not list(tmp_path.rglob("*.bin"))
    assert torch.equal(made(tiny.call(again)), made(tiny.call(pipe)))


def test_after_a_call_it_is_saved_copied_and_cast_as_a_new_one(opened: tuple[Tiny, Any], new: Any, tmp_path: Path) -> None:
    tiny, _ = opened
    expected = [made(tiny.call(new, method=method)) for method in tiny.methods]
    networks = {name: part for name, part in new.components.items() if isinstance(part, torch.nn.Module)}
    for network in networks.values():
        state = network.state_dict()
        assert all(value.is_contiguous() for value in state.values())
        safetensors.torch.save(state)
        torch.save(state, io.BytesIO())
        network.load_state_dict(copy.deepcopy(state))
    new.save_pretrained(tmp_path / "saved")
    for other in (open_pipeline(tmp_path / "saved"), copy.deepcopy(new), pickle.loads(pickle.dumps(new)), new):
        found = [made(tiny.call(other, method=method)) for method in tiny.methods]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    cast = [each.to(torch.bfloat16).to(torch.float32) for each in (new, tiny.open(tmp_path / "unused"))]
    assert torch.equal(*(made(tiny.call(each)) for each in cast)), "a cast back and forth changes no more than a cast"
    new.transformer.train()
    assert all(weight.is_contiguous() for weight in new.transformer.parameters()), "again as training needs them"


@pytest.mark.extended
@pytest.mark.parametrize(("name", "method"), [("emoji", "sjd"), ("emoji-var", "plain"), ("emoji-video", "target")])
def test_packaged_models_are_saved_after_a_call(name: str, method: str, tmp_path: Path) -> None:
    def generate(pipe: Any) -> Any:
        options = {"num_blocks": 2} if name == "emoji-video" else {}
        stop = {"callback_on_step_end": lambda _, step, *others: {"stop": step == 20}, "output_type": "latent"}
        return made(pipe("a red apple", accelerator=method, generator=seeded(3)[0], **stop, **options))

    pipe = open_pipeline(name)
    before = generate(pipe)
    pipe.save_pretrained(tmp_path / "saved")
    assert torch.equal(generate(open_pipeline(tmp_path / "saved")), before)


def test_model_offload_generates_the_same(opened: tuple[Tiny, Any], new: Any) -> None:
    """Weights are moved in for each network's `forward`: passes must go through it."""
    pytest.importorskip("accelerate")
    tiny, pipe = opened
    new.enable_model_cpu_offload(device="cpu")
    assert all(hasattr(new.components[name], "_hf_hook") for name in ("transformer", new.pixel_decoder))
    for method in tiny.methods:
        images = made(tiny.call(pipe, method=method))
        assert torch.equal(made(tiny.call(new, method=method)), images)
    if new.paradigm != "video":
        assert torch.equal(new.encode_image(images), pipe.encode_image(images))
