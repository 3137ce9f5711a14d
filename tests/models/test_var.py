"""The next-scale transformer against the official one, and against itself: cached, in one pass, batched, with captions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from golden_var import official_networks
from rejects import rejects
from safetensors.torch import load_file
from torch import Tensor

from vargen.kernels.ops import filter_logits
from vargen.models.guidance import Condition
from vargen.models.var.network import VARTransformer

_GOLDEN = Path(__file__).resolve().parent.parent / "golden"
_CLOSE = 1e-4  # float32, same operations in another order


def _random(condition: str = "class", **overrides: Any) -> VARTransformer:
    """Weights large enough that attention is far from uniform; much is zero as built."""
    shape: dict[str, Any] = {
        "scales": (1, 2, 3), "depth": 2, "dim": 48, "n_head": 3, "vocab_size": 40, "code_dim": 6, "num_classes": 10,
        "caption_dim": 12, "caption_rows": 5, **overrides,
    }  # fmt: skip
    model = VARTransformer(condition=condition, **shape).eval()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1 / parameter.shape[-1] ** 0.5, generator=generator)
    return model


def _random_condition(model: VARTransformer, rows: int) -> Condition:
    """Captions of 5, 4, ... valid rows, padded on the left."""
    if model.config.condition == "class":
        return Condition(class_labels=torch.arange(rows) % 10)
    generator = torch.Generator().manual_seed(1)
    embeds = torch.randn(rows, 5, model.config.caption_dim, generator=generator)
    return Condition(caption_embeds=embeds, caption_mask=torch.arange(5) >= torch.arange(rows)[:, None] % 5)


def _inputs(model: VARTransformer, rows: int) -> Tensor:
    return torch.randn(rows, model.tokens - model.ends[0], model.config.code_dim, generator=torch.Generator().manual_seed(2))


def _prefix(condition: Condition) -> int:
    return 0 if condition.caption_embeds is None else condition.caption_embeds.shape[1]


def _step_by_step(model: VARTransformer, inputs: Tensor, condition: Condition, groups: list[int]) -> tuple[Tensor, Tensor]:
    """Logits and features of passes that feed these numbers of scales each."""
    cache = model.new_cache(len(inputs), _prefix(condition))
    outputs, fed = [], 0
    for count in groups:
        start, end = (model.first_token_of(k) - model.ends[0] for k in (fed, fed + count))
        part = inputs[:, max(start, 0) : end] if end > 0 else None
        outputs.append(model(part, condition=None if fed else condition, cache=cache))
        fed += count
    return torch.cat([o.logits for o in outputs], 1), torch.cat([o.features for o in outputs], 1)


# -- parity with the official code -------------------------------------------------------------------------------


@torch.inference_mode()
def test_teacher_forced_logits_are_the_official_ones() -> None:
    model, _, io = official_networks()
    logits = model(io["var_input"], Condition(class_labels=io["class_labels"])).logits
    torch.testing.assert_close(logits, io["teacher_forced_logits"], atol=_CLOSE, rtol=0)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.8), (10, 0.0), (20, 0.9)])
def test_our_filters_are_the_official_ones(top_k: int, top_p: float) -> None:
    """There, the nucleus is cut from below, and 0 switches a filter off."""
    io = load_file(_GOLDEN / "var" / "io.safetensors")
    probs = filter_logits(io["filter_logits"], top_k or None, top_p or 1.0).softmax(-1)
    torch.testing.assert_close(probs, io[f"filter_probs_k{top_k}_p{top_p}"], atol=1e-6, rtol=0)


# -- the passes agree ---------------------------------------------------------------------------------------------

_MODELS: list[dict[str, Any]] = [
    {}, {"attn_l2_norm": False}, {"shared_aln": True}, {"condition": "text"}, {"condition": "text", "shared_aln": True},
    {"scales": (2, 3)},
]  # fmt: skip


@pytest.mark.parametrize("groups", [[1, 1, 1], [2, 1], [1, 2], [3]])
@pytest.mark.parametrize("overrides", _MODELS, ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items()) or "class")
@torch.inference_mode()
def test_scale_by_scale_is_teacher_forcing(overrides: dict[str, Any], groups: list[int]) -> None:
    """Also where one pass feeds several scales, as when a model takes over from another."""
    model = _random(**overrides)
    groups = groups if len(model.scales) == 3 else [1, 1]
    condition, inputs = _random_condition(model, 4), _inputs(model, 4)
    expected = model(inputs, condition)
    assert expected.logits.shape == (4, model.tokens, 40) and expected.logits.std() > 0.3
    logits, features = _step_by_step(model, inputs, condition, groups)
    torch.testing.assert_close(logits, expected.logits, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(features, expected.features, atol=2e-5, rtol=1e-5)


@torch.inference_mode()
def test_fewer_scales_are_the_first_of_all() -> None:
    """Training on early scales alone asks for the same laws."""
    model = _random("text")
    condition, inputs = _random_condition(model, 3), _inputs(model, 3)
    full = model(inputs, condition).logits
    for last, end in enumerate(model.ends[:-1]):
        part = model(inputs[:, : end - 1], condition)
        torch.testing.assert_close(part.logits, full[:, :end], atol=2e-5, rtol=1e-5)
        only = model(inputs[:, : end - 1], condition, logits_of=1).logits
        torch.testing.assert_close(only, full[:, model.first_token_of(last) : end], atol=2e-5, rtol=1e-5)


# -- captions -----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_padding_of_a_caption_is_not_read() -> None:
    model = _random("text")
    condition, inputs = _random_condition(model, 4), _inputs(model, 4)
    assert condition.caption_embeds is not None and condition.caption_mask is not None
    before = model(inputs, condition).logits
    noise = torch.where(condition.caption_mask[..., None], condition.caption_embeds, torch.tensor(9.0))
    torch.testing.assert_close(model(inputs, Condition(None, noise, condition.caption_mask)).logits, before)
    short = Condition(None, condition.caption_embeds[3:, 3:], condition.caption_mask[3:, 3:])
    torch.testing.assert_close(model(inputs[3:], short).logits, before[3:], atol=2e-5, rtol=1e-5)
    swapped = Condition(None, condition.caption_embeds.flip(0), condition.caption_mask)
    assert (model(inputs, swapped).logits - before).abs().amax((1, 2)).min() > 0.1  # and the rest is


# -- as built, saved, and misused ---------------------------------------------------------------------------------


@torch.inference_mode()
def test_a_new_model_is_uniform() -> None:
    model = VARTransformer("text", (1, 2), depth=2, dim=16, n_head=2, vocab_size=8, code_dim=4, caption_dim=6, caption_rows=3)
    assert not model(_inputs(model, 2), Condition(caption_embeds=torch.randn(2, 3, 6))).logits.any()


def test_bad_passes_are_named() -> None:
    model = _random("text")
    condition, inputs = _random_condition(model, 2), _inputs(model, 2)
    with pytest.raises(ValueError, match="whole scales, ending at 1, 5, 14 tokens, got 4"):
        model(inputs[:, :3], condition)
    with pytest.raises(ValueError, match=r"pass \(inputs, condition\)"):
        model(inputs)
    rejects(lambda: model(inputs, cache=model.new_cache(2, 5)), "cache")
    with pytest.raises(ValueError, match="at most 5 rows, got 9"):
        model(inputs, Condition(caption_embeds=torch.zeros(2, 9, 12)))
    with pytest.raises(ValueError, match="conditioned on text; the condition holds none"):
        model(inputs, Condition(class_labels=torch.tensor([1, 2])))
