"""`VARScaleModel` against the official sampler, and against itself: rows apart, lagging and rolled back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden_var import official
from tiny_models import tiny_multi_scale_vq, tiny_var
from torch import Tensor

from vargen.decoding import Sampling, ScaleSchedule, Stage, decode_scales
from vargen.models.guidance import Condition
from vargen.models.var.decoding import VARScaleModel, VARState


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def tiny(condition: str = "class", guidance_scale: float = 3.0, **options: Any) -> VARScaleModel:
    return VARScaleModel(tiny_var(condition), tiny_multi_scale_vq().quantize, guidance_scale, **options)


def a_condition(model: VARScaleModel, images: int = 3) -> Condition:
    if model.transformer.config.condition == "class":
        return Condition(class_labels=torch.arange(images))
    embeds = torch.randn(images, 12, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(12) >= 12 - torch.tensor([[3], [5], [4]])[:images]
    return Condition(caption_embeds=embeds * mask[..., None], caption_mask=mask)


def histories(model: VARScaleModel, images: int = 3) -> list[Tensor | None]:
    """Inputs of every scale, of random tokens."""
    generator = torch.Generator().manual_seed(1)
    canvas, inputs = model.canvas(images), [None]
    for scale, count in enumerate(model.scale_tokens[:-1]):
        tokens = torch.randint(model.scale_codes[scale], (images, count), generator=generator)
        canvas, following = model.add(canvas, tokens, scale)
        inputs.append(following)
    return inputs


def started(model: VARScaleModel, condition: Condition, is_guided: bool = True) -> VARState:
    """The state of new images."""
    rows = condition.class_labels if condition.class_labels is not None else condition.caption_embeds
    assert rows is not None
    state = model.allocate(condition, len(rows), is_guided)
    model.reset(state, condition)
    return state


def one_by_one(model: VARScaleModel, guidance: list[float]) -> list[Tensor]:
    """Logits of each scale, of a pass each."""
    state, inputs = started(model, a_condition(model)), histories(model)
    return [model.forward(state, inputs[: k + 1], factor) for k, factor in enumerate(guidance)]


def test_greedy_sampling_with_guidance_is_the_official_one() -> None:
    """Their cfg is our guidance_scale less one."""
    model, io = official(2.5)
    state, canvas, inputs = started(model, Condition(class_labels=io["class_labels"])), model.canvas(2), [None]
    for scale in range(len(model.scale_tokens)):
        logits = model.forward(state, inputs, 1.0)
        torch.testing.assert_close(logits, io[f"greedy_logits_cfg1.5_scale{scale}"], atol=1e-4, rtol=0)
        tokens = logits.argmax(-1)
        assert torch.equal(tokens, io[f"greedy_tokens_cfg1.5_scale{scale}"]), scale
        canvas, following = model.add(canvas, tokens, scale)
        inputs.append(following)


def test_the_loop_samples_the_official_tokens() -> None:
    model, io = official(2.5)
    condition = Condition(class_labels=io["class_labels"])
    generated = decode_scales(model, condition, torch.arange(2), "plain", Sampling(temperature=0))
    expected = torch.cat([io[f"greedy_tokens_cfg1.5_scale{scale}"] for scale in range(4)], dim=1)
    assert torch.equal(generated.tokens, expected)


@pytest.mark.parametrize("condition", ["class", "text"])
@pytest.mark.parametrize("ends", [[2, 4], [1, 4], [3, 4], [4]])
def test_scales_of_one_pass_are_those_of_several(condition: str, ends: list[int]) -> None:
    model = tiny(condition)
    expected, state, inputs = one_by_one(model, [1.0] * 4), started(model, a_condition(model)), histories(model)
    for end in ends:
        torch.testing.assert_close(model.forward(state, inputs[:end], 1.0), expected[end - 1], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("condition", ["class", "text"])
@pytest.mark.parametrize("factors", [[1, 0, 0, 0], [1, 1, 0, 0], [0.5, 1, 2, 0], [2, 1, 1, 0.5]])
def test_guidance_changes_from_scale_to_scale_and_may_end(condition: str, factors: list[float]) -> None:
    """A scale without guidance is that of the conditional rows alone."""
    model, plain = tiny(condition), tiny(condition, 1.0)
    always, never = one_by_one(model, [1.0] * 4), one_by_one(plain, [1.0] * 4)
    for scale, (factor, logits) in enumerate(zip(factors, one_by_one(model, factors), strict=True)):
        wanted = never[scale] + factor * (always[scale] - never[scale])
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    assert (always[3] - never[3]).abs().max() > 0.1


def test_rows_without_guidance_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = tiny(), []
    forward = model.transformer.forward

    def step(*arguments: Any, cache: Any, **options: Any) -> Any:
        rows.append(cache.rows)
        return forward(*arguments, cache=cache, **options)

    monkeypatch.setattr(model.transformer, "forward", step)
    one_by_one(model, [1.0, 1.0, 0.0, 0.0])
    assert rows == [6, 6, 3, 3]
    state = started(model, a_condition(model), is_guided=False)
    logits, expected = model.forward(state, histories(model), 0.0), one_by_one(tiny(guidance_scale=1.0), [1.0] * 4)[3]
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
    assert rows[-1] == state.cache.rows == 3


def test_guidance_that_resumes_is_refused() -> None:
    model = tiny()
    schedule = ScaleSchedule("again", (Stage(until=1), Stage(until=2, guidance=0), Stage()))
    with pytest.raises(ValueError, match="guidance of the target model cannot resume at scale 2"):
        decode_scales(model, a_condition(model), torch.arange(3), schedule)


@pytest.mark.parametrize("condition", ["class", "text"])
@pytest.mark.parametrize("scale", [0, 1, 3])
def test_rolled_back_scales_are_run_again(condition: str, scale: int) -> None:
    model = tiny(condition)
    expected, inputs = one_by_one(model, [1.0] * 4), histories(model)
    for before in ([1.0] * 4, [1.0, 1.0, 1.0, 0.0]):
        state = started(model, a_condition(model))
        wrong = [None if part is None else part + (k > scale) for k, part in enumerate(inputs)]
        for k, factor in enumerate(before):
            model.forward(state, wrong[: k + 1], factor)
        model.set_cached(state, scale)
        found = [model.forward(state, inputs[: k + 1], 1.0) for k in range(scale, 4)]
        if before[scale] or not scale:
            for ours, theirs in zip(found, expected[scale:], strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_a_prefix_is_filled_in_one_pass_without_its_logits() -> None:
    model = tiny("text")
    expected, state = one_by_one(model, [1.0] * 4), started(model, a_condition(model))
    heads: list[int] = []
    model.transformer.head.register_forward_pre_hook(lambda _, given: heads.append(given[0].shape[1]))
    logits = model.forward(state, histories(model)[:3], 1.0)
    torch.testing.assert_close(logits, expected[2], atol=2e-5, rtol=1e-5)
    assert heads == [9] and state.cache.scale == 3


def test_codes_that_a_scale_does_not_use_are_left_out() -> None:
    vqvae = tiny_multi_scale_vq(scale_codes=(5, 20, 64, 64))
    model = VARScaleModel(tiny_var("class"), vqvae.quantize, 2.0)
    shapes = [logits.shape[1:] for logits in one_by_one(model, [1.0] * 4)]
    assert shapes == [(1, 5), (4, 20), (9, 64), (16, 64)]


def test_padding_of_captions_is_not_computed() -> None:
    model = tiny("text")
    state = started(model, a_condition(model))
    assert state.cache.prefix == 5 and state.cache.k.shape[3] == 5 + 30
    whole = Condition(caption_embeds=a_condition(model).caption_embeds, caption_mask=a_condition(model).caption_mask)
    row = started(model, whole.select_rows(slice(0, 1)))
    assert row.cache.prefix == 3
    torch.testing.assert_close(model.forward(row, [None], 1.0), model.forward(state, [None], 1.0)[:1], atol=2e-5, rtol=1e-5)
