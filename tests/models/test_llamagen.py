"""The LlamaGen transformer against the official one, and against itself: cached, batched, in bfloat16."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import attentive_transformer
from torch import Tensor

from vargen.models.guidance import Condition
from vargen.models.llamagen.blocks import RMSNorm
from vargen.models.llamagen.network import LlamaGenTransformer

_GOLDEN = Path(__file__).resolve().parent.parent / "golden"
_KINDS = ["c2i", "t2i"]
# float32, same operations in another order: the worst seen is 1e-5.
_CLOSE = 1e-4


def _official(kind: str) -> tuple[LlamaGenTransformer, dict[str, Tensor]]:
    """The tiny model that the official code ran, and what it gave."""
    folder = _GOLDEN / f"llamagen_{kind}"
    config = json.loads((folder / "config.json").read_text())
    shared = {key: config[key] for key in ("dim", "n_layer", "n_head", "vocab_size", "cls_token_num", "multiple_of")}
    own = (
        {"condition": "class", "num_classes": config["num_classes"]}
        if kind == "c2i"
        else {"condition": "text", "caption_dim": config["caption_dim"]}
    )
    model = LlamaGenTransformer(grid_size=4, **shared, **own).eval()
    model.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return model, load_file(folder / "io.safetensors")


def _condition(io: dict[str, Tensor], masked: bool = True) -> Condition:
    if "class_labels" in io:
        return Condition(class_labels=io["class_labels"])
    return Condition(caption_embeds=io["caption_embeds"], caption_mask=io["caption_mask"].bool() if masked else None)


def _random_condition(model: LlamaGenTransformer, rows: int) -> Condition:
    if model.config.condition == "class":
        return Condition(class_labels=torch.arange(rows) % 10)
    embeds = torch.randn(rows, model.config.cls_token_num, model.config.caption_dim)
    return Condition(caption_embeds=embeds, caption_mask=torch.arange(6) >= torch.arange(rows)[:, None] % 6)


# -- parity with the official code -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", _KINDS)
@torch.inference_mode()
def test_teacher_forced_logits_are_the_official_ones(kind: str) -> None:
    model, io = _official(kind)
    logits = model(io["tokens"], _condition(io, masked=False)).logits
    torch.testing.assert_close(logits, io["teacher_forced_logits"], atol=_CLOSE, rtol=0)


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize(("scale", "case"), [(1.0, "cfg1"), (3.0, "cfg3"), (3.0, "cfg3_interval")])
@pytest.mark.parametrize("kind", _KINDS)
@torch.inference_mode()
def test_cached_greedy_decoding_is_the_official_one(kind: str, scale: float, case: str, compress: bool) -> None:
    """Captions are padded on the left by different amounts; the null half sees the same mask."""
    model, io = _official(kind)
    interval = json.loads((_GOLDEN / f"llamagen_{kind}" / "config.json").read_text())["cfg_interval_case"]
    condition = _condition(io)
    rows = condition.cat(model.null_condition(condition)) if scale != 1 else condition
    cache = model.new_cache(4 if scale != 1 else 2, compress_prefix=compress)
    logits = model(condition=rows, cache=cache).logits[:, -1]
    guided: list[Tensor] = []
    for position in range(16):
        if scale == 1:
            guided.append(logits)
        else:
            conditional, null = logits.chunk(2)
            unguided = case == "cfg3_interval" and position - 1 > interval
            guided.append(conditional if unguided else null + scale * (conditional - null))
        token = guided[-1].argmax(-1)
        assert torch.equal(token, io[f"greedy_tokens_{case}"][:, position]), position
        logits = model(token.repeat(len(logits) // 2)[:, None], cache=cache).logits[:, -1]
        cache.commit_chain(1)
    torch.testing.assert_close(torch.stack(guided, 1), io[f"greedy_logits_{case}"], atol=_CLOSE, rtol=0)


# -- the cached passes are the teacher-forced one -------------------------------------------------------------------


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize(
    "overrides",
    [
        {}, {"condition": "text"}, {"dim": 200, "n_head": 2}, {"n_head": 12}, {"n_head": 6, "n_kv_head": 2},
        {"condition": "text", "n_head": 6, "n_kv_head": 1}, {"condition": "text", "cls_token_num": 1},
    ],
    ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items()) or "class",
)  # fmt: skip
@torch.inference_mode()
def test_step_by_step_is_teacher_forcing_at_every_position(overrides: dict[str, Any], compress: bool) -> None:
    """Also with heads of width 100, as the 3B model has, and with fewer key than query heads."""
    model = attentive_transformer(**overrides)
    condition = _random_condition(model, 3)
    if condition.caption_mask is not None:
        condition = Condition(None, condition.caption_embeds, condition.caption_mask[:, : model.num_prefix_rows])
    tokens = torch.randint(40, (3, 16))
    expected = model(tokens, condition)
    cache = model.new_cache(3, compress_prefix=compress)
    output = [model(condition=condition, cache=cache)]
    for position in range(15):
        output.append(model(tokens[:, position : position + 1], cache=cache))
        cache.commit_chain(1)
    assert output[0].logits.shape == (3, 1, 40) and output[0].features.shape == (3, 1, model.config.dim)
    torch.testing.assert_close(torch.cat([o.logits for o in output], 1), expected.logits, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([o.features for o in output], 1), expected.features, atol=2e-5, rtol=1e-5)


# -- batch and dtype -------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_bfloat16_stays_near_float32_and_the_compressed_prefix_as_near_as_the_long_one() -> None:
    """The score log n of the compressed slot is rounded with everything else: its weight is off by 1.6 % at most."""
    exact = attentive_transformer("text", cls_token_num=120, dim=128, n_head=2)
    rounded = attentive_transformer("text", cls_token_num=120, dim=128, n_head=2).bfloat16()
    embeds, mask = torch.randn(4, 120, 12), torch.zeros(4, 120, dtype=torch.bool)
    for row, visible in enumerate((100, 120, 47, 3)):
        mask[row, 120 - visible :] = True
    condition = Condition(caption_embeds=embeds * mask[..., None], caption_mask=mask)
    tokens = torch.randint(40, (4, 16))
    expected = exact(tokens, condition).logits[:, 1:]
    error = []
    for compress in (True, False):
        cache = rounded.new_cache(4, scratch=15, compress_prefix=compress)
        rounded(condition=condition, cache=cache)
        error.append((rounded(tokens[:, :-1], cache=cache).logits - expected).square().mean().sqrt())
    assert max(error) < 0.05 * expected.std()
    assert error[0] < 1.3 * error[1]


@torch.inference_mode()
def test_angles_keep_float32_through_a_change_of_dtype() -> None:
    model = attentive_transformer("class")
    table = model.rotary.clone()
    for cast in (model.bfloat16, model.half, model.double, model.float):
        assert torch.equal(cast().rotary, table) and model.output.weight.dtype == model.norm.weight.dtype
    moved = model.to("meta").to_empty(device="cpu").rotary
    assert (moved.device.type, moved.dtype) == ("cpu", torch.float32)
    moved = model.to("meta", torch.bfloat16).rotary  # device and dtype at once
    assert (moved.device.type, moved.dtype) == ("meta", torch.float32)


def test_the_norm_is_computed_in_float32() -> None:
    norm = RMSNorm(64, 1e-5).bfloat16()
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(5, 64).bfloat16() * 30
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * norm.weight.float()
    torch.testing.assert_close(norm(x).float(), scaled, rtol=2**-8, atol=0)
    y = torch.cat([torch.randn(5, 64), torch.zeros(1, 64), torch.full((1, 64), 1e-4)])
    with torch.no_grad():
        few = norm.float()(y)
    torch.testing.assert_close(few, norm(y))
    torch.testing.assert_close(norm(y), y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * norm.weight)


# -- conditions ------------------------------------------------------------------------------------------------------


def test_the_null_twin_is_the_last_class_or_the_stored_caption_after_the_same_mask() -> None:
    null = attentive_transformer().null_condition(Condition(class_labels=torch.tensor([3, 4])))
    assert null.class_labels is not None and null.class_labels.tolist() == [10, 10]
    model = attentive_transformer("text")
    given = _random_condition(model, 3)
    null = model.null_condition(given)
    assert null.caption_embeds is not None and null.caption_embeds.shape == (3, 6, 12)
    assert all(torch.equal(row, model.cls_embedding.uncond_embedding) for row in null.caption_embeds)
    assert null.caption_mask is given.caption_mask
