"""Trained drafters: a draft continues exactly as training unrolls it; what the up-sampler of tokens may see."""

from functools import partial

import pytest
import torch
from tiny_models import tiny_transformer

from vargen.decoding import Tree
from vargen.models.guidance import Condition
from vargen.models.heads.decoding import EagleModel, MedusaHeads
from vargen.models.heads.network import EagleDrafter, MedusaDrafter, TokenUpsampler
from vargen.models.llamagen.decoding import LlamaGenTokenModel
from vargen.training.heads import unroll_eagle

_N, _STEPS = 16, 3


def _eagle(above: bool) -> EagleDrafter:
    torch.manual_seed(3)
    drafter = EagleDrafter(dim=32, vocab_size=64, grid_size=4, n_head=2, multiple_of=32, above=above).eval()
    for parameter in drafter.parameters():  # as built it is nearly the identity, of which attention is no part
        torch.nn.init.normal_(parameter, std=0.3)
    drafter.feature_scale.uniform_(0.5, 2.0)
    drafter.token_scale.fill_(0.05)
    return drafter


def _condition() -> Condition:
    return Condition(class_labels=torch.tensor([1, 4]))


@pytest.mark.parametrize("above", [False, True])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@torch.no_grad()
def test_drafts_are_what_training_unrolls(above: bool, guidance: float) -> None:
    """Ragged commits of true features, then drafts on its own: the features of every step are those of teacher forcing."""
    transformer, drafter = tiny_transformer("class"), _eagle(above)
    model = LlamaGenTokenModel(transformer, guidance, draft_heads={"eagle": partial(EagleModel, drafter)})
    tokens, condition = torch.randint(64, (2, _N), generator=torch.Generator().manual_seed(0)), _condition()
    joined = condition if guidance == 1.0 else condition.cat(transformer.null_condition(condition))
    rows = tokens.repeat(model.rows_per_image, 1)
    hidden = transformer(rows, joined).hidden_states  # row j predicted token j
    over = torch.zeros_like(hidden)
    over[:, 3:] = hidden[:, 1:-2]  # slot j: behind the token above token j + 1, which is in slot j + 2 - 4 columns
    unrolled = unroll_eagle(drafter, hidden, transformer.tok_embeddings(rows), _STEPS, over if above else None)

    eagle = model.draft_heads["eagle"]
    state = eagle.allocate(2, 6)
    held = torch.zeros(2, dtype=torch.int64)
    every = torch.arange(2)
    for counts in ([1, 1], [3, 2], [1, 5]):  # as many newest tokens as two images may have
        count = torch.tensor(counts)
        A = max(counts)
        place = (held[:, None] + torch.arange(A)).clamp(max=_N - 1)
        known = hidden[torch.arange(len(hidden))[:, None], place.repeat(model.rows_per_image, 1)]
        out = eagle.forward(tokens.gather(1, place), known, state, Tree.make_chain(A - 1))
        root = held + count - 1
        eagle.commit(state, count - 1)
        features = out.features[torch.arange(len(hidden)), (count - 1).repeat(model.rows_per_image)][:, None]
        for step in range(_STEPS):
            expected = unrolled[step][torch.arange(len(hidden)), (root + step).repeat(model.rows_per_image)]
            known_above = not above or step <= 2  # with four columns, the token above is drafted itself from depth three on
            if known_above:
                torch.testing.assert_close(features[:, 0], expected, atol=2e-5, rtol=1e-4)
            logits = model.head(expected[:, None], (root + step)[:, None])
            if step and known_above:
                torch.testing.assert_close(out.logits, logits, atol=2e-4, rtol=1e-4)
            drafted = tokens[every, root + step + 1][:, None]
            out = eagle.forward(drafted, features, state, Tree.make_chain(step + 1))
            features = out.features
        eagle.commit(state, torch.ones_like(count))
        held += count


@torch.no_grad()
def test_a_tree_drafts_on_each_path_what_a_chain_would() -> None:
    model = LlamaGenTokenModel(tiny_transformer("class"), 3.0, draft_heads={"eagle": partial(EagleModel, _eagle(True))})
    eagle, root = model.draft_heads["eagle"], torch.tensor([[5], [9]])
    known = torch.randn(4, 1, 32)

    def begun():
        state = eagle.allocate(2, 5)
        out = eagle.forward(root, known, state, Tree.make_chain(0))
        eagle.commit(state, torch.zeros(2, dtype=torch.int64))
        return state, out.features

    state, features = begun()
    tree = Tree.from_parents((-1, 0, 0, 1, 2))  # two paths of two, fed level by level
    first = torch.tensor([[7, 8], [1, 2]])
    level = eagle.forward(first, features.expand(-1, 2, -1), state, Tree.from_parents((-1, 0, 0)))
    both = eagle.forward(torch.tensor([[3, 4], [5, 6]]), level.features, state, tree)
    for path in (0, 1):
        state, features = begun()
        one = eagle.forward(first[:, path : path + 1], features, state, Tree.make_chain(1))
        two = eagle.forward(torch.tensor([[3, 4], [5, 6]])[:, path : path + 1], one.features, state, Tree.make_chain(2))
        torch.testing.assert_close(level.features[:, path], one.features[:, 0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(both.logits[:, path], two.logits[:, 0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_an_image_that_is_reset_starts_as_in_a_new_state_and_changes_no_other() -> None:
    """Whatever was there before: an image that failed leaves NaN."""
    model = LlamaGenTokenModel(tiny_transformer("class"), 3.0, draft_heads={"eagle": partial(EagleModel, _eagle(True))})
    eagle, count = model.draft_heads["eagle"], torch.tensor([3, 3])
    tokens, known = torch.randint(64, (2, 5)), torch.randn(4, 5, 32)
    broken = known.clone()
    broken[[1, 3]] = torch.nan  # both rows of image 1

    def feed(state, features: torch.Tensor, first: int, last: int) -> torch.Tensor:
        return eagle.forward(tokens[:, first:last], features[:, first:last], state, Tree.make_chain(last - first - 1)).logits

    used, other, new = (eagle.allocate(2, 5) for _ in range(3))
    for state, features in ((used, broken), (other, known)):
        feed(state, features, 0, 3)
        eagle.commit(state, count)
    eagle.reset(used, torch.tensor([1]))
    found = feed(used, known, 3, 5)
    torch.testing.assert_close(found[0], feed(other, known, 3, 5)[0])
    torch.testing.assert_close(found[1], feed(new, known, 3, 5)[1])


@torch.no_grad()
def test_medusa_as_built_predicts_what_the_target_did() -> None:
    model = LlamaGenTokenModel(
        tiny_transformer("class"), 3.0, draft_heads={"medusa": partial(MedusaHeads, MedusaDrafter(32, 64, 4))}
    )
    _, out = model.start(_condition(), 1)
    logits = model.draft_heads["medusa"].forward(torch.tensor([3, 9]), out.features, torch.tensor([0, 0]))
    assert logits.shape == (2, 3, 64)
    torch.testing.assert_close(logits, out.logits.expand(-1, 3, -1), atol=1e-5, rtol=1e-5)


def tiny(**options) -> TokenUpsampler:
    torch.manual_seed(0)
    model = TokenUpsampler(**{"vocab_size": 32, "low_grid": 4, "grid_size": 8, "dim": 16, "blocks": 2} | options).eval()
    for parameter in model.parameters():  # as built, blocks are identities
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def inputs(B: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(32, (B, 64), generator=generator)
    return torch.randint(32, (B, 4, 4), generator=generator), tokens, torch.rand(B, 64, generator=generator) < 0.7


@torch.no_grad()
def test_a_token_sees_only_rows_above_it_and_the_whole_low_resolution():
    model, (low, tokens, known) = tiny(), inputs(1)
    known[:] = True
    plain = model(model.features(low), tokens, known)
    for at in range(64):
        other = tokens.clone()
        other[0, at] = (other[0, at] + 1) % 32
        moved = ((model(model.features(low), other, known) - plain).abs() > 1e-5).any(-1)[0].nonzero()[:, 0].tolist()
        row, column = divmod(at, 8)
        below = [r * 8 + c for r in range(row + 1, min(row + 4, 8)) for c in range(max(column - 2, 0), min(column + 3, 8))]
        assert moved == below
    low[0, 3, 3] = (low[0, 3, 3] + 1) % 32
    assert ((model(model.features(low), tokens, known) - plain).abs() > 1e-5).any(-1)[0, 0]


@torch.no_grad()
def test_unknown_tokens_are_not_looked_at():
    model, (low, tokens, known) = tiny(), inputs()
    other = torch.where(known, tokens, (tokens + 5) % 32)
    assert torch.equal(model(model.features(low), tokens, known), model(model.features(low), other, known))
    assert not torch.equal(model(model.features(low), tokens, known), model(model.features(low), tokens, known ^ True))


@torch.no_grad()
def test_positions_and_rows_of_a_batch_are_what_they_are_alone():
    model, (low, tokens, known) = tiny(), inputs()
    everything = model(model.features(low), tokens, known)
    position = torch.tensor([[0, 9, 63], [5, 5, 20]])
    some = model(model.features(low), tokens, known, position)
    assert torch.allclose(some, everything.gather(1, position[..., None].expand(-1, -1, 32)), atol=1e-5)
    alone = model(model.features(low[1:]), tokens[1:], known[1:])
    assert torch.allclose(alone, everything[1:], atol=1e-5)
