"""Out of memory: halves, and a clear error if one image does not fit."""

import pytest
import torch
from rejects import rejects
from tiny_models import tiny_transformer, tiny_vq

from vargen import LlamaGenPipeline
from vargen.pipelines import llamagen


@pytest.fixture
def pipe():
    pipe = LlamaGenPipeline(vqvae=tiny_vq(), transformer=tiny_transformer("class"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def scarce(monkeypatch, most: int) -> list[int]:
    """Memory for `most` images; returns the sizes of the tries."""
    real, tries = llamagen.decode, []

    def decode(model, condition, seeds, *arguments, **options):
        tries.append(len(seeds))
        if len(seeds) > most:
            raise torch.OutOfMemoryError("no room")
        return real(model, condition, seeds, *arguments, **options)

    monkeypatch.setattr(llamagen, "decode", decode)
    return tries


def generate(pipe, count: int, **options):
    generators = [torch.Generator().manual_seed(seed) for seed in range(count)]
    settings = {"output_type": "latent", "guidance_scale": 2.0, "accelerator": "ar", **options}
    return pipe(class_labels=list(range(count)), generator=generators, **settings)


def test_halves_generate_the_same_images(pipe, monkeypatch, caplog):
    whole = generate(pipe, 5)
    tries = scarce(monkeypatch, 3)
    with caplog.at_level("WARNING", logger="vargen"):
        halves = generate(pipe, 5)
    assert tries == [5, 2, 3] and "two halves" in caplog.text
    assert torch.equal(halves.images, whole.images)
    for name in ("images", "tokens", "seeds", "committed_histogram", "relaxation"):
        assert getattr(halves.stats, name) == getattr(whole.stats, name)
    assert halves.stats.passes == 2 * whole.stats.passes
    assert halves.stats.passes_by_width == {1: 2 * whole.stats.passes_by_width[1]}


def test_halves_are_halved_again_until_one_image_does_not_fit(pipe, monkeypatch):
    tries = scarce(monkeypatch, 1)
    generate(pipe, 4)
    assert tries == [4, 2, 1, 1, 2, 1, 1]
    scarce(monkeypatch, 0)
    with pytest.raises(torch.OutOfMemoryError, match="one image"):
        generate(pipe, 1)


def test_pixels_are_decoded_in_halves_and_sampled_tokens_are_not_lost(pipe, monkeypatch, caplog):
    tokens = generate(pipe, 5).images
    whole, real, tries = pipe.decode_tokens(tokens, output_type="pt"), pipe.vqvae.decode, []

    def decode(tokens):
        tries.append(len(tokens))
        if len(tokens) > most:
            raise torch.OutOfMemoryError("no room")
        return real(tokens)

    most = 2
    monkeypatch.setattr(pipe.vqvae, "decode", decode)
    with caplog.at_level("WARNING", logger="vargen"):
        assert torch.allclose(pipe.decode_tokens(tokens, output_type="pt"), whole, atol=1e-6)
    assert tries == [5, 2, 3, 1, 2] and "pixels of 5 images" in caplog.text
    most = 0
    rejects(lambda: pipe.decode_tokens(tokens), "pixels", torch.OutOfMemoryError)


def test_stopping_in_the_first_half_leaves_the_other_undrawn(pipe, monkeypatch):
    scarce(monkeypatch, 2)
    result = generate(pipe, 4, callback_on_step_end=lambda *_: {"stop": True})
    assert result.stats.stopped and len(result.images) == 4
