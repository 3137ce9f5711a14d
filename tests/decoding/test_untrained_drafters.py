"""Drafters without training: exact whatever they draft, and what they draft is what they say."""

import pytest
import torch

from vargen.decoding import Accelerator, LayerSkip, Lookup, Noise, Recycle, Sampling, decode, speculative_sampling
from vargen.decoding.next_token.drafters.lookup import NGramIndex, make_context_keys
from vargen.evaluation.table_models import TableModel

DRAFTERS = {
    "layer-skip": LayerSkip(3),
    "lookup": Lookup(3, max_matches=7),
    "lookup, in the picture alone": Lookup(3, max_matches=0),
    "recycle": Recycle(3, top_k=2),
    "recycle, all kept": Recycle(4, top_k=9),
}


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_drafting_saves_passes(drafter):
    model = TableModel(vocab=5, tokens=60, seed=2, rows=6, spread=3.0)
    model.example_tokens = decode(model, torch.zeros(200, dtype=torch.int64), torch.arange(200) + 999).tokens
    method = Accelerator(drafter=drafter, acceptance=speculative_sampling)
    assert decode(model, torch.zeros(16, dtype=torch.int64), torch.arange(16), method).stats.tokens_per_pass > 1.2


# -- layer skipping ---------------------------------------------------------------------------------------------------


def test_a_share_of_the_layers_leaves_out_inner_ones():
    for count in range(3, 40):
        for share in (0.1, 0.4, 0.5, 0.9):
            skipped = LayerSkip(skip=share).select_layers(count)
            assert 0 not in skipped and count - 1 not in skipped and len(set(skipped)) == len(skipped) >= 1
            assert len(skipped) <= max(1, round(share * count))


def test_layers_are_given_by_number():
    assert LayerSkip(skip="3+5+6") == LayerSkip(skip=(3, 5, 6)) and LayerSkip(skip="3+5+6").select_layers(9) == (3, 5, 6)


# -- lookup -----------------------------------------------------------------------------------------------------------


def test_an_index_counts_the_tokens_of_the_longest_known_surroundings():
    generator = torch.Generator().manual_seed(0)
    examples = torch.randint(4, (50, 12), generator=generator)
    index = NGramIndex(examples, 4, 4)
    shown = torch.randint(4, (30, 12), generator=generator)
    place = torch.full((30, 1), 6)
    key = make_context_keys(shown, place, 4, 4)
    found = index.find(key[:, 0], 600)
    there = make_context_keys(examples, torch.arange(12).expand(50, 12), 4, 4)
    for image in range(30):
        for width in (1, 5, 25, 125):
            alike = there // width == key[image] // width
            if alike.any():
                break
        wanted = torch.bincount(examples[alike], minlength=4) / alike.sum()
        assert torch.allclose(torch.bincount(found[image], minlength=4) / 600, wanted, atol=0.02)


def test_a_token_that_no_example_has_is_not_drafted_after():
    index = NGramIndex(torch.zeros(3, 8, dtype=torch.int16), 5, 4)
    assert (index.find(torch.tensor([3 * 6**3]), 4) == -1).all()
    model = TableModel(vocab=5, tokens=8, rows=2)
    model.example_tokens = torch.zeros(3, 8, dtype=torch.int16)
    drafter = Lookup(2, image_weight=0).bind(model)
    state = drafter.start(model, None, torch.tensor([1]), Sampling(), None)
    tokens = torch.tensor([[3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]])
    noise = Noise(torch.tensor([1]), torch.tensor([[1]]), 1)
    assert not drafter.propose(state, tokens, torch.tensor([1]), noise).valid.any()
    tokens[0, 0] = 0
    draft = drafter.propose(state, tokens, torch.tensor([1]), noise)
    assert draft.valid.all() and (draft.tokens == 0).all() and torch.equal(draft.probs[0, :, 0], torch.ones(2))


@pytest.mark.parametrize("drafter", [Lookup(3, max_matches=7), Recycle(3, top_k=4)], ids=["lookup", "recycle"])
def test_drafts_are_sampled_with_the_probabilities_on_record(drafter):
    """Many images in one state: the share of each first draft is its probability, and drafts stay within their support."""
    model = TableModel(vocab=5, tokens=20, seed=2, rows=4)
    model.example_tokens = torch.randint(5, (40, 20), generator=torch.Generator().manual_seed(1))
    count = 20_000
    seeds = torch.arange(count)
    state = drafter.bind(model).start(model, None, seeds, Sampling(), None)
    if isinstance(drafter, Recycle):
        state.candidates[:] = torch.tensor([[0, 1, 2, 4]])
        state.weights[:] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    tokens = torch.tensor([3, 1, 1, 4, 2, 1] + [0] * 20).expand(count, -1)
    length = torch.full((count,), 6)
    draft = drafter.propose(state, tokens, length, Noise(seeds, length[:, None], 3))
    share = torch.bincount(draft.tokens[:, 0], minlength=5) / count
    assert torch.allclose(share, draft.probs[0, 0], atol=0.02) and draft.valid.all()
    assert torch.allclose(draft.probs.sum(2), torch.ones(count, 3))
    assert (draft.probs.gather(2, draft.tokens[..., None]) > 0).all()
    later = drafter.propose(state, tokens, length, Noise(seeds, length[:, None], 4))
    assert not torch.equal(draft.tokens, later.tokens)


# -- bad input --------------------------------------------------------------------------------------------------------
