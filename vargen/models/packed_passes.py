"""Passes of a LlamaGen transformer in which each row feeds a number of tokens of its own.

Tokens of all rows are packed for the products, which are most of a pass. Only attention runs on rows of equal width.

Shape suffixes: R rows (images; twice as many under guidance), B images, T most tokens of a row, M tokens of all rows, H heads,
K head width, D width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vargen.kernels.attention import attend
from vargen.kernels.dispatch import is_eager_cpu
from vargen.models.kv_cache import KVCache
from vargen.models.llamagen_blocks import rotary_factors

if TYPE_CHECKING:
    from vargen.models.llamagen import LlamaGenTransformer


_PACKED_SHARE = 0.9  # of the tokens of a pass: if more are fed, packing takes longer than it saves


def packing_saves(fed: Tensor, T: int) -> bool:
    """Whether a packed pass is faster than one over T tokens of each row, where `fed` `[R]` of them are needed."""
    return is_eager_cpu(fed) and int(fed.sum()) <= _PACKED_SHARE * T * len(fed)


def run_packed_step(
    network: LlamaGenTransformer, tokens_RT: Tensor, cache: KVCache, fed_R: Tensor, guidance: float | Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Feed the first `fed` tokens of each row, int64 `[R]` on a CPU, after its pointer; a chain.

    It is for inference in eager mode. Under guidance, the rows of an image feed the same tokens.

    Args:
        guidance: as in `LlamaGenTransformer.forward`.

    Returns:
        Logits `[B, T, V]`, and hidden states `[R, T, D]` after and before the final norm; zero for tokens that are not fed.
    """
    R, T = tokens_RT.shape
    steps = torch.arange(T)
    places = (steps < fed_R[:, None]).flatten().nonzero()[:, 0]  # [M] in the flattened rows
    positions = (cache.length[:, None] + steps).flatten()[places]
    rotary = rotary_factors(network.rotary[positions.clamp(max=network.tokens - 1)][None])
    view = cache.view_for_packed_pass(T, fed_R, places)
    H, D = network.config.n_head, network.config.dim
    bias = cache.attention_mask(T, None, H, view.num_slots_read)
    x = network.tok_embeddings(tokens_RT.flatten()[places])[None]
    queries = x.new_zeros(R * T, H, D // H)
    for i, layer in enumerate(network.layers):
        attention, scales = layer.attention, cache.norm_scales[i] if cache.norm_scales else (None, None)
        q, k, v = attention.project(layer.attention_norm(x, scales[0]), rotary)
        keys, values = view.write(i, k, v)
        queries[places] = q[0]
        attended = attend(queries.view(R, T, H, -1), keys, values, bias).reshape(R * T, D)
        x = layer.add_residuals(x, attention.wo(attended[places][None]), scales[1])
    packed = network.norm(x)
    features, hidden = x.new_zeros(R * T, D), x.new_zeros(R * T, D)
    features[places], hidden[places] = packed[0], x[0]
    images = R if guidance is None else R // 2
    if guidance is not None:
        packed = packed.view(2, -1, D)  # the first and the last half of the rows feed as many tokens
        places = places[: packed.shape[1]]
        if isinstance(guidance, Tensor) and guidance.dim():
            guidance = guidance.expand(images, T, 1).reshape(-1, 1)[places]
    logits = torch.zeros(images * T, network.config.vocab_size, dtype=torch.float32)
    logits[places] = network._logits(packed, guidance)[0]
    return logits.view(images, T, -1), features.view(R, T, D), hidden.view(R, T, D)
