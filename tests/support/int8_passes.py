"""Passes of tiny quantized transformers, by torch operators and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import attentive_transformer
from torch import Tensor

from vargen.kernels.int8.load import TOKEN_PASS, CompiledCode, find_compiled_blocker
from vargen.models.guidance import Condition
from vargen.models.int8_cache import Int8Cache
from vargen.models.llamagen.network import LlamaGenTransformer
from vargen.models.quantization import quantize_network

VOCAB, TOKENS, SCRATCH = 40, 16, 8
BACKENDS = ("operators", "compiled")


def compiled_code(code: CompiledCode) -> Any:
    """The module of compiled functions; skips the test where they cannot run."""
    if (reason := find_compiled_blocker()) is not None:
        pytest.skip(reason)
    return code.load(wait=True)


def compiled_passes() -> Any:
    return compiled_code(TOKEN_PASS)


def quantized_transformer(**overrides: Any) -> LlamaGenTransformer:
    return quantize_network(attentive_transformer("text", **{"n_head": 6, **overrides}))


def condition_of(rows: list[int]) -> Condition:
    """Captions of these images; that of image i depends only on i."""
    embeds = torch.stack([torch.randn(6, 12, generator=torch.Generator().manual_seed(i)) for i in rows])
    visible = torch.arange(6) >= torch.tensor(rows)[:, None] % 4
    return Condition(None, embeds * visible[..., None], visible)


class Images:
    """Images of a transformer, under guidance, whose cached tokens are the same for any backend, batch and width.

    Args:
        rows: numbers of the images. lengths: number of cached tokens of each.
        width: tokens of the passes that fill the cache.
    """

    def __init__(
        self, model: LlamaGenTransformer, backend: str, rows: list[int], lengths: list[int], width: int = 1, prefix: int = 1
    ):
        self.model, self.rows = model, rows
        config = model.config
        shape = (len(model.layers), 2 * len(rows), config.n_kv_head or config.n_head, config.dim // config.n_head)
        options = {"prefix": prefix, "tokens": TOKENS, "scratch": SCRATCH}
        self.cache = Int8Cache(*shape, compiled=compiled_passes() if backend == "compiled" else None, **options)
        condition = condition_of(rows)
        with torch.inference_mode():
            condition = condition.cat(model.null_condition(condition))
            self.first = model(condition=condition, cache=self.cache, guidance=2.0).logits
        for start in range(0, max(lengths), width):
            self.feed(self.tokens(start, min(width, max(lengths) - start)))
            self.cache.commit_chain(min(width, max(lengths) - start))
        self.cache.rollback(torch.tensor(2 * lengths))

    def tokens(self, start: int, count: int) -> Tensor:
        """Tokens `[B, count]` of the images from a position on."""
        whole = [torch.randint(VOCAB, (2 * TOKENS,), generator=torch.Generator().manual_seed(100 + i)) for i in self.rows]
        return torch.stack(whole)[:, start : start + count]

    def feed(self, tokens: Tensor, guidance: Any = 2.0, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, features and hidden states of a pass over tokens `[B, T]`."""
        with torch.inference_mode():
            out = self.model(tokens.repeat(2, 1), cache=self.cache, guidance=guidance, **options)
        return out.logits, out.features, out.hidden_states
