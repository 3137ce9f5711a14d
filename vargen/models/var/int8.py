"""Compiled passes of a VAR transformer with 8-bit integer products, over a cache of its own.

A pass is one compiled function (`vargen.kernels.int8.passes`). Where that cannot run, and until it is built, the blocks run
by torch operators over a `ScaleCache`. The two round differently. In compiled passes, rows are independent of each other and of
the number of scales of a pass, bit by bit: products outside of the layers have the same shapes for a row in any batch.

Shape suffixes: R rows (images; twice as many under guidance), P caption rows, T tokens of one pass, n tokens with logits, D
width, H heads, K head width, E code width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vargen.kernels.int8.cores import share_products
from vargen.kernels.int8.format import PANEL, Layers, Matrix, Slots, allocate_slots, make_buffers
from vargen.kernels.int8.load import SCALE_PASS
from vargen.models.guidance import Condition
from vargen.models.quantization import as_array, packed_weights
from vargen.models.var.blocks import MOST_SHARPNESS, LayerView, Modulation, ScaleCache

if TYPE_CHECKING:
    from vargen.models.var.network import VARTransformer


class Int8ScaleCache(ScaleCache):
    """The cache of compiled passes, in memory that only they write.

    Args:
        compiled: module `vargen.kernels.int8.passes`.
        arrays: as passes take it.
    """

    def __init__(self, compiled: Any, arrays: Slots):
        self.compiled, self.arrays = compiled, arrays
        self.rows, self.prefix = arrays.bias.shape
        self.scale = 0
        self.modulation: Modulation | None = None
        self.prefix_mask: Tensor | None = None
        self._buffers: tuple[int, Any] = (0, None)  # the number of tokens that they are for

    @property
    def nbytes(self) -> int:
        """Size of the cached keys, values and scales in bytes."""
        return sum(each.nbytes for each in self.arrays[:-1])

    def select_rows(self, chosen: slice) -> Int8ScaleCache:
        arrays: Any = [each[chosen] for each in self.arrays[:-1]]
        part = Int8ScaleCache(self.compiled, Slots(*arrays, self.arrays.limits))
        part.scale = self.scale
        part.modulation = self.modulation and self.modulation.select_rows(chosen)
        part.prefix_mask = None if self.prefix_mask is None else self.prefix_mask[chosen]
        return part

    def layer(self, layer: int, start: int) -> LayerView:
        raise NotImplementedError("the compiled pass writes tokens itself")

    def buffers(self, weights: Any, tokens: int) -> Any:
        """Buffers of passes over up to `tokens` tokens of each row. They are kept."""
        if self._buffers[0] < tokens:
            (H, pairs), F = self.arrays.k.shape[2:4], int(weights.sizes[0])
            layout = weights.layers, weights.output, self.arrays
            self._buffers = (tokens, make_buffers(*layout, (self.rows, tokens), H, 2 * pairs * H, F))
        return self._buffers[1]


def make_scale_cache(network: VARTransformer, rows: int, prefix: int) -> Int8ScaleCache | None:
    """Create a cache for compiled passes; None where they do not run, or not yet. Their heads have even widths."""
    compiled = SCALE_PASS.load()
    if network.head_dim % 2 or compiled is None:
        return None
    shape = (network.config.depth, rows, network.n_head, network.head_dim)
    most = network.config.caption_rows + network.tokens
    return Int8ScaleCache(compiled, allocate_slots(*shape, prefix=prefix, slots=prefix + network.tokens, most=most))


def run_pass(
    network: VARTransformer,
    inputs: Tensor | None,
    condition: Condition | None,
    cache: Int8ScaleCache,
    last: int,
    logits_of: int | None,
    guidance: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the scales from `cache.scale` to `last`; arguments and results as in `VARTransformer.forward`."""
    first, R, P = cache.scale, cache.rows, cache.prefix
    begin = network.first_token_of(first)
    tokens, fed = network.ends[last] - begin, P if condition is not None else 0
    x = torch.empty(R, fed + tokens, network.config.dim, dtype=torch.float32)
    if condition is not None:
        x[:, : fed + network.ends[0]] = _embed_condition(network, condition, cache)
    if inputs is not None:
        _embed_inputs(network, inputs, first + (condition is not None), x[:, fed + tokens - inputs.shape[1] :])
    place = slice(begin, begin + tokens)
    x[:, fed:] += network.lvl_embed(network.lvl_1L[:, place]) + network.pos_1LC[:, place]
    modulation = cache.modulation
    assert modulation is not None
    weights, D = _pack(network, cache.compiled), network.config.dim
    buffers = cache.buffers(weights, max(x.shape[1], network.scales[-1] ** 2))  # of the largest pass: made once
    wanted = first if logits_of is None else max(first, last + 1 - logits_of)
    n = network.ends[last] - network.first_token_of(wanted)
    strength = np.zeros(0, np.float32) if guidance is None else as_array(guidance.float())
    rows = R if guidance is None else R // 2
    features = torch.empty(R, n, D, dtype=torch.float32)
    logits = torch.empty(rows, n, network.config.vocab_size, dtype=torch.float32)
    modulations = as_array(modulation.blocks[:, :, :, 0]), as_array(modulation.head[:, :, 0])
    places = _reach(network, cache, first, last, fed), begin + P - fed
    results = features.numpy(), logits.numpy()
    with share_products(cache.compiled, buffers.team):
        cache.compiled.run_scale_pass(weights, cache.arrays, buffers, x.numpy(), *modulations, *places, strength, *results)
    cache.scale = last + 1
    return logits, features[:rows]


def _embed_condition(network: VARTransformer, condition: Condition, cache: Int8ScaleCache) -> Tensor:
    """Return the caption and the first scale's input, `[R, P + n, D]`, without their positions; sets the cache's modulation.

    Each row is embedded alone, without its padding, so that it does not depend on the other rows.
    """
    count = cache.rows
    x = torch.zeros(count, cache.prefix + network.ends[0], network.config.dim, dtype=torch.float32)
    mask = torch.zeros(count, cache.prefix, dtype=torch.bool)
    parts = []
    for r in range(count):
        row, valid = _unpadded_row(condition, r)
        vector, caption, _ = network.embed_condition(row)
        parts.append(network.modulation(vector))
        x[r, cache.prefix :] = vector[:, None] + network.pos_start
        if caption is not None:
            mask[r, : len(valid)] = valid
            x[r, : cache.prefix][mask[r]] = caption[0]
    joined = Modulation(torch.cat([each.blocks for each in parts], 2), torch.cat([each.head for each in parts], 1))
    cache.keep(joined, mask)
    cache.arrays.bias[...] = np.where(mask.numpy(), 0, -math.inf)
    return x


def _unpadded_row(condition: Condition, r: int) -> tuple[Condition, Tensor]:
    """Return a row of a condition, a caption without its padding, and which of the caption's rows are valid."""
    if condition.class_labels is not None:
        return Condition(class_labels=condition.class_labels[r : r + 1]), torch.zeros(0, dtype=torch.bool)
    caption = condition.caption_embeds
    assert caption is not None
    given = condition.caption_mask
    valid = torch.ones(caption.shape[1], dtype=torch.bool) if given is None else given[r].bool()
    return Condition(None, caption[r : r + 1, valid], torch.ones(1, int(valid.sum()), dtype=torch.bool)), valid


def _embed_inputs(network: VARTransformer, inputs: Tensor, first: int, out: Tensor) -> None:
    """Embed inputs `[R, T, E]` of the scales from `first` on, one product for each row and scale."""
    inputs, begin, scale = inputs.to(out.dtype), 0, first
    while begin < inputs.shape[1]:
        end = begin + network.scales[scale] ** 2
        for r in range(len(inputs)):
            out[r, begin:end] = network.word_embed(inputs[r, begin:end])
        begin, scale = end, scale + 1


def _reach(network: VARTransformer, cache: Int8ScaleCache, first: int, last: int, fed: int) -> np.ndarray:
    """Number of slots of the pass that each of its tokens sees, int64 `[R, T]`: its own scale, and the caption.

    Caption rows see the caption; padding rows see nothing.
    """
    begin = network.first_token_of(first)
    ends = [fed + end - begin for end in network.ends[first : last + 1]]
    counts = [network.scales[scale] ** 2 for scale in range(first, last + 1)]
    reach = np.empty((cache.rows, ends[-1]), np.int64)
    reach[:, fed:] = np.repeat(ends, counts)
    if fed:
        assert cache.prefix_mask is not None
        reach[:, :fed] = cache.prefix_mask.numpy() * fed
    return reach


def _pack(network: VARTransformer, compiled: Any) -> Any:
    """Return `compiled.ScaleWeights` of a network."""
    matrices = [((block.attn.mat_qkv,), (block.attn.proj,), (block.ffn.fc1,), (block.ffn.fc2,)) for block in network.blocks]

    def make(layers: Layers, output: Matrix) -> Any:
        biases, sharpness = [], []
        for block in network.blocks:
            attention: Any = block.attn
            qkv = torch.cat([attention.q_bias, torch.zeros_like(attention.q_bias), attention.v_bias])
            parts: Any = (qkv, attention.proj.bias, block.ffn.fc1.bias, block.ffn.fc2.bias)
            biases.append(np.concatenate([_padded(bias) for bias in parts]))
            if attention.l2_norm:
                sharpness.append(as_array(attention.scale_mul_1H11.clamp_max(MOST_SHARPNESS).exp().flatten()))
            else:
                sharpness.append(np.full(attention.n_head, 0.25 / math.sqrt(attention.head_dim), np.float32))
        first: Any = network.blocks[0]
        return compiled.ScaleWeights(
            sizes=np.array([first.ffn.fc1.out_features, int(first.attn.l2_norm)]),
            layers=layers,
            bias=np.stack(biases),
            sharpness=np.stack(sharpness),
            output=output,
            output_bias=_padded(network.head.bias),
        )

    return packed_weights(network, [*matrices, ((network.head,),)], make)


def _padded(bias: Tensor) -> np.ndarray:
    """A bias with zeros up to a multiple of 64 columns."""
    return np.pad(as_array(bias), (0, -len(bias) % PANEL))
