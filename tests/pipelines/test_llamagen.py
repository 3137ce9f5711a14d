"""`LlamaGenPipeline`: conventions of diffusers, seeds, batches, and what bad input gets."""

import json
import logging

import pytest
import torch
from tiny_models import class_pipeline, text_pipeline, tiny_transformer, tiny_vq

from vargen import LlamaGenPipeline


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.fixture(scope="module")
def classes() -> LlamaGenPipeline:
    pipe = class_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def texts() -> LlamaGenPipeline:
    pipe = text_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_class_names(classes):
    by_name = classes(class_labels="Kitty", generator=seeded(0)[0], output_type="latent").images
    by_number = classes(class_labels=3, generator=seeded(0)[0], output_type="latent").images
    assert torch.equal(by_name, by_number)


def test_guidance_scale_one_equals_the_conditional_model(classes):
    """At scale 1 the null rows are not run, and nothing of them is left."""
    one = classes(class_labels=3, guidance_scale=1.0, temperature=0, output_type="latent").images
    nearly = classes(class_labels=3, guidance_scale=1.0 + 1e-9, temperature=0, output_type="latent").images
    strong = classes(class_labels=3, guidance_scale=9.0, temperature=0, output_type="latent").images
    assert torch.equal(one, nearly) and not torch.equal(one, strong)


def test_each_prompt_may_have_its_negative_prompt(texts):
    options = {"num_images_per_prompt": 2, "output_type": "latent"}
    both = texts(["apple", "cat"], negative_prompt=["red", "dog"], generator=seeded(0, 1, 2, 3), **options).images
    alone = texts("cat", negative_prompt="dog", generator=seeded(2, 3), **options).images
    assert torch.equal(both[2:], alone)
    assert not torch.equal(alone, texts("cat", negative_prompt="red", generator=seeded(2, 3), **options).images)


def test_negative_prompt_embeds_replace_the_negative_prompt(texts):
    embeds, mask = texts.encode_prompt("red")
    options = {"num_images_per_prompt": 2, "output_type": "latent"}
    expected = texts(["apple", "cat"], negative_prompt="red", generator=seeded(0, 1, 2, 3), **options).images
    given = {"negative_prompt_embeds": embeds, "negative_prompt_mask": mask}
    assert torch.equal(expected, texts(["apple", "cat"], **given, generator=seeded(0, 1, 2, 3), **options).images)
    embeds, mask = texts.encode_prompt(["red", "dog"])
    expected = texts(["apple", "cat"], negative_prompt=["red", "dog"], generator=seeded(0, 1, 2, 3), **options).images
    given = {"negative_prompt_embeds": embeds, "negative_prompt_mask": mask}
    assert torch.equal(expected, texts(["apple", "cat"], **given, generator=seeded(0, 1, 2, 3), **options).images)


def test_caption_features_are_left_aligned(texts):
    embeds, mask = texts.encode_prompt(["apple", "a red apple on a blue table"])
    assert mask.sum(1).tolist() == [3, 9]
    assert mask[:, -1].all() and (mask.int().diff(dim=1) >= 0).all()
    assert embeds[~mask].abs().max() == 0 and embeds[mask].abs().sum(-1).min() > 0


@pytest.mark.parametrize("text", ["사과를 먹는", "a red apple on a blue table by the calm sea", "apple " * 1667])
def test_every_prompt_that_is_cut_is_reported(texts, text, caplog):
    """Hangul too, of which one character is up to three tokens: these six are 15, and the model has twelve rows."""
    tokens = len(texts.tokenizer(text)["input_ids"])
    assert tokens > 12
    with caplog.at_level(logging.WARNING, logger="vargen"):
        texts.encode_prompt(text)
    assert f"the prompt has {tokens} tokens and the model reads 12: the last {tokens - 12} are ignored" in caplog.text
    caplog.clear()
    texts.encode_prompt("a short one")
    assert not caplog.records


def test_callback_has_diffusers_form(classes):
    seen = []

    def callback(pipe, step, timestep, kwargs):
        seen.append((pipe is classes, step, timestep, kwargs["latents"].shape))
        kwargs["latents"].fill_(64)  # a copy
        return kwargs

    options = {"class_labels": 3, "output_type": "latent", "accelerator": "ar"}
    given = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": ["latents"]}
    plain, called = (classes(generator=seeded(1), **options, **more).images for more in ({}, given))
    assert seen == [(True, step, step + 1, (1, 16)) for step in range(16)]
    assert torch.equal(plain, called)


def test_prompts_are_encoded_without_the_networks_that_generate(texts):
    alone = LlamaGenPipeline(None, None, texts.text_encoder, texts.tokenizer)
    embeds, mask = alone.encode_prompt("a red apple", max_sequence_length=12)
    expected = texts.encode_prompt("a red apple")
    assert torch.equal(embeds, expected[0]) and torch.equal(mask, expected[1])
    with pytest.raises(ValueError, match="without a transformer: pass max_sequence_length"):
        alone.encode_prompt("a red apple")
    with pytest.raises(ValueError, match="it only encodes prompts"):
        alone("a red apple")
    with pytest.raises(ValueError, match="without a text encoder"):
        LlamaGenPipeline(texts.vqvae, texts.transformer).encode_prompt("a red apple")


def test_layerwise_casting_generates_the_same():
    """Weights stored in float16 and cast back for their layer; these weights lose nothing by it."""
    pipe = text_pipeline()
    pipe.set_progress_bar_config(disable=True)
    for weight in pipe.transformer.parameters():
        weight.data = weight.data.half().float()
    expected = pipe("a red apple", generator=seeded(0)[0], output_type="pt").images
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    assert {weight.dtype for weight in pipe.transformer.layers.parameters()} == {torch.float16, torch.float32}
    assert torch.equal(expected, pipe("a red apple", generator=seeded(0)[0], output_type="pt").images)
    assert not any(weight.is_inference() for weight in pipe.transformer.parameters()), "they can still be trained"


def test_a_t5_encoder_is_a_component_like_any_other(tmp_path, texts):
    """The official text models': transformers' T5 encoder, saved and opened with the pipeline."""
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(vocab_size=30522, d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    pipe = LlamaGenPipeline(
        vqvae=tiny_vq(),
        transformer=tiny_transformer("text", caption_dim=24),
        text_encoder=T5EncoderModel(config).eval(),
        tokenizer=texts.tokenizer,
    )
    pipe.set_progress_bar_config(disable=True)
    expected = pipe("a red apple", generator=seeded(0)[0], output_type="latent").images
    pipe.save_pretrained(tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model_index.json").read_text())
    assert index["text_encoder"] == ["transformers", "T5EncoderModel"]
    again = LlamaGenPipeline.from_pretrained(tmp_path / "model", torch_dtype=torch.float32)
    assert torch.equal(again("a red apple", generator=seeded(0)[0], output_type="latent").images, expected)
    assert not torch.equal(again("a green dog", generator=seeded(0)[0], output_type="latent").images, expected)
