"""Weights that lie transposed in memory are the same weights: for passes, files, casts, moves and training."""

import pytest
import torch
from tiny_models import tiny_transformer
from torch import nn

from vargen.kernels.linear_layout import transpose_linear_weights
from vargen.models.guidance import Condition
from vargen.models.llamagen.network import LlamaGenTransformer

CLASSES = Condition(class_labels=torch.tensor([1, 4]))
TOKENS = torch.arange(32).view(2, 16)


def transposed() -> LlamaGenTransformer:
    model = tiny_transformer("class")
    transpose_linear_weights(model)
    return model


def layouts(model: nn.Module) -> set[bool]:
    """Whether linear weights lie transposed; square ones of one row or column, which lie both ways, do not occur."""
    return {layer.weight.t().is_contiguous() for layer in model.modules() if isinstance(layer, nn.Linear)}


def test_what_lies_transposed_keeps_its_shape_and_values() -> None:
    plain, model = tiny_transformer("class"), transposed()
    assert (layouts(plain), layouts(model)) == ({False}, {True})
    for (name, weight), (other, same) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert name == other and torch.equal(weight, same) and same.requires_grad and not same.is_inference()
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS, CLASSES).logits, plain(TOKENS, CLASSES).logits)
    transpose_linear_weights(model, False)
    assert layouts(model) == {False} and torch.equal(model.output.weight, plain.output.weight)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_prefill_lays_them_out_and_leaves_them_fit_for_training(mode: type) -> None:
    model, plain = tiny_transformer("class"), tiny_transformer("class")
    with mode():
        model(condition=CLASSES, cache=model.new_cache(2))
    assert layouts(model) == {True}
    losses = []
    for network in (plain, model):
        network.train()
        optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
        for _ in range(3):
            loss = nn.functional.cross_entropy(network(TOKENS, CLASSES).logits.flatten(0, 1), TOKENS.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0] < 4
