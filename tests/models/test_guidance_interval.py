"""After the guidance interval of all images of a batch, passes run conditional rows alone, and generate the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from int8_passes import compiled_passes
from tiny_language_models import has_release, make_janus
from tiny_models import attentive_transformer, tiny_transformer
from tiny_targets import GRID, take_gpu_paths, tiny_target

import vargen
from vargen.decoding import Engine, Sampling
from vargen.decoding.requests import FinishedImage
from vargen.models.guidance import Condition, Guidance, GuidedTokenModel
from vargen.models.llamagen.decoding import LlamaGenTokenModel
from vargen.models.quantization import quantize_network
from vargen.models.transformers import int8
from vargen.models.transformers.int8_decoding import Int8Parts, Int8TokenModel

LAST, IMAGES = 11, 4
LABELS = Condition(class_labels=torch.tensor([1, 7, 3, 0]))
PROMPTS = ["a red apple", "a blue car on the moon", "dog", "a red apple"]


def llamagen(guidance: Guidance) -> tuple[Any, Condition]:
    return tiny_target(guidance=guidance), LABELS


def llamagen_text(guidance: Guidance) -> tuple[Any, Condition]:
    mask = torch.arange(12) >= torch.tensor([[0], [9], [4], [0]])
    embeds = torch.randn(IMAGES, 12, 32, generator=torch.Generator().manual_seed(2)) * mask[..., None]
    network = tiny_transformer("text", grid_size=GRID)
    return LlamaGenTokenModel(network, guidance), Condition(caption_embeds=embeds, caption_mask=mask)


def llamagen_int8(guidance: Guidance) -> tuple[Any, Condition]:
    compiled_passes()  # so that they run from the first pass on
    return LlamaGenTokenModel(quantize_network(attentive_transformer("class", grid_size=GRID)), guidance), LABELS


def janus(guidance: Guidance, attention: str = "sdpa") -> tuple[Any, Any]:
    if not has_release("janus"):
        pytest.skip("needs a newer transformers")
    model, processor = make_janus(side=GRID)
    model.set_attn_implementation(attention)
    pipe = vargen.accelerate(model, processor)
    model = pipe.decoding_model(2.0)
    return type(model)(model.description, guidance), pipe.encode_condition(PROMPTS)[0]


def janus_int8(guidance: Guidance) -> tuple[Any, Any]:
    model, condition = janus(guidance)
    parts = Int8Parts(model.description, int8.quantize_layers(model.description))
    return Int8TokenModel(model.description, parts, guidance), condition


MAKERS: dict[str, Callable[[Guidance], tuple[Any, Any]]] = {
    each.__name__: each for each in (llamagen, llamagen_text, llamagen_int8, janus, janus_int8)
}
METHODS = ["ar", "gumbel:window=5", "scd:window=4", "gsd:window=6"]
CASES = [(name, method) for name in MAKERS for method in METHODS] + [
    ("llamagen", method) for method in ("eagle", "lantern", "medusa", "speculative", "sjd", "gumbel-tree")
]


def generate(model: Any, condition: Any, method: str, delay: int = 5) -> tuple[dict[int, FinishedImage], list[int]]:
    """Images in two slots, the second some passes after the first; and the network rows of each pass."""
    rows: list[int] = []
    run = type(model).run_pass

    def counted(self: Any, tokens: torch.Tensor, state: Any, tree: Any) -> Any:
        if self.networks == model.networks:  # not of a drafter
            rows.append(state.rows)
        return run(self, tokens, state, tree)

    engine, found = Engine(model, method, batch_size=2), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "run_pass", counted)
        sampling, steps = Sampling(0.9, top_k=20), 0
        engine.submit(condition, torch.arange(1), sampling)
        while engine.has_work:
            if steps == delay:
                engine.submit(condition.select_rows(slice(1, None)), torch.arange(1, IMAGES), sampling)
            steps += 1
            found |= {image.number: image for image in engine.step()}
    return found, rows


@pytest.mark.parametrize(("name", "method"), CASES)
def test_tokens_are_those_of_passes_over_all_rows(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of different lengths share a batch, and images that start among those that are past their guidance."""
    model, condition = MAKERS[name](Guidance(3.0, LAST))
    found, rows = generate(model, condition, method)
    assert {2, 4} <= set(rows)
    monkeypatch.setattr(GuidedTokenModel, "narrow", lambda self, state, length: state)
    expected, rows = generate(model, condition, method)
    assert 2 not in rows
    for number, image in expected.items():
        assert image.error is None and found[number].error is None
        assert torch.equal(found[number].tokens, image.tokens), number
        assert found[number].stats.relaxation == pytest.approx(image.stats.relaxation, abs=1e-3)


@pytest.mark.parametrize("last", [0, LAST, GRID**2 - 2, GRID**2])
def test_the_first_narrow_pass_is_the_one_after_the_interval(last: int) -> None:
    """`ar` feeds position n in pass n: those up to `last` are guided."""
    model, condition = llamagen_text(Guidance(3.0, last))
    _, rows = generate(model, condition, "ar", delay=0)
    guided = min(last + 1, GRID**2 - 1)
    assert rows[: GRID**2 - 1] == [4] * guided + [2] * (GRID**2 - 1 - guided)


@torch.inference_mode()
@pytest.mark.parametrize("compiled", [True, False])
def test_8_bit_logits_without_guidance_have_the_bits_of_the_conditional_row(compiled: bool) -> None:
    """Whatever the unconditional row holds, which a narrow pass leaves as it was."""
    model, condition = llamagen_int8(Guidance(3.0, 0))
    alone = LlamaGenTokenModel(model.transformer)
    tree = vargen.decoding.Tree.make_chain(2)
    fed = torch.randint(model.vocab, (IMAGES, 3), generator=torch.Generator().manual_seed(0))
    (state, _), (own, _) = model.start(condition, 3), alone.start(condition, 3)
    for held, each in ((state, model), (own, alone)):
        held.compiled = held.compiled if compiled else None
        each.forward(fed, held, tree)
        each.commit(held, torch.arange(3).expand(IMAGES, 3), torch.full((IMAGES,), 3), tree)
    expected = alone.forward(fed, own, tree).logits
    assert torch.equal(model.forward(fed, model.narrow(state, 4), tree).logits, expected)
    state.v_scale[IMAGES:] = 3.0
    assert torch.equal(model.forward(fed, state, tree).logits, expected)


def test_passes_of_a_gpu_are_narrow_too(monkeypatch: pytest.MonkeyPatch) -> None:
    take_gpu_paths(monkeypatch)
    test_tokens_are_those_of_passes_over_all_rows("llamagen", "gumbel:window=5", monkeypatch)
