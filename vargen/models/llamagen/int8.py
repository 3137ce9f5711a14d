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
from vargen.kernels.int8.format import Layers, Matrix, allocate_slots, make_buffers
from vargen.models.guidance import Condition
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
    if cache.weights is None:
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


# -- the cache ---------------------------------------------------------------------------------------------------------------


class Int8Cache:
    """Quantized keys and values of `vargen.kernels.int8.format.Slots`, with a pointer per row, as `KVCache` has them.

    Slots are [ conditioning prefix | image tokens | scratch ]. Operators see each pair as two 16-bit integers.

    Args:
        layers, rows, heads, head_dim, prefix, tokens, scratch: as in `KVCache`.
        most_slots: most visible slots of any cache of the network, on which the values' precision depends. Default: P + N.
        compiled: module `vargen.kernels.int8.passes`, whose passes write the tokens; None: operators do.

    Attributes:
        length, prefix_bias: as in `KVCache`.
        arrays: the same memory for compiled passes.
        weights, buffers: of compiled passes; set by the first one.
    """

    fused = False  # Triton kernels never use it

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        *,
        prefix: int,
        tokens: int,
        scratch: int = 1,
        most_slots: int | None = None,
        compiled: Any = None,
    ):
        self.compiled = compiled
        self.weights: Any = None
        self.buffers: Any = None
        self.layers, self.rows, self.heads, self.head_dim = layers, rows, heads, head_dim
        self.prefix, self.tokens, self.scratch = prefix, tokens, scratch
        self.slots = prefix + tokens + scratch
        self.most_slots = prefix + tokens if most_slots is None else most_slots
        shape = layers, rows, heads, head_dim
        self.arrays = allocate_slots(*shape, prefix=prefix, slots=self.slots, most=self.most_slots)
        self.k, self.v, self.k_scale, self.v_scale, self.length, self.prefix_bias = map(torch.from_numpy, self.arrays[:6])
        self._stores = self.k, self.v, self.k_scale, self.v_scale
        self._keys, self._values = (store.view(torch.int16).unflatten(-1, (-1, 2)) for store in (self.k, self.v))

    @property
    def nbytes(self) -> int:
        """Size of the cached keys, values and scales in bytes."""
        return sum(store.nbytes for store in self._stores)

    def write_prefix(self, layer: int, v_RPGK: Tensor) -> None:
        """Store the values of the conditioning, float32. Its keys are zero, as LlamaGen's always are."""
        slots_RP = torch.arange(self.prefix).expand(self.rows, -1)
        self.write(layer, slots_RP, torch.zeros_like(v_RPGK), v_RPGK)

    def prefix_only(self, rows: int) -> Int8Cache:
        """As `KVCache.prefix_only`."""
        shape = self.layers, rows, self.heads, self.head_dim
        return Int8Cache(*shape, prefix=self.prefix, tokens=0, scratch=0, most_slots=self.most_slots)

    def start_rows(self, new: Int8Cache, rows: Tensor) -> None:
        """As `KVCache.start_rows`."""
        for held, given in zip(self._stores, new._stores, strict=True):
            held.index_fill_(0, rows, 0)
            part = (slice(None), slice(None), *(slice(min(a, b)) for a, b in zip(held.shape[2:], given.shape[2:], strict=True)))
            held[part].index_copy_(0, rows, given[part])
        self.prefix_bias.index_copy_(0, rows, new.prefix_bias)
        self.length.index_fill_(0, rows, 0)

    def write(self, layer: int, slots_RT: Tensor, k_RTGK: Tensor, v_RTGK: Tensor) -> None:
        """Quantize and store the rotated keys and the values of a pass, float32."""
        k, k_scale = quantize_activations(k_RTGK, self.arrays.limits[0], torch.int16)
        v, v_scale = quantize_activations(v_RTGK, self.arrays.limits[1], torch.int16)
        row = torch.arange(self.rows)[:, None]
        # Indexed dimensions come first, so each assigned value is [R, T, ...].
        self._keys[:, layer][row, :, :, slots_RT] = k.unflatten(-1, (-1, 2))
        self._values[:, layer][row, :, slots_RT // 2, : self.head_dim, slots_RT % 2] = v
        self.k_scale[:, layer][row, :, slots_RT] = k_scale[..., 0]
        self.v_scale[:, layer][row, :, slots_RT] = v_scale[..., 0]

    def view(self, layer: int, slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return keys, their scales, values and their scales of the first slots of a layer, as `attend_int8` takes them."""
        pairs = self._keys[:, layer, ..., :slots, :], self._values[:, layer, :, : slots + 1 >> 1, : self.head_dim]
        k, v = (each.mT.to(torch.float32, memory_format=torch.contiguous_format).flatten(2, 3) for each in pairs)
        v = v[:, :, :slots]
        return k, self.k_scale[:, layer, :, :slots], v, self.v_scale[:, layer, :, :slots]

    def attention_bias(self, T: int, ancestors: Tensor | None) -> Tensor:
        """Return `KVCache.additive_mask`, float32 `[R, 1, T, S]`, for the slots in use."""
        length = self.length.clamp(max=self.tokens)
        reach = int(length.max()) + T
        offset = torch.arange(reach) - length[:, None]
        if ancestors is None:
            visible = offset[:, None] <= torch.arange(T)[:, None]
        else:
            index = offset.clamp(0, T - 1)[:, None].expand(-1, T, -1)
            own = ancestors.expand(self.rows, T, T).gather(2, index) & (offset < T)[:, None]
            visible = (offset < 0)[:, None] | own
        image = torch.zeros(visible.shape, dtype=torch.float32).masked_fill_(~visible, float("-inf"))
        return torch.cat([self.prefix_bias[:, None].expand(-1, T, -1), image], -1)[:, None]

    def commit_chain(self, count: Tensor | int) -> None:
        """As `KVCache.commit_chain`."""
        added = count.numpy() if isinstance(count, Tensor) else np.array([count])
        self.arrays.length.reshape(-1, added.size)[...] += added

    def rollback(self, length_R: Tensor) -> None:
        """Set every row's pointer, and discard the tokens after it."""
        self.length.copy_(length_R)

    def commit_path(self, accepted_RA: Tensor, count_R: Tensor) -> None:
        """As `KVCache.commit_path`."""
        if self.compiled is not None:
            self.compiled.move_slots(self.arrays, as_array(accepted_RA), as_array(count_R), self.tokens)
        else:
            steps, row = torch.arange(accepted_RA.shape[1]), torch.arange(self.rows)[:, None]
            first = self.prefix + self.length.clamp(max=self.tokens)[:, None]
            source = torch.where(steps < count_R[:, None], accepted_RA, steps)
            target, source = ((first + each).clamp(max=self.slots - 1) for each in (steps, source))
            self._keys[row, :, :, :, target] = self._keys[row, :, :, :, source]
            self._values[row, :, :, target // 2, :, target % 2] = self._values[row, :, :, source // 2, :, source % 2]
            for store in (self.k_scale, self.v_scale):
                store[row, :, :, target] = store[row, :, :, source]
        self.length += count_R

    def fill_randomly(self) -> None:
        """Fill all slots with random keys and values, for measurements."""
        for integers, limit in zip((self._keys, self._values), self.arrays.limits, strict=True):
            integers.copy_(torch.randn(integers.shape, dtype=torch.float32).mul_(100).round_().clamp_(-limit, limit))
        self.k_scale.fill_(0.01)
        self.v_scale.fill_(0.01)
