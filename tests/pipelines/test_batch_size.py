"""`pipe(prompts, batch_size=...)`: the images of the list generated at once, with fewer at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_language_models import make_janus, needs_janus
from tiny_models import text_pipeline

import vargen
from vargen.decoding import Engine

PROMPTS = ["a red apple", "dog", "a very long prompt of many words about a cat with a hat", "tree", "car"]


def generate(pipe: Any, **options: Any) -> Any:
    generators = [torch.Generator().manual_seed(number) for number in range(5)]
    return pipe(generator=generators, output_type="latent", **options)


@needs_janus
def test_prompts_of_different_length_join_a_language_model() -> None:
    model, processor = make_janus()
    pipe = vargen.accelerate(model.double(), processor)
    for method in ("gumbel:window=4", "scd:window=3"):
        options = {"prompt": PROMPTS, "accelerator": method}
        assert torch.equal(generate(pipe, **options).images, generate(pipe, batch_size=2, **options).images)
    engine = Engine(pipe.decoding_model(1.0), "ar", batch_size=2)
    short, long = (pipe.encode_condition([prompt])[0] for prompt in (PROMPTS[1], PROMPTS[2]))
    engine.submit(short, torch.tensor([1]))
    engine.submit(long, torch.tensor([2]))
    found = {image.number: image for image in engine.run()}
    assert found[0].error is None and isinstance(found[1].error, ValueError)


def test_pixels_of_many_images_are_decoded_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, sizes = text_pipeline(), []
    tokens = torch.randint(64, (5, 4, 4), generator=torch.Generator().manual_seed(1))
    whole, real = pipe.decode_tokens(tokens, output_type="pt"), pipe.vqvae.decode
    monkeypatch.setattr(pipe.vqvae, "decode", lambda part: sizes.append(len(part)) or real(part))
    monkeypatch.setattr("vargen.pipelines.images._CELLS_AT_ONCE", 40)
    assert torch.allclose(pipe.decode_tokens(tokens, output_type="pt"), whole, atol=1e-6) and sizes == [2, 2, 1]
