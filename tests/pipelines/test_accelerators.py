"""What users are promised of accelerated pictures, on the packaged model."""

import pytest
import torch

from vargen import Accelerator, LlamaGenPipeline
from vargen.decoding import DEFAULT_METHOD, Jacobi
from vargen.decoding import costs as cost

PROMPTS = ["a red apple, 3d style", "a grinning face, flat style"]


@pytest.fixture(scope="module")
def emoji():
    return LlamaGenPipeline.from_pretrained("emoji", torch_dtype=torch.float32)


def generate(pipe, prompts, accelerator, seed=11, **options):
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    return pipe(prompts, accelerator=accelerator, generator=generators, output_type="latent", **options)


def upper_half(emoji, count, accelerator):
    """Images of which the upper half at least is generated."""
    result = generate(emoji, PROMPTS[:count], accelerator, callback_on_step_end=until(128))
    return result.images[:, :8], result.stats


def until(tokens):
    """A callback that stops once each image has that many tokens."""
    return lambda pipe, step, least, tensors: {"stop": least >= tokens}


@pytest.fixture(scope="module")
def sequential(emoji):
    return {count: upper_half(emoji, count, "ar")[0] for count in (1, 2)}


@pytest.mark.parametrize(("window", "count"), [(2, 1), (16, 2), (64, 1)])
def test_gumbel_generates_the_same_image_bit_for_bit(emoji, sequential, window, count):
    images, stats = upper_half(emoji, count, Accelerator("gumbel", Jacobi(window, "gumbel")))
    assert torch.equal(images, sequential[count])
    assert stats.passes < 128


@pytest.mark.parametrize(("dear", "count"), [(0.0, 2), (0.02, 1), (0.3, 1), (10.0, 1)])
def test_the_default_generates_the_image_of_ar_whatever_a_pass_costs(emoji, sequential, monkeypatch, dear, count):
    """A pass of W tokens that takes 1 + dear (W - 1) of one: from free drafts to drafts that never pay."""
    monkeypatch.setattr(cost, "_time_pass", lambda model, state, images, width: 1 + dear * (width - 1))
    monkeypatch.setattr(cost, "find_costs", lambda model, images: {})
    images, stats = upper_half(emoji, count, DEFAULT_METHOD)
    assert torch.equal(images, sequential[count])
    if dear == 0.0:
        assert stats.tokens_per_pass > 2
    if dear == 10.0:
        assert stats.tokens_per_pass == 1.0 and set(stats.passes_by_width) == {1}
