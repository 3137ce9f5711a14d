"""Compiled int8 passes of next-scale transformers: close to the operators; the same bits at any width and in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from int8_passes import compiled_code
from tiny_models import class_var_pipeline, text_var_pipeline, tiny_var
from torch import Tensor

from vargen.decoding import resolve_method
from vargen.kernels.int8.load import SCALE_PASS, CompiledCode
from vargen.models.guidance import Condition
from vargen.models.quantization import quantize_network
from vargen.models.var.blocks import ScaleCache
from vargen.models.var.int8 import Int8ScaleCache
from vargen.models.var.network import VARTransformer

SHAPES: dict[str, dict[str, Any]] = {
    "text": {},
    "class": {"condition": "class"},
    "scaled queries": {"attn_l2_norm": False},
    "shared modulation": {"shared_aln": True, "condition": "class"},
    "odd sizes": {"dim": 60, "n_head": 3, "vocab_size": 70, "mlp_ratio": 2.5},
}
CAPTIONS = [5, 2, 4]  # valid rows


@pytest.fixture(autouse=True, scope="module")
def compiled() -> Any:
    return compiled_code(SCALE_PASS)


def quantized(**overrides: Any) -> VARTransformer:
    return quantize_network(tiny_var(**overrides))


def condition_of(model: VARTransformer, images: list[int], padded: int = 5) -> Condition:
    """Under guidance; the caption of image i depends only on i."""
    if model.config.condition == "class":
        found = Condition(class_labels=torch.tensor(images))
    else:
        embeds = torch.stack([torch.randn(5, 32, generator=torch.Generator().manual_seed(i)) for i in images])
        mask = torch.arange(5) >= 5 - torch.tensor([CAPTIONS[i] for i in images])[:, None]
        found = Condition(None, (embeds * mask[..., None])[:, -padded:], mask[:, -padded:])
    return found.cat(model.null_condition(found))


def inputs_of(model: VARTransformer, images: list[int]) -> Tensor:
    shape = (model.tokens, model.config.code_dim)
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(9 + i)) for i in images]).repeat(2, 1, 1)


def run(
    model: VARTransformer, images: list[int], scales: tuple[int, ...] = (1, 1, 1, 1), cache: Any = None, padded: int = 5
) -> Tensor:
    """Logits of all scales, in passes over these numbers of scales."""
    condition, inputs, found = condition_of(model, images, padded), inputs_of(model, images), []
    prefix = padded if model.config.condition == "text" else 0
    cache = model.new_cache(2 * len(images), prefix) if cache is None else cache
    first = 0
    with torch.inference_mode():
        for count in scales:
            begin, end = model.first_token_of(first), model.ends[first + count - 1]
            fed = inputs[:, max(begin, 1) : end] if end > 1 else None
            guidance = torch.linspace(0, 2, model.tokens)[begin:end]
            found.append(model(fed, condition if first == 0 else None, cache, guidance=guidance).logits)
            first += count
    return torch.cat(found, 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_they_are_close_to_the_operators_and_a_wide_pass_equals_narrow_ones(shape: str) -> None:
    model, images = quantized(**SHAPES[shape]), [0, 1]
    found = run(model, images)
    prefix = 5 if model.config.condition == "text" else 0
    cache = ScaleCache(model.config.depth, 4, model.n_head, model.head_dim, prefix=prefix, tokens=model.tokens)
    expected = run(model, images, cache=cache)
    assert (found - expected).norm() < 0.03 * expected.norm()
    for scales in ((4,), (2, 2), (1, 3)):
        assert torch.equal(run(model, images, scales), found), scales


@pytest.mark.parametrize("condition", ["class", "text"])
def test_an_image_of_a_batch_equals_the_image_alone(condition: str) -> None:
    model = quantized(condition=condition)
    batch = run(model, [2, 0, 1])
    assert torch.equal(run(model, [1], (1, 2, 1), padded=2)[0], batch[2])  # its caption without padding
    assert torch.equal(run(model, [0, 2])[1], batch[0])


def test_scales_are_run_again_and_rows_alone() -> None:
    model, images = quantized(), [0, 1]
    cache, inputs = model.new_cache(4, 5), inputs_of(model, images)
    assert isinstance(cache, Int8ScaleCache) and cache.nbytes > 0
    expected = run(model, images, cache=cache)
    with torch.inference_mode():
        unguided = run_unguided(model, images)
        cache.scale = 3
        again = model(inputs[:, 14:], cache=cache, guidance=torch.linspace(0, 2, model.tokens)[14:]).logits
        assert torch.equal(again, expected[:, 14:])
        cache.scale = 3
        part = cache.select_rows(slice(1, 2))
        assert torch.equal(model(inputs[1:2, 14:], cache=part).logits[0], unguided[1, 14:])
    with pytest.raises(NotImplementedError):
        cache.layer(0, 0)


def run_unguided(model: VARTransformer, images: list[int]) -> Tensor:
    inputs, cache = inputs_of(model, images), model.new_cache(4, 5)
    return model(inputs[:, 1:], condition_of(model, images), cache).logits


@pytest.mark.parametrize("make", [class_var_pipeline, text_var_pipeline])
def test_methods_generate_the_same_image_in_any_batch(make: Any) -> None:
    pipe = make(n_head=4)
    for network in (pipe.transformer, pipe.draft_transformer):
        quantize_network(network)
    subjects = [1, 2, 3] if pipe.is_class_conditional else ["a cat", "a red apple", "a small blue house with a tree"]

    def tokens(name: str, rows: list[int]) -> Tensor:
        method = resolve_method(name, "next-scale")
        generators = [torch.Generator().manual_seed(row) for row in rows]
        chosen: Any = [subjects[row] for row in rows]
        call = {"class_labels": chosen} if pipe.is_class_conditional else {"prompt": chosen}
        return pipe(**call, accelerator=method, generator=generators, output_type="latent", guidance_scale=3.0).images

    plain = torch.cat([tokens("plain", [row]) for row in range(3)])
    assert torch.equal(tokens("plain", [2, 0]), plain[[2, 0]])
    for method in ("code", "economy"):
        assert torch.equal(tokens(method, [1, 2])[1], tokens(method, [2])[0]), method


def test_nothing_is_compiled_again(compiled: Any) -> None:
    for function in (compiled.run_scale_pass, CompiledCode.steps.sample_rows):
        assert len(function.signatures) == 1, "compiled again, which takes seconds"


def test_operators_serve_where_compiled_passes_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized()
    assert model.pass_backend == "compiled int8"
    monkeypatch.setenv("VARGEN_KERNELS", "reference")
    assert type(model.new_cache(2, 5)) is ScaleCache and model.pass_backend == "int8 operators"
    monkeypatch.delenv("VARGEN_KERNELS")
    assert type(quantized(dim=30, n_head=2).new_cache(2, 5)) is ScaleCache, "an odd head width"
