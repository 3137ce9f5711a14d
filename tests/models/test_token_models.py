"""Models as decoding sees them: whatever was fed, kept and rolled back, logits are those of a path's tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_language_models import has_release, make_janus
from tiny_models import attentive_transformer, tiny_transformer

import vargen
from vargen.decoding import TokenModel, Tree, decode
from vargen.models.guidance import Condition
from vargen.models.llamagen.decoding import LlamaGenTokenModel
from vargen.models.quantization import quantize_network

SIDE, PROMPTS = 5, ["a red apple", "a blue car on the moon", "dog"]
TOKENS = SIDE**2


def make_llamagen(kind: str, guidance: float, make: Callable[..., Any] = tiny_transformer, **options: Any) -> Any:
    """Captions are padded by different amounts."""
    network = make(kind, grid_size=SIDE)
    if kind == "class":
        return LlamaGenTokenModel(network, guidance, **options), Condition(class_labels=torch.tensor([1, 7, 3]))
    mask = torch.arange(12) >= torch.tensor([[0], [9], [4]])
    embeds = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(2)) * mask[..., None]
    return LlamaGenTokenModel(network, guidance, **options), Condition(caption_embeds=embeds, caption_mask=mask)


def make_language_model(attention: str, guidance: float) -> Any:
    if not has_release("janus"):
        pytest.skip("needs a newer transformers")
    model, processor = make_janus(side=SIDE)
    model.set_attn_implementation(attention)
    pipe = vargen.accelerate(model, processor)
    return pipe.decoding_model(guidance), pipe.encode_condition(PROMPTS)[0]


MAKERS: dict[str, Callable[[], tuple[TokenModel, Any]]] = {
    "class": lambda: make_llamagen("class", 1.0),
    "class, guidance": lambda: make_llamagen("class", 3.0),
    "text, guidance": lambda: make_llamagen("text", 2.0),
    "text, long prefix": lambda: make_llamagen("text", 2.0, compress_prefix=False),
    "int8": lambda: make_llamagen("class", 2.0, lambda kind, **sizes: quantize_network(attentive_transformer(kind, **sizes))),
    **{f"{attention}, {guidance}": lambda attention=attention, guidance=guidance: make_language_model(attention, guidance)
       for attention in ("sdpa", "eager") for guidance in (1.0, 4.0)},
}  # fmt: skip
FIXED = [Tree.make_chain(3), Tree.from_parents((-1, 0, 0, 1, 1, 2)), Tree.make_chain(0)]


def random_trees(generator: torch.Generator, count: int = 7) -> Tree:
    """A tree for each image."""
    rows = [[-1, *(int(torch.randint(slot, (), generator=generator)) for slot in range(1, count))] for _ in PROMPTS]
    return Tree.batched(torch.tensor(rows), max_path=count, max_children=count)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", MAKERS)
@torch.no_grad()
def test_logits_of_every_path_are_those_of_its_tokens_alone(name: str, seed: int) -> None:
    """Chains and trees, commits of other lengths in each row, rollbacks, over the ends of rows and of the grid."""
    model, condition = MAKERS[name]()
    generator, is_moved = torch.Generator().manual_seed(seed), False
    state, _ = model.start(condition, 8)
    history: list[list[int]] = [[], [], []]
    for turn in range(12):
        tree = FIXED[turn % 4] if turn % 4 < 3 else random_trees(generator)
        T = tree.parents.shape[-1]
        fed = torch.randint(model.vocab, (3, T), generator=generator)
        logits, ancestors = model.forward(fed, state, tree).logits, tree.ancestors.expand(3, T, T)
        paths, counts = torch.zeros(3, tree.max_path, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        for row in range(3):
            slot = int(torch.randint(T, (1,), generator=generator))
            path = ancestors[row, slot].nonzero()[:, 0]
            tokens = history[row] + fed[row, path].tolist()
            if len(tokens) < TOKENS:
                torch.testing.assert_close(logits[row, slot], alone(model, condition, row, tokens), atol=1e-4, rtol=1e-4)
            path = path[: TOKENS - len(history[row])]  # at its end, an image keeps less
            paths[row, : len(path)], counts[row], history[row] = path, len(path), tokens[:TOKENS]
            is_moved |= bool((path > torch.arange(len(path))).any())
        model.commit(state, paths, counts, tree)
        if turn in (4, 7):
            history = [tokens[: max(1, len(tokens) - 1)] for tokens in history]
            model.rollback(state, torch.tensor([len(tokens) for tokens in history]))
    assert is_moved and max(map(len, history)) > 2 * SIDE


def test_a_view_without_layers_is_the_network_that_has_only_the_others() -> None:
    model, condition = make_llamagen("class", 2.0, lambda kind, **sizes: tiny_transformer(kind, n_layer=4, **sizes))
    short = tiny_transformer("class", n_layer=2, grid_size=SIDE)
    state = {name: value for name, value in model.transformer.state_dict().items() if not name.startswith("layers.")}
    for new, old in enumerate((0, 3)):
        part = model.transformer.layers[old].state_dict()
        state |= {f"layers.{new}.{name}": value for name, value in part.items()}
    short.load_state_dict(state)
    view, seeds = model.skip_layers((1, 2)), torch.arange(3)
    assert (model.num_layers, view.num_layers) == (4, 2)
    found, expected, whole = (
        decode(each, condition, seeds, "ar").tokens for each in (view, LlamaGenTokenModel(short, guidance=2.0), model)
    )
    assert torch.equal(found, expected) and not torch.equal(found, whole)


def alone(model: TokenModel, condition: Any, row: int, tokens: list[int]) -> torch.Tensor:
    """Logits after some tokens of one row, fed one by one."""
    state, _ = model.start(condition.select_rows(torch.tensor([row])), 1)
    one = Tree.make_chain(0)
    for token in tokens:
        logits = model.forward(torch.tensor([[token]]), state, one).logits
        model.commit(state, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), one)
    return logits[0, 0]
