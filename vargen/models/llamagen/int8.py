"""Passes of a LlamaGen transformer with 8-bit integer products: prefill, step and teacher forcing.

Rows are independent of each other and of the number of tokens of a pass, bit by bit. A step runs as one compiled function where
`vargen.kernels.int8.load` has it, and by torch operators elsewhere, with the same bits.

Shape suffixes: B rows (images; twice as many under guidance), P conditioning rows, N image tokens of the grid, T tokens of one
pass, D width, H heads, G key heads, K head width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vargen.kernels.int8.arithmetic import (
    attend_int8,
    exact_gelu,
    exact_rms_norm,
    exact_swiglu,
    guide_rows,
    quantize_activations,
    rotate_pairs,
)
from vargen.kernels.int8.cores import share_products
from vargen.kernels.int8.format import Layers, Matrix, make_buffers
from vargen.models.guidance import Condition
from vargen.models.int8_cache import Int8Cache
from vargen.models.quantization import as_array, packed_weights

if TYPE_CHECKING:
    from vargen.models.llamagen.network import LlamaGenTransformer

Guidance = float | Tensor | None


def compute_logits(network: LlamaGenTransformer, features: Tensor, guidance: Guidance) -> Tensor:
    """Compute logits from features `[B, T, D]` after the final norm, guided if `guidance` is given."""
    return network.output(features if guidance is None else guide_rows(features, guidance))


def final_norm(network: LlamaGenTransformer, x: Tensor) -> Tensor:
    """Final norm of residuals `[B, T, D]`."""
    return _norm(network.norm, x)


def _norm(norm: Any, x: Tensor) -> Tensor:
    return exact_rms_norm(x, norm.weight, norm.eps)


def embed_condition(network: LlamaGenTransformer, condition: Condition) -> Tensor:
    """Embed a condition: float32 `[B, P, D]`."""
    if condition.class_labels is not None:
        return network.cls_embedding(condition.class_labels)
    projection = network.cls_embedding.cap_proj
    assert condition.caption_embeds is not None
    return projection.fc2(exact_gelu(projection.fc1(condition.caption_embeds.float())))


def run_prefill(network: LlamaGenTransformer, x: Tensor, mask: Tensor | None, cache: Int8Cache) -> Tensor:
    """Run embedded conditioning rows `[B, P, D]` as `LlamaGenTransformer._prefill` does; returns the last residual."""
    B, P, _ = x.shape
    visible = torch.ones(B, P, dtype=torch.float32) if mask is None else mask.float()
    seen = visible.cumsum(1)
    total = seen[:, -1:]
    compressed = cache.prefix == 1
    counts = [-math.inf, *(math.log(count) for count in range(1, P + 1))]
    logarithms = torch.tensor(counts, dtype=torch.float32)  # the same for any batch
    cache.prefix_bias.copy_(logarithms[total.long()] if compressed else logarithms[visible.long()])
    layers: Any = network.layers
    for i, layer in enumerate(layers):
        attention = layer.attention
        first = (attention.n_head + attention.n_kv_head) * attention.head_dim
        v = attention.wqkv.rows(first)(_norm(layer.attention_norm, x)).unflatten(-1, (-1, attention.head_dim))
        weighted = v * visible[:, :, None, None]
        sums = weighted.cumsum(1)  # torch adds one row after the other
        running = (sums + v - weighted) / (seen + 1 - visible)[:, :, None, None]
        cache.write_prefix(i, sums[:, -1:] / total.clamp_min(1)[:, :, None, None] if compressed else v)
        x = add_residuals(layer, x, running.repeat_interleave(attention.n_head // attention.n_kv_head, dim=2))
    return x[:, -1:]


def add_residuals(layer: Any, x: Tensor, attended_BTHK: Tensor) -> Tensor:
    """Add attention output and feed-forward to residuals `[B, T, D]`."""
    feed_forward = layer.feed_forward
    x = x + layer.attention.wo(attended_BTHK.flatten(2))
    values, scale = quantize_activations(_norm(layer.ffn_norm, x))
    gate, up = feed_forward.w1.multiply(values, scale), feed_forward.w3.multiply(values, scale)
    return x + feed_forward.w2(exact_swiglu(gate, up))


def forward_sequence(network: LlamaGenTransformer, x: Tensor, cos_sin: Tensor, visible: Tensor) -> Tensor:
    """Run whole sequences `[B, T, D]` with rotary factors `[T, K/2, 2]`; `visible`: bool `[T, T]` or `[B, 1, T, T]`."""
    bias = torch.zeros(visible.shape, dtype=torch.float32).masked_fill_(~visible, -math.inf)
    bias = bias.view(-1, 1, *visible.shape[-2:])
    B, T, config = len(x), x.shape[1], network.config
    shape = 1, B, config.n_kv_head or config.n_head, config.dim // config.n_head
    cache = Int8Cache(*shape, prefix=0, tokens=T, scratch=0, most_slots=network.num_prefix_rows + network.tokens)
    return _run_layers(network, x, cos_sin[None], cache, torch.arange(T).expand(B, T), bias)


def _run_layers(
    network: LlamaGenTransformer, x: Tensor, cos_sin: Tensor, cache: Int8Cache, slots_RT: Tensor, bias: Tensor
) -> Tensor:
    """Run embedded tokens `[R, T, D]`; a cache of one layer is used for each in turn. Returns the last residual."""
    layers: Any = network.layers
    for i, layer in enumerate(layers):
        own, attention = i % cache.layers, layer.attention
        qkv = attention.wqkv(_norm(layer.attention_norm, x)).unflatten(-1, (-1, attention.head_dim))
        qk, v = qkv.split([attention.n_head + attention.n_kv_head, attention.n_kv_head], dim=2)
        q, k = rotate_pairs(qk, cos_sin).split([attention.n_head, attention.n_kv_head], dim=2)
        cache.write(own, slots_RT, k, v)
        x = add_residuals(layer, x, attend_int8(q, *cache.view(own, bias.shape[-1]), bias))
    return x


_NO_POSITIONS, _NO_SCALES = np.zeros((0, 0), np.int64), np.zeros((0, 0), np.float32)


def run_step(
    network: LlamaGenTransformer,
    tokens_BT: Tensor,
    cache: Int8Cache,
    positions: Tensor | None,
    ancestors: Tensor | None,
    guidance: Guidance,
) -> tuple[Tensor, Tensor, Tensor]:
    """Feed T tokens after the pointer of each row; arguments as in `LlamaGenTransformer.forward`.

    Tokens may be those of images, which have the same number of rows each. Returns logits, features and hidden states.
    """
    B, T, compiled = cache.rows, tokens_BT.shape[1], cache.compiled
    if compiled is None:
        if positions is None:
            positions = cache.length[:, None] + torch.arange(T)
        cos_sin = network.rotary[positions.expand(B, T).clamp(max=network.tokens - 1)]
        slots = cache.prefix + cache.length.clamp(max=cache.tokens)[:, None] + torch.arange(T)  # full rows: only scratch
        bias = cache.attention_bias(T, ancestors)
        embedded = network.tok_embeddings(tokens_BT.repeat(B // len(tokens_BT), 1))
        x = _run_layers(network, embedded, cos_sin, cache, slots, bias)
        features = final_norm(network, x)
        return compute_logits(network, features, guidance), features, x
    if cache.buffers is None:
        cache.weights = _pack(network, compiled)
        H, F = (int(size) for size in cache.weights.sizes)
        layout = cache.weights.layers, cache.weights.output, cache.arrays, (B, cache.scratch)
        cache.buffers = make_buffers(*layout, H, max(network.config.dim, H * cache.head_dim), F)
    tokens = as_array(tokens_BT)
    cells = _NO_POSITIONS if positions is None else as_array(positions.expand(B, T))
    tree = np.zeros((B, 0, 0), np.bool_) if ancestors is None else as_array(ancestors.expand(B, T, T))
    scales = _NO_SCALES
    if guidance is not None:
        given = guidance.numpy() if isinstance(guidance, Tensor) else guidance
        scales = np.empty((B // 2, T), np.float32)
        scales[...] = given[..., 0] if isinstance(given, np.ndarray) and given.ndim else given
    D, V = network.config.dim, network.config.vocab_size
    logits = torch.empty(B if guidance is None else B // 2, T, V, dtype=torch.float32)
    # All is at hand before the pass, which evicts from the CPU's caches what operators need.
    features, hidden = torch.empty(2, B, T, D, dtype=torch.float32).unbind()
    results = hidden.numpy(), features.numpy(), logits.numpy()
    with share_products(compiled, cache.buffers.team):
        compiled.run_token_pass(cache.weights, cache.arrays, cache.buffers, tokens, cells, tree, scales, *results)
    return logits, features, hidden


def _pack(network: LlamaGenTransformer, compiled: Any) -> Any:
    """Return `compiled.TokenWeights` of a network."""
    config = network.config
    blocks = [(each.attention, each.feed_forward) for each in network.layers]
    matrices = [((own.wqkv,), (own.wo,), (forward.w1, forward.w3), (forward.w2,)) for own, forward in blocks]

    def make(layers: Layers, output: Matrix) -> Any:
        embedding: Any = network.tok_embeddings
        norms: list[Any] = [norm.weight for block in network.layers for norm in (block.attention_norm, block.ffn_norm)]
        final: Any = network.norm
        return compiled.TokenWeights(
            sizes=np.array([config.n_head, matrices[0][2][0].out_features]),
            layers=layers,
            norms=np.stack([as_array(norm) for norm in (*norms, final.weight)]),
            output=output,
            embedding=as_array(embedding.weight),
            rotary=as_array(network.rotary),
            eps=float(final.eps),
        )

    return packed_weights(network, [*matrices, ((network.output,),)], make)
