"""Laws of the cache: whatever passes it is filled by, the next logits are those of the tokens it holds."""

from typing import Any

import pytest
import torch
from tiny_models import attentive_transformer
from torch import Tensor

from vargen.models.guidance import Condition
from vargen.models.kv_cache import KVCache
from vargen.models.llamagen.network import LlamaGenTransformer

_ROWS, _GRID, _VOCAB = 3, 4, 40
_N = _GRID**2
# float32 sums in another order; logits have a standard deviation of about 2.
_CLOSE: dict[str, float] = {"atol": 2e-5, "rtol": 1e-5}


@pytest.fixture(params=["class", "text"])
def model(request: pytest.FixtureRequest) -> LlamaGenTransformer:
    return attentive_transformer(request.param)


@pytest.fixture
def condition(model: LlamaGenTransformer) -> Condition:
    if model.config.condition == "class":
        return Condition(class_labels=torch.tensor([1, 4, 10]))
    visible = torch.tensor([6, 1, 3])
    mask = torch.arange(6) >= 6 - visible[:, None]
    return Condition(caption_embeds=torch.randn(_ROWS, 6, 12) * mask[..., None], caption_mask=mask)


@pytest.fixture
def tokens(model: LlamaGenTransformer) -> Tensor:
    """`[3, 16]`, a picture per row."""
    return torch.randint(_VOCAB, (_ROWS, _N), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.inference_mode():
        yield


def _filled(
    model: LlamaGenTransformer, condition: Condition, tokens: Tensor, lengths: list[int], scratch: int = 6, **options: Any
) -> KVCache:
    """A cache that holds the first `lengths[row]` tokens of each row, fed one at a time."""
    cache = model.new_cache(len(lengths), scratch=scratch, **options)
    model(condition=condition, cache=cache)
    for position in range(max(lengths)):
        model(tokens[:, position : position + 1], cache=cache)
        cache.commit_chain(1)
    cache.rollback(torch.tensor(lengths))
    return cache


def _ahead(tokens: Tensor, lengths: list[int], T: int) -> Tensor:
    """The T tokens `[R, T]` that follow what each row holds."""
    return torch.stack([row[n : n + T] for row, n in zip(tokens, lengths, strict=True)])


# -- the prefix ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_the_compressed_prefix_is_the_long_one(seed: int) -> None:
    """Over whole pictures with random masks, an empty and a full one among them, and teacher forcing agrees with both."""
    rows, P = 6, 24
    network = attentive_transformer("text", n_layer=3, n_head=2, cls_token_num=P)
    torch.manual_seed(seed)
    mask = torch.rand(rows, P) < torch.rand(rows, 1)  # holes too, not only left padding
    mask[0], mask[1] = False, True
    condition = Condition(caption_embeds=torch.randn(rows, P, 12), caption_mask=mask)
    tokens = torch.randint(_VOCAB, (rows, _N))
    logits, size = [], []
    for compress in (True, False):
        cache = network.new_cache(rows, scratch=_N, compress_prefix=compress)
        first = network(condition=condition, cache=cache).logits
        logits.append(torch.cat([first, network(tokens[:, :-1], cache=cache).logits], dim=1))
        size.append(cache.kv.nbytes)
        assert cache.prefix == (1 if compress else P)
    torch.testing.assert_close(*logits, **_CLOSE)
    torch.testing.assert_close(network(tokens, condition).logits, logits[0], **_CLOSE)
    assert size[1] - size[0] == 2 * 3 * rows * (P - 1) * 48 * 4


# -- rollbacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moved", [True, False])
def test_what_is_rolled_back_was_never_fed(
    moved: bool, model: LlamaGenTransformer, condition: Condition, tokens: Tensor
) -> None:
    lengths = [2, 5, 8]
    clean, used = (_filled(model, condition, tokens, lengths) for _ in range(2))
    model((_ahead(tokens, lengths, 6) + 7) % _VOCAB, cache=used)  # other tokens
    if moved:
        used.commit_chain(torch.tensor([6, 1, 3]))
        used.rollback(torch.tensor(lengths))
    fed = _ahead(tokens, lengths, 4)
    assert torch.equal(model(fed, cache=used).logits, model(fed, cache=clean).logits), "to the last bit"


# -- trees -----------------------------------------------------------------------------------------------------------

_PARENTS = [-1, 0, 0, 1, 1, 3]


def _ancestors(parents: list[int]) -> Tensor:
    table = torch.eye(len(parents), dtype=torch.bool)
    for slot, parent in enumerate(parents):
        if parent >= 0:
            table[slot] |= table[parent]
    return table


def _tree_pass(model: LlamaGenTransformer, cache: KVCache, fed: Tensor, ancestors: Tensor) -> Tensor:
    positions = cache.length[:, None] + ancestors.sum(-1) - 1
    return model(fed, cache=cache, positions=positions, ancestors=ancestors).logits


# -- the end of the grid ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("full", [_N, _N - 1])
def test_a_row_at_its_end_disturbs_neither_its_grid_nor_its_neighbours(
    full: int, tree: bool, model: LlamaGenTransformer, condition: Condition, tokens: Tensor
) -> None:
    """A pass writes, in each row, to the slots behind its pointer and nowhere else; past the grid, to scratch."""
    lengths, T = [5, full, 0], 6
    cache = _filled(model, condition, tokens, lengths)
    before = [store.clone() for store in (cache.k, cache.v)]
    parents = _PARENTS if tree else list(range(-1, T - 1))
    logits = _tree_pass(model, cache, tokens[:, :T], _ancestors(parents))
    assert logits.isfinite().all()
    expected = torch.zeros(_ROWS, cache.slots, dtype=torch.bool)
    for row, n in enumerate(lengths):
        expected[row, cache.prefix + n : cache.prefix + n + T] = True
    for store, old in zip((cache.k, cache.v), before, strict=True):
        assert torch.equal((store != old).any(dim=(0, 2, 4)), expected)
    assert not expected[1, : cache.prefix + full].any()

    kept = [store.clone() for store in (cache.k, cache.v)]
    cache.commit_path(torch.tensor([[0, 1, 3, 5]] * 3), torch.tensor([4, _N - full, 1]))
    assert cache.length.tolist() == [9, _N, 1]
    for store, old in zip((cache.k, cache.v), kept, strict=True):
        changed = (store != old).any(dim=(0, 2, 4))
        assert not changed[1, : cache.prefix + full].any() and not changed[2].any()
        # In row 0, slots 3 and 5 of the pass move to places 2 and 3.
        assert changed[0].nonzero().flatten().tolist() == [cache.prefix + 5 + place for place in (2, 3)]
    assert model(tokens[:, :T], cache=cache).logits.isfinite().all()


def test_a_pass_wider_than_the_scratch_is_refused(model: LlamaGenTransformer, condition: Condition) -> None:
    cache = model.new_cache(_ROWS, scratch=2)
    model(condition=condition, cache=cache)
    with pytest.raises(ValueError, match="at most 2 tokens a pass, got 3"):
        model(torch.zeros(_ROWS, 3, dtype=torch.int64), cache=cache)
