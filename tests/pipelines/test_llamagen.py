"""`LlamaGenPipeline`: prompts, guidance, callbacks, casts, and pixels and latents that are not finite."""

import logging
import math

import pytest
import torch
from PIL import Image
from tiny_families import seeded
from tiny_models import class_pipeline, text_pipeline

from vargen import LlamaGenPipeline
from vargen.models.tokenizers.vq import NonFinitePixelsError


def test_guidance_scale_one_equals_the_conditional_model(class_pipe):
    """At scale 1 the null rows are not run, and nothing of them is left."""
    one = class_pipe(class_labels=3, guidance_scale=1.0, temperature=0, output_type="latent").images
    nearly = class_pipe(class_labels=3, guidance_scale=1.0 + 1e-9, temperature=0, output_type="latent").images
    strong = class_pipe(class_labels=3, guidance_scale=9.0, temperature=0, output_type="latent").images
    assert torch.equal(one, nearly) and not torch.equal(one, strong)


def test_each_prompt_may_have_its_negative_prompt(text_pipe):
    options = {"num_images_per_prompt": 2, "output_type": "latent"}
    both = text_pipe(["apple", "cat"], negative_prompt=["red", "dog"], generator=seeded(0, 1, 2, 3), **options).images
    alone = text_pipe("cat", negative_prompt="dog", generator=seeded(2, 3), **options).images
    assert torch.equal(both[2:], alone)
    assert not torch.equal(alone, text_pipe("cat", negative_prompt="red", generator=seeded(2, 3), **options).images)


def test_negative_prompt_embeds_replace_the_negative_prompt(text_pipe):
    embeds, mask = text_pipe.encode_prompt("red")
    options = {"num_images_per_prompt": 2, "output_type": "latent"}
    expected = text_pipe(["apple", "cat"], negative_prompt="red", generator=seeded(0, 1, 2, 3), **options).images
    given = {"negative_prompt_embeds": embeds, "negative_prompt_mask": mask}
    assert torch.equal(expected, text_pipe(["apple", "cat"], **given, generator=seeded(0, 1, 2, 3), **options).images)
    embeds, mask = text_pipe.encode_prompt(["red", "dog"])
    expected = text_pipe(["apple", "cat"], negative_prompt=["red", "dog"], generator=seeded(0, 1, 2, 3), **options).images
    given = {"negative_prompt_embeds": embeds, "negative_prompt_mask": mask}
    assert torch.equal(expected, text_pipe(["apple", "cat"], **given, generator=seeded(0, 1, 2, 3), **options).images)


def test_caption_features_are_left_aligned(text_pipe):
    embeds, mask = text_pipe.encode_prompt(["apple", "a red apple on a blue table"])
    assert mask.sum(1).tolist() == [3, 9]
    assert mask[:, -1].all() and (mask.int().diff(dim=1) >= 0).all()
    assert embeds[~mask].abs().max() == 0 and embeds[mask].abs().sum(-1).min() > 0


@pytest.mark.parametrize("text", ["사과를 먹는", "a red apple on a blue table by the calm sea", "apple " * 1667])
def test_every_prompt_that_is_cut_is_reported(text_pipe, text, caplog):
    """Hangul too, of which one character is up to three tokens: these six are 15, and the model has twelve rows."""
    tokens = len(text_pipe.tokenizer(text)["input_ids"])
    assert tokens > 12
    with caplog.at_level(logging.WARNING, logger="vargen"):
        text_pipe.encode_prompt(text)
    assert f"the prompt has {tokens} tokens and the model reads 12: the rest is ignored" in caplog.text
    caplog.clear()
    text_pipe.encode_prompt("a short one")
    assert not caplog.records


def test_callback_has_diffusers_form(class_pipe):
    seen = []

    def callback(pipe, step, timestep, kwargs):
        seen.append((pipe is class_pipe, step, timestep, kwargs["latents"].shape))
        kwargs["latents"].fill_(64)  # a copy
        return kwargs

    options = {"class_labels": 3, "output_type": "latent", "accelerator": "ar"}
    given = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": ["latents"]}
    plain, called = (class_pipe(generator=seeded(1), **options, **more).images for more in ({}, given))
    assert seen == [(True, step, step + 1, (1, 16)) for step in range(16)]
    assert torch.equal(plain, called)


def test_prompts_are_encoded_without_the_networks_that_generate(text_pipe):
    alone = LlamaGenPipeline(None, None, text_pipe.text_encoder, text_pipe.tokenizer)
    embeds, mask = alone.encode_prompt("a red apple", max_sequence_length=12)
    expected = text_pipe.encode_prompt("a red apple")
    assert torch.equal(embeds, expected[0]) and torch.equal(mask, expected[1])
    with pytest.raises(ValueError, match="without a transformer: pass max_sequence_length"):
        alone.encode_prompt("a red apple")
    with pytest.raises(ValueError, match="it only encodes prompts"):
        alone("a red apple")
    with pytest.raises(ValueError, match="without a text encoder"):
        LlamaGenPipeline(text_pipe.vqvae, text_pipe.transformer).encode_prompt("a red apple")


def test_layerwise_casting_generates_the_same():
    """Weights stored in float16 and cast back for their layer; these weights lose nothing by it."""
    pipe = text_pipeline()
    for weight in pipe.transformer.parameters():
        weight.data = weight.data.half().float()
    expected = pipe("a red apple", generator=seeded(0)[0], output_type="pt").images
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    assert {weight.dtype for weight in pipe.transformer.layers.parameters()} == {torch.float16, torch.float32}
    assert torch.equal(expected, pipe("a red apple", generator=seeded(0)[0], output_type="pt").images)
    assert not any(weight.is_inference() for weight in pipe.transformer.parameters()), "they can still be trained"


def test_pixels_of_many_images_are_decoded_some_at_a_time(text_pipe, monkeypatch):
    sizes, real = [], text_pipe.vqvae.decode
    tokens = torch.randint(64, (5, 4, 4), generator=seeded(1)[0])
    whole = text_pipe.decode_tokens(tokens, output_type="pt")
    monkeypatch.setattr(text_pipe.vqvae, "decode", lambda part: sizes.append(len(part)) or real(part))
    monkeypatch.setattr("vargen.pipelines.images._CELLS_AT_ONCE", 40)
    assert torch.allclose(text_pipe.decode_tokens(tokens, output_type="pt"), whole, atol=1e-6) and sizes == [2, 2, 1]


@pytest.fixture
def spoilt() -> LlamaGenPipeline:
    return class_pipeline()


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


@pytest.mark.parametrize("part", ["encoder.conv_in.weight", "quant_conv.bias", "quantize.embedding.weight"])
def test_images_are_not_encoded_by_weights_that_hold_nan(spoilt, part):
    image = Image.new("RGB", (8, 8), "red")
    assert spoilt.encode_image(image).shape == (1, 4, 4)
    with torch.no_grad():
        spoilt.vqvae.get_parameter(part).view(-1)[0] = math.nan
    with pytest.raises(NonFinitePixelsError, match="first in image 1 of 1 at token row 0, column 0 of 4 x 4"):
        spoilt.encode_image(image)
