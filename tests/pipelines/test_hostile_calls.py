"""Calls that no one means: one clear error each, before work starts, or the picture that was meant."""

import contextlib
import math

import numpy as np
import pytest
import torch
from PIL import Image
from rejects import rejects
from tiny_models import class_pipeline, text_pipeline, tiny_transformer

from vargen import Accelerator, LlamaGenPipeline
from vargen.decoding import Jacobi, Sampling, Speculative, decode
from vargen.models.tokenizers.vq import NonFinitePixelsError


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def classes() -> LlamaGenPipeline:
    pipe = class_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def texts() -> LlamaGenPipeline:
    pipe = text_pipeline()
    pipe.set_progress_bar_config(disable=True)
    pipe.register_modules(draft_transformer=tiny_transformer("text", n_layer=1))
    return pipe


# -- pixels -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def spoilt() -> LlamaGenPipeline:
    pipe = class_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_pixels_that_are_not_finite_are_an_error_and_no_image(spoilt, value):
    with torch.no_grad():
        spoilt.vqvae.decoder.conv_out.bias[1] = value
    for kind in ("pil", "np", "pt"):
        with pytest.raises(NonFinitePixelsError, match="first in image 1 of 2 at row 0, column 0 of 8 x 8"):
            spoilt(class_labels=[3, 4], output_type=kind)
    assert spoilt(class_labels=3, output_type="latent").images.shape == (1, 4, 4), "tokens are sound"


def test_the_first_bad_pixel_is_said_to_be_where_it_is(spoilt):
    tokens = torch.zeros(3, 4, 4, dtype=torch.int64)
    # The attention of the real decoder would spread it over the image.
    spoilt.vqvae.decode = lambda indices: torch.where(indices == 7, math.nan, 0.0)[:, None].expand(-1, 3, 4, 4)
    assert len(spoilt.decode_tokens(tokens)) == 3
    tokens[1, 2, 3] = 7
    with pytest.raises(NonFinitePixelsError, match="image 2 of 3 at row 2, column 3 of 4 x 4"):
        spoilt.decode_tokens(tokens)


def test_previews_of_bad_pixels_are_refused_too(spoilt):
    with torch.no_grad():
        spoilt.vqvae.post_quant_conv.weight[0, 0] = math.nan
    with pytest.raises(NonFinitePixelsError):
        spoilt.decode_tokens(torch.zeros(1, 16, dtype=torch.int64), torch.tensor([3]))


@pytest.mark.parametrize("part", ["encoder.conv_in.weight", "quant_conv.bias", "quantize.embedding.weight"])
def test_images_are_not_encoded_by_weights_that_hold_nan(spoilt, part):
    image = Image.new("RGB", (8, 8), "red")
    assert spoilt.encode_image(image).shape == (1, 4, 4)
    with torch.no_grad():
        spoilt.vqvae.get_parameter(part).view(-1)[0] = math.nan
    with pytest.raises(NonFinitePixelsError, match="first in image 1 of 1 at token row 0, column 0 of 4 x 4"):
        spoilt.encode_image(image)


def test_images_with_nan_are_refused(classes):
    pixels = torch.rand(1, 3, 8, 8)
    pixels[0, 1, 2, 3] = math.nan
    rejects(lambda: classes.encode_image(pixels), "images")


# -- conditions -------------------------------------------------------------------------------------------------------


def test_a_mask_may_be_a_list(texts):
    embeds, mask = texts.encode_prompt(["a red apple", "a cat"])
    options = {"output_type": "latent", "temperature": 0}
    expected = texts(prompt_embeds=embeds, prompt_mask=mask, **options).images
    for given in (mask.tolist(), mask.numpy(), mask.int(), mask.float()):
        assert torch.equal(expected, texts(prompt_embeds=embeds, prompt_mask=given, **options).images)


EMBEDS = torch.zeros(1, 12, 32)
MASK = torch.ones(1, 12)


WINDOW, LENGTH = Accelerator("w", Jacobi(10**23)), Accelerator("w", Speculative(10**23))
# By argument: what a call of a pipeline of classes and one of text may not be given.
BAD_VALUES = {
    "guidance_scale": (-1, math.nan, 10**400, 1e38), "temperature": (-0.5, math.nan, True), "top_k": (0, -5, 65),
    "top_p": (0.0, 1.5), "num_images_per_prompt": (0, 10**6), "guidance_interval": (-2, 1.5),
}  # fmt: skip
BAD_CLASS_CALLS = [
    ("class_labels", {"prompt": "a cat"}), ("negative_prompt", {"negative_prompt": "red"}),
    ("negative_prompt_embeds", {"negative_prompt_embeds": EMBEDS}), ("prompt_embeds", {"prompt_embeds": EMBEDS}),
]  # fmt: skip
BAD_TEXT_CALLS = [
    ("prompt", {}),
    ("class_labels", {"class_labels": 3}),
    *(("prompt_embeds", {"prompt_embeds": value}) for value in (
        torch.zeros(1, 5, 32), [[0.0]], EMBEDS[:0], EMBEDS.long(), EMBEDS + math.nan)),
    *(("prompt_mask", {"prompt_embeds": EMBEDS, "prompt_mask": value}) for value in (
        torch.ones(1, 5), "all", [[1], [1, 2]], [[True] * 5], MASK / 2)),
    ("prompt_mask", {"prompt": "a cat", "prompt_mask": MASK}),
    ("prompt", {"prompt": "a cat", "prompt_embeds": EMBEDS}),
    ("negative_prompt_mask", {"prompt": "a cat", "negative_prompt_mask": MASK}),
    ("negative_prompt_mask", {"prompt": "a cat", "negative_prompt": "red", "negative_prompt_mask": MASK}),
    ("negative_prompt_embeds", {"prompt": "a cat", "negative_prompt": "red", "negative_prompt_embeds": EMBEDS}),
    ("negative_prompt_embeds", {"prompt": "a cat", "negative_prompt_embeds": EMBEDS[:0]}),
    ("negative_prompt", {"prompt": "a cat", "negative_prompt_embeds": torch.zeros(3, 12, 32)}),
    ("window", {"prompt": "a cat", "accelerator": WINDOW}),
    ("length", {"prompt": "a cat", "accelerator": LENGTH}),
]  # fmt: skip


@pytest.mark.parametrize("argument", BAD_VALUES)
def test_bad_values_are_named(classes, texts, argument):
    for value in BAD_VALUES[argument]:
        for pipe, condition in ((classes, {"class_labels": 3}), (texts, {"prompt": "a cat"})):
            rejects(lambda: pipe(**condition, **{argument: value}), argument if value != 10**6 else "1024")  # noqa: B023


@pytest.mark.parametrize(("argument", "arguments"), BAD_CLASS_CALLS)
def test_bad_calls_of_a_class_model_are_named(classes, argument, arguments):
    rejects(lambda: classes(**{"class_labels": 3, **arguments}), argument)


@pytest.mark.parametrize(("argument", "arguments"), BAD_TEXT_CALLS)
def test_bad_calls_of_a_text_model_are_named(texts, argument, arguments):
    rejects(lambda: texts(**arguments), argument)


def test_numpys_numbers_generate_what_pythons_generate(texts):
    plain = {"num_images_per_prompt": 2, "guidance_scale": 2.5, "temperature": 0.5, "top_k": 9, "top_p": 0.5}
    numpys = {name: np.float32(value) if isinstance(value, float) else np.int64(value) for name, value in plain.items()}
    numpys["guidance_interval"] = np.int64(10**6)
    generated = [texts("a cat", generator=seeded(3), output_type="latent", **options).images for options in (plain, numpys)]
    assert torch.equal(*generated)


# -- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": [1]}, "seeds"),
        ({"seeds": torch.ones(1)}, "seeds"),
        ({"seeds": torch.ones(1, 1, dtype=torch.int64)}, "seeds"),
        ({"seeds": torch.ones(0, dtype=torch.int64)}, "seeds"),
        ({"sampling": {"temperature": 1}}, "sampling"),
        ({"callback": True}, "callback"),
        ({"model": None}, "model"),
        ({"seeds": torch.arange(3)}, "condition"),
        ({"accelerator": None}, "accelerator"),
        ({"sampling": Sampling(top_k=10**30)}, "top_k"),
    ],
)
def test_decode_says_what_it_takes(classes, change, message):
    condition, _ = classes.encode_condition(class_labels=3)
    arguments = {"model": classes.decoding_model(2.0), "seeds": torch.ones(1, dtype=torch.int64), **change}
    rejects(lambda: decode(condition=condition, **arguments), message)


# -- the parts of a call ----------------------------------------------------------------------------------------------


TOKENS = torch.zeros(2, 16, dtype=torch.int64)
BAD_TOKENS = [
    ("tokens", TOKENS + 64), ("tokens", TOKENS - 1), ("tokens", TOKENS.float()), ("tokens", [[0] * 16]),
    ("tokens", TOKENS[:, :15]), ("tokens", TOKENS[:0]), ("length", TOKENS, torch.tensor([1, 2, 3])),
    ("output_type", TOKENS, None, "jpeg"),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD_TOKENS, ids=lambda case: case[0])
def test_invalid_tokens_are_not_decoded(classes, case):
    argument, *arguments = case
    rejects(lambda: classes.decode_tokens(*arguments), argument)


@pytest.mark.parametrize("images", [None, [], "a.png", [Image.new("RGB", (8, 8)), 7], torch.zeros(8, 8), TOKENS[:0]])
def test_what_is_no_image_is_not_encoded(classes, images):
    rejects(lambda: classes.encode_image(images), "images")


@pytest.mark.parametrize("rows", [0, -1, 2.5, True])
def test_max_sequence_length_is_checked(texts, rows):
    rejects(lambda: texts.encode_prompt("a cat", max_sequence_length=rows), "max_sequence_length")


# -- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ar", "gumbel", "speculative"])
def test_autocast_around_a_call_changes_nothing(texts, method):
    shown = []
    for context in (contextlib.nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16)):
        accelerator = Accelerator("narrow", Jacobi(4, "gumbel")) if method == "gumbel" else method
        with context:
            shown.append(texts("a cat", accelerator=accelerator, generator=seeded(1), output_type="pt").images)
    assert shown[1].dtype == torch.float32 and torch.equal(*shown)


def test_autocast_around_the_parts_of_a_call_changes_nothing(texts):
    condition, _ = texts.encode_condition("a cat")
    seeds, tokens = torch.tensor([5]), torch.arange(16).view(1, 4, 4)
    image = torch.rand(1, 3, 8, 8, generator=seeded(0))

    def parts() -> list[torch.Tensor]:
        return [
            texts.encode_prompt("a cat")[0],
            decode(texts.decoding_model(2.0), condition, seeds).tokens,
            texts.decode_tokens(tokens, output_type="pt"),
            texts.encode_image(image),
        ]

    alone = parts()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        around = parts()
        assert torch.is_autocast_enabled("cpu"), "and it is on again afterwards"
    assert all(torch.equal(*pair) for pair in zip(alone, around, strict=True))
