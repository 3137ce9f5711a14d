"""Adapters on the projections of queries, keys and values act in every form of a pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from low_rank import LowRank
from tiny_models import infinity_pipeline, text_pipeline, text_var_pipeline

from vargen.decoding import decode


def log_probs_alone(pipe: Any, tokens: torch.Tensor, condition: Any) -> torch.Tensor:
    """Log-probabilities by passes over known tokens, from the cache."""
    from vargen.decoding.decode import compute_log_probs

    return compute_log_probs(pipe.decoding_model(1.0), condition, tokens)[1]


def test_an_adapted_llamagen_computes_the_same_with_and_without_a_cache() -> None:
    pipe = text_pipeline()
    condition, _ = pipe.encode_condition(["a red apple"])
    tokens = decode(pipe.decoding_model(1.0), condition, torch.tensor([1])).tokens
    plain = log_probs_alone(pipe, tokens, condition)
    for layer in pipe.transformer.layers:
        layer.attention.wqkv = LowRank(layer.attention.wqkv)
    found = log_probs_alone(pipe, tokens, condition)
    with torch.no_grad():
        logits = pipe.transformer(tokens, condition).logits.float()
    expected = logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    assert torch.allclose(found, expected, atol=1e-4) and not torch.allclose(found, plain, atol=1e-2)


@pytest.mark.parametrize(("make", "attention"), [(text_var_pipeline, "attn"), (infinity_pipeline, "sa")])
def test_an_adapter_changes_the_tokens_of_next_scale_models(make: Any, attention: str) -> None:
    pipe = make()
    pipe.set_progress_bar_config(disable=True)
    options: dict[str, Any] = {"temperature": 0, "output_type": "latent"}
    plain = pipe("a red apple", **options).tokens
    for block in pipe.transformer.blocks:
        part = getattr(block, attention)
        part.mat_qkv = LowRank(part.mat_qkv)
    assert not torch.equal(pipe("a red apple", **options).tokens, plain)
