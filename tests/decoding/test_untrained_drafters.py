"""Drafters without training: exact whatever they draft, and what they draft is what they say."""

import pytest
import torch

from vargen.decoding import (
    Accelerator,
    Drafter,
    Noise,
    Sampling,
    TokenState,
    decode,
    speculative_sampling,
)
from vargen.decoding.experimental import LayerSkip, Lookup, Recycle
from vargen.decoding.experimental.earlier_tokens import count_continuations
from vargen.verify.tables import TableModel

DRAFTERS = {
    "layer-skip": LayerSkip(3),
    "lookup": Lookup(3),
    "recycle": Recycle(3, top_k=2),
    "recycle, all kept": Recycle(4, top_k=9),
}


def started(drafter: Drafter, model: TableModel, tokens: list[int], count: int = 1, sampling: Sampling | None = None):
    """The bound drafter, and the state of images that begin with these tokens."""
    drafter, seeds, condition = drafter.bind(model, count), torch.arange(count), torch.zeros(count, dtype=torch.int64)
    state = TokenState(model, condition, count, drafter.width)
    state.reset(list(range(count)), seeds, seeds, sampling or Sampling())
    drafter.reset(state, seeds, condition, model.prefill(condition, state.cache))
    state.tokens[:, : len(tokens)], state.length[:] = torch.tensor(tokens), len(tokens)
    return drafter, state


def proposed(drafter: Drafter, state: TokenState, step: int = 3):
    return drafter.propose(state, Noise(state.seeds, state.length[:, None], step), drafter.width)


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_drafting_saves_passes(drafter):
    model = TableModel(vocab=5, tokens=60, seed=2, rows=6, spread=3.0)
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


def surroundings(row: list[int], place: int, vocab: int, columns: int) -> list[int]:
    """The tokens to the left, above, above right, and second to the left; `vocab` outside the grid."""
    line, column = divmod(place, columns)
    places = [(line, column - 1), (line - 1, column), (line - 1, column + 1), (line, column - 2)]
    return [row[y * columns + x] if y >= 0 and 0 <= x < columns else vocab for y, x in places]


@pytest.mark.parametrize("columns", [4, 7, 28])
def test_lookup_counts_what_followed_the_longest_surroundings_that_occurred_before(columns: int):
    vocab, widths = 3, set()
    tokens = torch.randint(vocab, (30, 28), generator=torch.Generator().manual_seed(columns))
    for place in range(1, 28):
        found = count_continuations(tokens, torch.full((30, 1), place), vocab, columns)
        for image, row in enumerate(tokens.tolist()):
            here, *before = (surroundings(row, each, vocab, columns) for each in (place, *range(place)))
            alike = {n: [row[p] for p, then in enumerate(before) if then[:n] == here[:n]] for n in (4, 3, 2, 1)}
            width = next((n for n in alike if alike[n]), 1)
            widths.add(width)
            assert found[image].tolist() == [alike[width].count(token) for token in range(vocab)]
    assert widths >= {1, 3, 4}


def test_nothing_is_drafted_after_a_token_that_has_not_occurred_or_past_the_grid():
    model = TableModel(vocab=5, tokens=8, rows=2)
    assert not proposed(*started(Lookup(2), model, [3])).valid.any()
    drafter, state = started(Lookup(2), model, [0, 0, 0])
    draft = proposed(drafter, state)
    assert draft.valid.all() and (draft.tokens == 0).all() and torch.equal(draft.probs[0, :, 0], torch.ones(2))
    state.tokens[:], state.length[:] = 0, 7
    assert proposed(drafter, state).valid.tolist() == [[True, False]]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_lookup_sharpens_its_counts(temperature: float):
    """After 1 came 2 three times and 4 once."""
    model, sampling = TableModel(vocab=5, tokens=20), Sampling(temperature)
    draft = proposed(*started(Lookup(1, sharpness=1.5), model, [1, 2, 1, 4, 1, 2, 1, 2, 0, 3, 1], sampling=sampling))
    weights = torch.tensor([0.0, 0.0, 3.0, 0.0, 1.0]) ** (1.5 / temperature)
    assert torch.allclose(draft.probs[0, 0], weights / weights.sum())


@pytest.mark.parametrize("drafter", [Lookup(3), Recycle(3, top_k=4)], ids=["lookup", "recycle"])
def test_drafts_are_sampled_with_the_probabilities_on_record(drafter):
    """Many images in one state: the share of each first draft is its probability, and drafts stay within their support."""
    count = 20_000
    drafter, state = started(drafter, TableModel(vocab=5, tokens=20, seed=2), [1, 2, 1, 4, 1, 2, 1, 2, 0, 3, 1], count)
    if isinstance(drafter, Recycle):
        drafter.candidates[:] = torch.tensor([[0, 1, 2, 4]])
        drafter.weights[:] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    draft = proposed(drafter, state)
    share = torch.bincount(draft.tokens[:, 0], minlength=5) / count
    assert torch.allclose(share, draft.probs[0, 0], atol=0.02) and draft.valid.all() and (share > 0.05).sum() > 1
    assert torch.allclose(draft.probs.sum(2), torch.ones(count, 3))
    assert (draft.probs.gather(2, draft.tokens[..., None]) > 0).all()
    assert not torch.equal(draft.tokens, proposed(drafter, state, step=4).tokens)
