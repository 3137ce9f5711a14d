"""Calls that no one means: one line that names the argument, before a network runs, for every kind of pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rejects import rejects
from tiny_families import brightness, no_passes, seeded
from tiny_language_models import has_release, make_janus
from tiny_models import class_pipeline, class_var_pipeline, text_pipeline, tiny_transformer
from tiny_video_folder import video_folder

import vargen
from vargen import open_pipeline
from vargen.decoding import Sampling, ScaleSchedule, Stage, decode

EMBEDS, MASK = torch.zeros(1, 12, 32), torch.ones(1, 12)
IMAGE, BLACK = Image.new("RGB", (8, 8), "red"), Image.new("L", (8, 8))
CAT = {"prompt": "a cat"}
OF_IMAGES = [
    *((name, {name: value}) for name, values in {
        "guidance_scale": (-1, math.nan, 10**400, 1e38), "temperature": (-0.5, math.nan, True), "top_k": (-5, 65),
        "top_p": (0.0, 1.5), "min_p": (-0.1, True),
        "num_images_per_prompt": (0,), "num_candidates": (0, 2.5), "batch_size": (0, 2.5, "2", 10**9),
    }.items() for value in values),
    ("1024", {"num_images_per_prompt": 10**6}), ("1024", {"num_candidates": 1025, "scorer": brightness}),
    ("scorer", {"num_candidates": 4}), ("scorer", {"num_candidates": 4, "scorer": 3}),
]  # fmt: skip
OF_TOKENS = [("guidance_interval", {"guidance_interval": value}) for value in (-2, 1.5)]
# By pipeline: what a call may not be given, and the argument that the error names.
BAD: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "classes": [
        *OF_IMAGES, *OF_TOKENS, ("class_labels", CAT), ("negative_prompt", {"negative_prompt": "red"}),
        ("negative_prompt_embeds", {"negative_prompt_embeds": EMBEDS}), ("prompt_embeds", {"prompt_embeds": EMBEDS}),
        ("scorer", {"class_labels": 1, "scorer": brightness}),  # a class without a name
    ],
    "texts": [
        *((name, {**CAT, **options}) for name, options in OF_IMAGES + OF_TOKENS),
        ("prompt", {}), ("class_labels", {"class_labels": 3}), ("emoji-var", {**CAT, "image": IMAGE}),
        *(("prompt_embeds", {"prompt_embeds": value}) for value in (
            torch.zeros(1, 5, 32), [[0.0]], EMBEDS[:0], EMBEDS.long(), EMBEDS + math.nan)),
        *(("prompt_mask", {"prompt_embeds": EMBEDS, "prompt_mask": value}) for value in (
            torch.ones(1, 5), "all", [[1], [1, 2]], [[True] * 5], MASK / 2)),
        ("prompt_mask", {**CAT, "prompt_mask": MASK}), ("prompt", {**CAT, "prompt_embeds": EMBEDS}),
        ("negative_prompt_mask", {**CAT, "negative_prompt_mask": MASK}),
        ("negative_prompt_mask", {**CAT, "negative_prompt": "red", "negative_prompt_mask": MASK}),
        ("negative_prompt_embeds", {**CAT, "negative_prompt": "red", "negative_prompt_embeds": EMBEDS}),
        ("negative_prompt_embeds", {**CAT, "negative_prompt_embeds": EMBEDS[:0]}),
        ("negative_prompt", {**CAT, "negative_prompt_embeds": torch.zeros(3, 12, 32)}),
        ("negative_prompt", {"prompt": ["a", "b"], "negative_prompt": ["a", "b", "c"]}),
        ("scorer", {"prompt_embeds": EMBEDS, "scorer": brightness}),
    ],
    "scales": [
        *OF_IMAGES, ("mask_image", {"mask_image": BLACK}), ("strength", {"strength": 0.5}), OF_TOKENS[0],
        *(("strength", {"image": IMAGE, "strength": value}) for value in (1.5, math.nan, True)),
        *(("image", {"image": value}) for value in (Image.new("RGB", (9, 9)), torch.zeros(1, 3, 8, 6), "a.png", [IMAGE] * 3)),
        *(("mask_image", {"image": IMAGE, "mask_image": value}) for value in (
            Image.new("L", (16, 16)), torch.zeros(4, 8), torch.full((8, 8), 2.0), torch.zeros(1, 3, 8, 8), "mask.png",
            torch.full((8, 8), 255.0), torch.full((8, 8), 255), torch.full((8, 8), math.nan), -torch.ones(8, 8),
            *(Image.fromarray(np.full((8, 8), number, kind)) for number, kind in (
                (math.nan, np.float32), (-1, np.float32), (70_000, np.int32))))),
        ("mask_image", {"class_labels": [3, 4, 5], "image": [IMAGE] * 3, "mask_image": [BLACK] * 2}),
        ("until", {"accelerator": ScaleSchedule(stages=(Stage(until=5), Stage()))}),
    ],
    "video": [(name, {**CAT, **options}) for name, options in (
        *(("num_blocks", {"num_blocks": value}) for value in (0, 10**9, 2.5)),
        ("tau", {"tau": math.nan}), ("tau", {"tau": 0.5, "accelerator": "stride"}), ("next-token", {"accelerator": "sjd"}),
        ("window", {"window": 1}), ("sinks", {"sinks": -1}), ("motion", {"motion": 2}),
        ("prompt_embeds", {"prompt": None, "prompt_embeds": torch.zeros(1, 3, 7), "accelerator": "stride"}),
        ("prompt_embeds", {"prompt": None, "prompt_embeds": torch.zeros(1, 3, 384)}),
        *(("preview_decoder", {"preview_decoder": value}) for value in ("taehv", torch.nn.Linear)),
    )],
    "janus": [(name, {**CAT, **options}) for name, options in (
        ("prompt", {"prompt": ""}), ("prompt", {"prompt": 3}), ("prompt", {"prompt": " ".join(["apple"] * 400)}),
        ("negative_prompt", {"negative_prompt": "b"}), ("top_k", {"top_k": 10**6}), ("output_type", {"output_type": "gif"}),
        ("plain", {"accelerator": "plain"}), ("guidance_scale", {"guidance_scale": -1}),
    )],
}  # fmt: skip


def text_with_draft(_: Path) -> Any:
    pipe = text_pipeline()
    pipe.register_modules(draft_transformer=tiny_transformer("text", n_layer=1))
    return pipe


MAKERS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "classes": (lambda _: class_pipeline(), {"class_labels": 3}),
    "texts": (text_with_draft, {}),
    "scales": (lambda _: class_var_pipeline(), {"class_labels": [3, 4]}),
    "video": (lambda folder: open_pipeline(video_folder(folder)), {}),
    "janus": (lambda _: vargen.accelerate(*make_janus()), {}),
}


@pytest.fixture(scope="module")
def pipes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if not has_release(name):
            pytest.skip("needs a newer transformers")
        if name not in made:
            made[name] = MAKERS[name][0](tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.mark.parametrize(("name", "number"), [(name, number) for name, calls in BAD.items() for number in range(len(calls))])
def test_bad_calls_are_named(pipes: Any, name: str, number: int) -> None:
    argument, options = BAD[name][number]
    with no_passes(pipe := pipes(name)):
        rejects(lambda: pipe(**{**MAKERS[name][1], **options}), argument)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"seeds": [1]}, "seeds"), ({"seeds": torch.ones(1)}, "seeds"),
        ({"seeds": torch.ones(1, 1, dtype=torch.int64)}, "seeds"), ({"seeds": torch.ones(0, dtype=torch.int64)}, "seeds"),
        ({"sampling": {"temperature": 1}}, "sampling"), ({"callback": True}, "callback"), ({"model": None}, "model"),
        ({"seeds": torch.arange(3)}, "condition"), ({"accelerator": None}, "accelerator"),
        ({"sampling": Sampling(top_k=10**30)}, "top_k"),
    ],
)  # fmt: skip
def test_decode_says_what_it_takes(pipes: Any, change: dict[str, Any], argument: str) -> None:
    condition, _ = pipes("classes").encode_condition(class_labels=3)
    arguments = {"model": pipes("classes").decoding_model(2.0), "seeds": torch.ones(1, dtype=torch.int64), **change}
    rejects(lambda: decode(condition=condition, **arguments), argument)


def test_prompt_embeds_replace_the_prompt_and_a_mask_may_be_a_list(pipes: Any) -> None:
    texts, prompts = pipes("texts"), ["a red apple", "a cat"]
    embeds, mask = texts.encode_prompt(prompts)
    options = {"output_type": "latent", "temperature": 0}
    expected = texts(prompts, **options).images
    for given in (mask, mask.tolist(), mask.numpy(), mask.int(), mask.float()):
        assert torch.equal(expected, texts(prompt_embeds=embeds, prompt_mask=given, **options).images)


# -- the parts of a call ----------------------------------------------------------------------------------------------

TOKENS, SCALES = torch.zeros(2, 16, dtype=torch.int64), torch.zeros(1, 30, dtype=torch.int64)
BAD_TOKENS = [
    *(("classes", "tokens", value) for value in (
        TOKENS + 64, TOKENS - 1, TOKENS.float(), [[0] * 16], TOKENS[:, :15], TOKENS[:0])),
    ("classes", "length", TOKENS, torch.tensor([1, 2, 3])), ("classes", "output_type", TOKENS, None, "jpeg"),
    *(("scales", "tokens", value) for value in (SCALES[:, :29], SCALES + 64, SCALES - 2, SCALES.float())),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD_TOKENS)))
def test_invalid_tokens_are_not_decoded(pipes: Any, number: int) -> None:
    name, argument, *arguments = BAD_TOKENS[number]
    rejects(lambda: pipes(name).decode_tokens(*arguments), argument)


@pytest.mark.parametrize(
    "images", [None, [], "a.png", [IMAGE, 7], torch.zeros(8, 8), TOKENS[:0], torch.full((1, 3, 8, 8), -1.0)]
)
def test_what_is_no_image_is_not_encoded(pipes: Any, images: Any) -> None:
    rejects(lambda: pipes("classes").encode_image(images), "images")


@pytest.mark.parametrize("rows", [0, -1, 2.5, True])
def test_max_sequence_length_is_checked(pipes: Any, rows: Any) -> None:
    rejects(lambda: pipes("texts").encode_prompt("a cat", max_sequence_length=rows), "max_sequence_length")


# -- images as numbers --------------------------------------------------------------------------------------------------


USES: dict[str, tuple[str, str, int, Callable[[Any, Any], torch.Tensor]]] = {
    "next-scale": ("scales", "image", 8, lambda pipe, image: pipe(
        class_labels=3, image=image, strength=0.4, generator=seeded(0)[0], output_type="latent").images),
    "video": ("video", "image", 16, lambda pipe, image: pipe(
        "a cat", image=image, generator=seeded(0)[0], num_blocks=1, accelerator="target", output_type="latent").frames),
    "next-token tokens": ("classes", "images", 8, lambda pipe, image: pipe.encode_image(image)),
    "next-scale tokens": ("scales", "images", 8, lambda pipe, image: pipe.encode_image(image)),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_numbers_are_those_of_an_image_or_refused(pipes: Any, use: str) -> None:
    name, argument, side, run = USES[use]
    array = np.random.default_rng(0).integers(0, 256, (1, side, side, 3), dtype=np.uint8)
    pixels = torch.from_numpy(array).permute(0, 3, 1, 2)
    scaled = pixels / 255
    expected = run(pipes(name), scaled)
    assert not torch.equal(expected, run(pipes(name), torch.ones_like(scaled)))
    for given in (array, pixels, scaled.permute(0, 2, 3, 1).numpy(), scaled.double(), Image.fromarray(array[0])):
        assert torch.equal(run(pipes(name), given), expected)
    for wrong in (255.0, -1.0, math.nan, math.inf):
        for given in (torch.full((1, 3, side, side), wrong), np.full((1, side, side, 3), wrong)):
            rejects(lambda given=given: run(pipes(name), given), argument, ValueError)  # type: ignore[misc]
    for dtype in (torch.int64, torch.bool, torch.int8):
        rejects(lambda dtype=dtype: run(pipes(name), torch.ones(1, 3, side, side, dtype=dtype)), argument, TypeError)  # type: ignore[misc]


def test_what_is_no_path_and_no_number_of_an_image_is_named(text_pipe: Any, tmp_path: Path) -> None:
    rejects(lambda: open_pipeline(None), "model", TypeError)
    result = text_pipe("a cat", generator=seeded(1))
    rejects(lambda: result.save(tmp_path / "a.png", 1), "number", ValueError)
    rejects(lambda: result.parameters(-1), "number", ValueError)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [("cuda:99",), (torch.device("cuda:99"), torch.float32), {"device": "gpu"}])
def test_a_pipeline_is_moved_to_a_device_that_is_there(pipes: Any, options: Any) -> None:
    for name in ("classes", "janus"):
        move = pipes(name).to
        rejects(lambda move=move: move(**options) if isinstance(options, dict) else move(*options), "device", ValueError)
        assert move("auto") is move("cpu", torch.float32)


def test_a_scorer_is_checked_where_the_method_scores_nothing(video_model: Path) -> None:
    pipe = open_pipeline(video_model)
    rejects(lambda: pipe.stream("a cat", accelerator="target", scorer="nope", image=False), "scorer", ValueError)
