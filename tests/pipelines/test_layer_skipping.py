"""A transformer without some of its layers is the network that has only the others, and costs no memory for weights."""

import torch
from tiny_models import tiny_transformer

from vargen.decoding import decode
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
