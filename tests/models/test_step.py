"""The quick forms of a pass on a CPU are the general ones: those that gradients take, of which every part is written out."""

from typing import Any

import pytest
import torch
from tiny_models import attentive_transformer
from torch import Tensor

from vargen.models.guidance import Condition
from vargen.models.kv_cache import KVCache
from vargen.models.llamagen.network import LlamaGenTransformer

_VOCAB, _SCALE = 40, 3.0
# Of the root mean square of the logits. bfloat16 carries 8 bits through every operation; rotation is in float32 for all.
_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 0.05}


def _model(condition: str, dtype: torch.dtype, **overrides: Any) -> LlamaGenTransformer:
    return attentive_transformer(condition, n_layer=3, n_head=6, **overrides).to(dtype)


def _filled(model: LlamaGenTransformer, lengths: list[int], guidance: bool) -> KVCache:
    """A cache that holds `lengths[row]` random tokens of each image, twice where an unconditional half follows."""
    B = len(lengths)
    condition = Condition(torch.arange(B))
    if model.config.condition == "text":
        generator = torch.Generator().manual_seed(2)
        visible = torch.arange(6) >= torch.arange(B)[:, None] + 1
        condition = Condition(None, torch.randn(B, 6, 12, generator=generator) * visible[..., None], visible)
    if guidance:
        condition, lengths = condition.cat(model.null_condition(condition)), 2 * lengths
    tokens = torch.randint(_VOCAB, (B, max(lengths)), generator=torch.Generator().manual_seed(3))
    cache = model.new_cache(len(lengths), scratch=16)
    model(condition=condition, cache=cache)
    for column in tokens.repeat(2 if guidance else 1, 1).unbind(1):
        model(column[:, None], cache=cache)
        cache.commit_chain(1)
    cache.rollback(torch.tensor(lengths))
    return cache


def _pass(model: LlamaGenTransformer, lengths: list[int], T: int, guidance: bool, general: bool) -> tuple[Tensor, KVCache]:
    """Logits of T tokens behind `lengths`, and the cache that the pass wrote to."""
    with torch.inference_mode():
        cache = _filled(model, lengths, guidance)
    tokens = torch.randint(_VOCAB, (len(lengths), T), generator=torch.Generator().manual_seed(4)).repeat(1 + guidance, 1)
    if not general:
        with torch.inference_mode():
            assert isinstance(cache.view_for_pass(T).slots, slice) == (len(set(lengths)) == 1), "rows alike, and not others"
            return model(tokens, cache=cache, guidance=_SCALE if guidance else None).logits, cache
    ordinary = model.new_cache(cache.rows, scratch=cache.scratch)
    for name in ("kv", "length", "prefix_bias", "_bias"):
        setattr(ordinary, name, getattr(cache, name).clone())
    with torch.enable_grad():
        logits = model(tokens, cache=ordinary).logits
    assert logits.requires_grad
    if guidance:
        conditional, unconditional = logits.chunk(2)
        logits = unconditional + _SCALE * (conditional - unconditional)
    return logits.detach(), ordinary


# Every pair of values of the four occurs.
_LENGTHS = ([0], [7], [5, 5, 5], [0, 9, 3])
_CASES = [
    (lengths, ("class", "text")[(i + j) % 2], bool((i // 2 + j) % 2), dtype)
    for i, lengths in enumerate(_LENGTHS)
    for j, dtype in enumerate(_CLOSE)
]


@pytest.mark.parametrize(("lengths", "condition", "guidance", "dtype"), _CASES)
def test_quick_passes_are_the_general_ones(lengths: list[int], condition: str, guidance: bool, dtype: torch.dtype) -> None:
    model = _model(condition, dtype)
    for T in (1, 4, 7):
        quick, wrote = _pass(model, lengths, T, guidance, general=False)
        expected, generally = _pass(model, lengths, T, guidance, general=True)
        assert quick.shape == expected.shape == (len(lengths), T, _VOCAB)
        assert (quick - expected).abs().max() < 3 * _CLOSE[dtype] * expected.square().mean().sqrt()
        for row, n in enumerate(wrote.length.tolist()):
            end = wrote.prefix + n + T
            for mine, other in ((wrote.k, generally.k), (wrote.v, generally.v)):
                assert torch.equal(mine[:, row, :, end:], other[:, row, :, end:]), "what lies behind stays as it was"
                held, expected_held = mine[:, row, :, :end].double(), other[:, row, :, :end].detach().double()
                assert (held - expected_held).abs().max() < 3 * _CLOSE[dtype] * expected_held.square().mean().sqrt()


@pytest.mark.parametrize("heads", [1, 2])
def test_also_with_fewer_key_heads_and_at_the_end_of_the_grid(heads: int) -> None:
    model = _model("class", torch.float32, n_kv_head=heads)
    for lengths in ([15], [16], [12, 12]):  # the last tokens go past the grid
        quick, _ = _pass(model, lengths, 6, True, general=False)
        expected, _ = _pass(model, lengths, 6, True, general=True)
        assert (quick - expected).abs().max() < 3e-5 * expected.square().mean().sqrt()


@pytest.mark.parametrize("dtype", _CLOSE)
def test_guidance_before_the_output_product_is_guidance_after_it(dtype: torch.dtype) -> None:
    """By number, by scalar, and by a scale of each token's own, of which 1 is the conditional row itself."""
    model, lengths = _model("class", dtype), [4, 2]
    tokens = torch.randint(_VOCAB, (2, 3), generator=torch.Generator().manual_seed(5)).repeat(2, 1)
    with torch.no_grad():
        logits = model(tokens, cache=_filled(model, lengths, True)).logits
        conditional, unconditional = logits.chunk(2)
        of_each = torch.tensor([[1.0, 7.5, 0.0], [2.0, 1.0, 3.0]])[..., None]
        for scale in (2.0, torch.tensor(2.0), of_each):
            out = model(tokens, cache=_filled(model, lengths, True), guidance=scale)
            expected = unconditional + scale * (conditional - unconditional)
            assert out.logits.shape == (2, 3, _VOCAB) and out.features.shape == (4, 3, 48) and out.logits.dtype == torch.float32
            assert (out.logits - expected).abs().max() < 5 * _CLOSE[dtype] * expected.square().mean().sqrt()


def test_weights_that_change_between_images_are_seen() -> None:
    """Nothing made for the passes of one cache outlives it: `.data` is changed unseen by torch's own counters."""
    model = _model("class", torch.float32)
    condition = Condition(class_labels=torch.tensor([1, 2]))

    def generated() -> Tensor:
        with torch.no_grad():
            cache = model.new_cache(2, scratch=4)
            model(condition=condition, cache=cache)
            return model(torch.tensor([[1, 2], [3, 4]]), cache=cache).logits

    before = generated()
    for layer in model.layers:
        layer.attention_norm.weight.data.mul_(1.5)
        layer.ffn_norm.weight.data.neg_()
    after = generated()
    assert (after - before).abs().max() > 0.01
    fresh = LlamaGenTransformer.from_config(model.config).eval()
    fresh.load_state_dict(model.state_dict())
    model = fresh
    assert torch.allclose(generated(), after, atol=1e-5)
