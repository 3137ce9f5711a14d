"""On a CPU images are drawn in torch's inference mode; nothing that comes out of it, or stays behind, is of it."""

from typing import Any

import pytest
import torch
from tiny_models import class_pipeline
from torch import Tensor, nn

from vargen import LlamaGenPipeline
from vargen.decoding import decode
from vargen.models.guidance import Condition

CONDITION, SEEDS = Condition(torch.tensor([1, 4])), torch.tensor([3, 5])


@pytest.fixture
def pipe() -> LlamaGenPipeline:
    pipe = class_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def learn(tokens: Tensor) -> None:
    """Fails for a tensor of inference mode, which gradients cannot keep."""
    nn.Embedding(64, 3)(tokens).sum().backward()


@pytest.mark.parametrize("accelerator", ["ar", "gumbel", "gsd"])
def test_tokens_and_lengths_may_be_trained_on(pipe: LlamaGenPipeline, accelerator: str) -> None:
    seen: list[Tensor] = []

    def callback(progress: Any) -> None:
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        seen.extend((progress.tokens, progress.tokens.clone(), progress.length, progress.num_committed))

    generated = decode(pipe.decoding_model(2.0), CONDITION, SEEDS, accelerator, callback=callback)
    for tensor in (generated.tokens, generated.length, *seen):
        assert not tensor.is_inference()
        learn(tensor)
        tensor.add_(0)
    before = generated.tokens.clone()
    seen[0].zero_()  # the loop's own
    assert torch.equal(generated.tokens, before)


def test_a_generation_leaves_the_mode_as_it_was(pipe: LlamaGenPipeline) -> None:
    def callback(progress: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        decode(pipe.decoding_model(1.0), CONDITION, SEEDS, callback=callback)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
