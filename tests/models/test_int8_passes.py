"""Passes with 8-bit integer products return the same bits at any width, in any batch and order, by any implementation."""

import pytest
import torch
from int8_passes import BACKENDS, TOKENS, Images, condition_of, quantized_transformer

SHAPES = {"plain": {}, "grouped": {"n_kv_head": 2}, "wide heads": {"dim": 80, "n_head": 4, "n_kv_head": 1}}
TREE = [-1, 0, 0, 1, 1, 2, 3]  # parents


def tree_options(images: Images) -> dict[str, torch.Tensor]:
    """Arguments of a pass over `TREE`."""
    ancestors, depth = torch.eye(len(TREE), dtype=torch.bool), [0] * len(TREE)
    for token, parent in enumerate(TREE[1:], 1):
        ancestors[token] |= ancestors[parent]
        depth[token] = depth[parent] + 1
    return {"ancestors": ancestors, "positions": images.cache.length[:, None] + torch.tensor(depth)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wide_pass_equals_passes_over_one_token(backend: str, shape: str) -> None:
    model = quantized_transformer(**SHAPES[shape])
    narrow = Images(model, backend, [0, 1], [5, 9])
    for width in (3, 8):
        wide = Images(model, backend, [0, 1], [5, 9], width=4)
        tokens = torch.stack([wide.tokens(5, width)[0], wide.tokens(9, width)[1]])
        narrow.cache.rollback(torch.tensor([5, 9] * 2))
        single = []
        for column in tokens.split(1, 1):
            single.append(narrow.feed(column))
            narrow.cache.commit_chain(1)
        for found, parts in zip(wide.feed(tokens), zip(*single, strict=True), strict=True):
            inside = TOKENS - 9  # positions past the grid have no meaning
            assert torch.equal(found[:, :inside], torch.cat(parts, 1)[:, :inside])


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_path_of_a_tree_equals_a_chain(backend: str) -> None:
    model = quantized_transformer(n_kv_head=3)
    images = Images(model, backend, [0, 1], [4, 6])
    tokens = images.tokens(0, len(TREE))
    logits, _, _ = images.feed(tokens, **tree_options(images))
    for path in ([0, 1, 3, 6], [0, 1, 4], [0, 2, 5]):
        chain = Images(model, backend, [0, 1], [4, 6])
        expected, _, _ = chain.feed(tokens[:, path])
        assert torch.equal(logits[:, path], expected)
    count = torch.tensor([4, 3, 4, 3])  # the second image accepts less
    images.cache.commit_path(torch.tensor([[0, 1, 3, 6], [0, 2, 5, 5]]).repeat(2, 1), count)
    for row, path in ((0, [0, 1, 3, 6]), (1, [0, 2, 5])):
        chain = Images(model, backend, [row], [[4, 6][row]])
        chain.feed(tokens[row : row + 1, path])
        chain.cache.commit_chain(len(path))
        assert torch.equal(images.feed(tokens[:, :2])[0][row], chain.feed(tokens[row : row + 1, :2])[0][0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_image_of_a_batch_equals_the_image_alone(backend: str) -> None:
    model = quantized_transformer()
    batch = Images(model, backend, [2, 0, 1], [3, 16, 8], prefix=6)
    alone = Images(model, backend, [1], [8], width=3, prefix=6)
    assert torch.equal(batch.first[2], alone.first[0])
    wide, single = batch.feed(batch.tokens(8, 5)), alone.feed(alone.tokens(8, 5))
    assert torch.equal(wide[0][2], single[0][0])


@pytest.mark.parametrize("guidance", [None, 1.5, torch.tensor(2.5), "by token"])
def test_compiled_passes_equal_operators(guidance: object) -> None:
    model = quantized_transformer(n_layer=3, n_kv_head=2)
    scale = torch.tensor([[1.0], [3.0], [2.0]]).expand(2, 3, 1) if guidance == "by token" else guidance
    for lengths, width in (([5, 5], 3), ([0, 15], 3), ([16, 12], 3)):
        found = [Images(model, backend, [0, 1], lengths).feed(torch.tensor([[1, 2, 3]] * 2), scale) for backend in BACKENDS]
        for ours, expected in zip(*found, strict=True):
            assert torch.equal(ours, expected), (lengths, width)


def test_compiled_trees_equal_operators() -> None:
    model = quantized_transformer(dim=80, n_head=4)
    found = []
    for backend in BACKENDS:
        images = Images(model, backend, [0, 1], [4, 11], prefix=6)
        found.append(images.feed(images.tokens(0, len(TREE)), **tree_options(images)))
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)


def test_a_quantized_network_is_close_to_the_network() -> None:
    model = quantized_transformer()
    torch.manual_seed(0)
    images = Images(model, "operators", [0, 1], [5, 5])
    step, _, _ = images.feed(images.tokens(5, 3), None)
    whole = model(images.tokens(0, TOKENS), condition_of([0, 1])).logits
    # The same arithmetic over the conditioning rows themselves instead of their mean.
    assert (step[:2] - whole[:, 6:9]).norm() < 0.05 * whole[:, 6:9].norm()


def test_gradients_and_other_places_are_refused_or_absent() -> None:
    model = quantized_transformer()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match="quantization='int8' computes in float32 on a CPU, got bfloat16"):
        model.to(torch.bfloat16)
