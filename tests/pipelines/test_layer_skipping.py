"""A transformer without some of its layers is the network that has only the others, and costs no memory for weights."""

import pytest
import torch
from rejects import rejects
from tiny_models import class_pipeline, tiny_transformer

from vargen.decoding import Accelerator, decode, speculative_sampling
from vargen.decoding.experimental import LayerSkip
from vargen.models.guidance import Condition
from vargen.models.llamagen.decoding import LlamaGenTokenModel


def models() -> tuple[LlamaGenTokenModel, Condition]:
    network = tiny_transformer("class", n_layer=4)
    return LlamaGenTokenModel(network, guidance=2.0), Condition(class_labels=torch.tensor([1, 7]))


def test_the_view_generates_as_the_network_that_has_only_the_other_layers():
    model, condition = models()
    short = tiny_transformer("class", n_layer=2)
    state = {name: value for name, value in model.transformer.state_dict().items() if not name.startswith("layers.")}
    for new, old in enumerate((0, 3)):
        part = model.transformer.layers[old].state_dict()
        state |= {f"layers.{new}.{name}": value for name, value in part.items()}
    short.load_state_dict(state)
    view = model.skip_layers((1, 2))
    assert (model.num_layers, view.num_layers) == (4, 2)
    seeds = torch.arange(2)
    generated = decode(view, condition, seeds, "ar")
    assert torch.equal(generated.tokens, decode(LlamaGenTokenModel(short, guidance=2.0), condition, seeds, "ar").tokens)
    assert not torch.equal(generated.tokens, decode(model, condition, seeds, "ar").tokens)


def test_a_target_that_skips_nothing_that_matters_accepts_every_draft():
    model, condition = models()
    for layer in (1, 2):  # which add nothing any more
        block = model.transformer.layers[layer]
        torch.nn.init.zeros_(block.attention.wo.weight)
        torch.nn.init.zeros_(block.feed_forward.w2.weight)
    stats = decode(
        model, condition, torch.arange(2), Accelerator(drafter=LayerSkip(4, skip=(1, 2)), acceptance=speculative_sampling)
    ).stats
    assert stats.committed_histogram[5] == 2 * 3  # token 0, then three chains of four and what follows each


@pytest.mark.parametrize("layers", [(4,), (-1,), (0, 1, 2, 3)])
def test_layers_that_cannot_be_skipped_are_refused(layers):
    model, _ = models()
    rejects(lambda: model.skip_layers(layers), "some")
    if max(layers) == 4:
        rejects(lambda: LayerSkip(skip=layers).bind(model, 1), "some")


def test_a_pipeline_says_what_keeps_it_from_skipping():
    pipe = class_pipeline()  # of two layers
    reasons = {method.name: method.unsupported_reason for method in pipe.list_methods()}
    assert "three" in reasons["layer-skip"] and reasons["lookup"] is None and reasons["recycle"] is None
    deeper = class_pipeline(n_layer=4)
    assert {method.name: method.unsupported_reason for method in deeper.list_methods()}["layer-skip"] is None
    deeper.transformer.layers[0]._hf_hook = object()  # as accelerate's offloading leaves one
    assert "offloaded" in {method.name: method.unsupported_reason for method in deeper.list_methods()}["layer-skip"]
