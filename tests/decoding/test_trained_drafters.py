"""Drafters trained on a target's features: exact whatever they learnt, perfect where they know the target itself.

In the table models a token's feature tells which token it is: a drafter with the target's own table is a perfect one if, and
only if, each token it is fed comes with the feature that the token was drawn by.
"""

from functools import partial

import pytest
import torch
from table_methods import SharedMedusa
from tiny_models import tiny_transformer

from vargen.decoding import (
    Accelerator,
    Drafter,
    DynamicTree,
    Eagle,
    Medusa,
    Sampling,
    decode,
    shared_noise,
    traversal,
)
from vargen.decoding.experimental import EagleSharedNoise, SampledTree, k_seq, recursive_rejection
from vargen.models.guidance import Condition, Guidance
from vargen.models.heads.decoding import EagleModel, MedusaHeads
from vargen.models.heads.network import EagleDrafter, MedusaDrafter
from vargen.models.llamagen.decoding import LlamaGenTokenModel
from vargen.verify.tables import TableEagle, TableMedusa, TableModel

TREE = DynamicTree(nodes=5, depth=2, children=2)


def chain(length: int) -> DynamicTree:
    return DynamicTree(nodes=length, depth=length, children=1)


def table(own: bool = False) -> TableModel:
    """With drafters that know another table, or its own."""
    model = TableModel(vocab=3, tokens=5, seed=4)
    known = model if own else TableModel(vocab=3, tokens=5, seed=77)
    model.draft_model, model.draft_heads = known, {"eagle": TableEagle(known), "medusa": TableMedusa(known)}
    return model


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize(("kind", "rule"), [(Eagle, recursive_rejection), (Eagle, traversal), (EagleSharedNoise, shared_noise)])
def test_a_chain_of_a_perfect_drafter_is_accepted_whole(length: int, kind, rule) -> None:
    assert passes(kind(chain(length)), rule) == 1 + -(-4 // (length + 1))


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        (Eagle(TREE), recursive_rejection), (EagleSharedNoise(TREE), shared_noise),
        *((SampledTree(branching=(2, 2)), rule) for rule in (recursive_rejection, k_seq)),
    ],
)  # fmt: skip
def test_first_children_of_a_perfect_drafter_are_accepted(drafter: Drafter, rule) -> None:
    assert passes(drafter, rule) == 1 + -(-4 // 3)


def passes(drafter: Drafter, rule) -> int:
    """Of images of two conditions, by a drafter that knows their table."""
    method = Accelerator("self", drafter, rule)
    return decode(table(own=True), torch.arange(64) % 2, torch.arange(64), method, Sampling(0.8, 2)).stats.passes


class WatchedHeads(TableMedusa):
    """Keeps the token that each feature belongs to, and the place of the root."""

    seen: list[tuple[torch.Tensor, torch.Tensor]]

    def forward(self, tokens, features, position):
        self.seen.append((features[:, 0, 0].long(), position))
        return super().forward(tokens, features, position)


def test_medusa_drafts_from_the_feature_that_predicted_the_root() -> None:
    """Whether a pass committed one token or several: the feature of a slot belongs to its token, the one before the root."""
    model = TableModel(vocab=3, tokens=9, seed=4)
    model.draft_heads = {"medusa": (heads := WatchedHeads(TableModel(vocab=3, tokens=9, seed=4)))}
    heads.seen = []
    method = Accelerator("mine", Medusa(chain(3)), recursive_rejection)
    result = decode(model, torch.arange(16) % 2, torch.arange(16), method)
    assert sum(count > 0 for count in result.stats.committed_histogram[1:]) > 2 < len(heads.seen)
    for before, position in heads.seen[1:]:
        inside = (position > 0) & (position < 8)  # at 8 an image is complete
        expected = result.tokens.gather(1, (position - 1).clamp(0, 8)[:, None])[:, 0]
        assert torch.equal(before[inside], expected[inside])


# -- LlamaGen -----------------------------------------------------------------------------------------------------------


def tiny(guidance: Guidance | float = 3.0, above: bool = False, **options) -> LlamaGenTokenModel:
    torch.manual_seed(2)
    eagle = EagleDrafter(dim=32, vocab_size=64, grid_size=4, n_head=2, multiple_of=32, above=above).eval()
    heads = {"eagle": partial(EagleModel, eagle), "medusa": partial(MedusaHeads, MedusaDrafter(32, 64, 4))}
    return LlamaGenTokenModel(tiny_transformer("class"), guidance, draft_heads=heads, **options)


CONDITION = Condition(class_labels=torch.tensor([1, 2, 7]))
SEEDS = torch.tensor([3, 4, 5])


@pytest.mark.parametrize("interval", [None, 6])
@pytest.mark.parametrize(
    ("shape", "guidance"), [(chain(3), 3.0), (DynamicTree(14, 3, 2, frontier=4), 1.0), (DynamicTree(9, 3, 3), 3.0)]
)
@pytest.mark.parametrize("kind", [EagleSharedNoise, SharedMedusa])
def test_coupled_drafts_generate_the_image_of_ar(kind, shape, guidance: float, interval: int | None) -> None:
    model = tiny(Guidance(guidance, interval), above=True)
    expected = decode(model, CONDITION, SEEDS, "ar", Sampling(top_k=20))
    found = decode(model, CONDITION, SEEDS, Accelerator("same", kind(shape), shared_noise), Sampling(top_k=20))
    assert torch.equal(found.tokens, expected.tokens) and found.stats.passes < expected.stats.passes


# -- bad input ----------------------------------------------------------------------------------------------------------


def test_trees_are_limited_to_the_vocabulary_and_the_grid() -> None:
    model = table()
    tokens = model.grid[0] * model.grid[1]
    narrow = Eagle(DynamicTree(nodes=20, depth=2, children=8)).bind(model, 1).shape
    assert narrow.children == model.vocab == 3 and narrow.nodes == 12
    assert Eagle(chain(4)).bind(model, 1).shape == chain(4)
    assert Eagle(chain(tokens + 4)).bind(model, 1).shape == chain(tokens - 1)
