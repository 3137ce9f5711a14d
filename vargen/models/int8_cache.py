"""A cache of quantized keys and values, with a pointer per row, as `KVCache` has them in floating point.

Slots are [ conditioning prefix | image tokens | scratch ].

Shape suffixes: L layers, R rows (images, times two under guidance), S slots, P prefix slots, T tokens of one pass, G key
heads, K head width, A path slots; S' and K' are rounded up to 16.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vargen.kernels.int8.arithmetic import quantize_activations
from vargen.kernels.int8.format import Slots, score_limit, value_limit


def allocate_pairs(shape: tuple[int, int, int], head_dim: int, slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate keys, values and their scales as `vargen.kernels.int8.format.Slots` has them; `shape` is that of the scales."""
    slots, width = (-(-each // 16) * 16 for each in (slots, head_dim))
    shapes = (*shape, head_dim // 2, slots), (*shape, slots // 2, width)
    k, v = (torch.zeros(each, dtype=torch.int32) for each in shapes)
    k_scale, v_scale = (torch.zeros(*shape, slots, dtype=torch.float32) for _ in range(2))
    return k, v, k_scale, v_scale


def slots_of(stores: Iterable[Tensor], limits: tuple[int, int]) -> Slots:
    """Return a cache as compiled passes take it: keys, values, their scales, lengths and bias of the prefix."""
    arrays: Any = [store.numpy() for store in stores]
    return Slots(*arrays, limits)


class Int8Cache:
    """Keys `[L, R, G, K/2, S']` and values `[L, R, G, S'/2, K']`, pairs of 16-bit integers, with a scale per slot and head.

    Each int32 is a pair of the same slot or of two slots, as compiled passes read them. Operators see 16-bit integers.

    Args:
        layers, rows, heads, head_dim: shape of the network and of the batch.
        prefix: number of conditioning slots P.
        tokens: number of image tokens N of the grid.
        scratch: maximum number of tokens per pass, which is the number of slots after the grid.
        compiled: module `vargen.kernels.int8.token_pass`, whose passes write the tokens; None: operators do.

    Attributes:
        length: `[R]` int64, number of cached image tokens per row (the pointer). The next fed token has position `length`.
        prefix_bias: `[R, P]` float32, added to the scores of the prefix slots.
        limits: largest integers of keys and of values.
        fused: as in `KVCache`: whether Triton kernels use it, which they never do.
        arrays: the same memory for compiled passes.
        weights, buffers: of compiled passes; set by the first one.
    """

    fused = False

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
        compiled: Any = None,
    ):
        self.compiled = compiled
        self.weights: Any = None
        self.buffers: Any = None
        self.layers, self.rows, self.heads, self.head_dim = layers, rows, heads, head_dim
        self.prefix, self.tokens, self.scratch = prefix, tokens, scratch
        self.slots = prefix + tokens + scratch
        self.limits = (score_limit(head_dim), value_limit(prefix + tokens))
        self.length = torch.zeros(rows, dtype=torch.int64)
        self.prefix_bias = torch.zeros(rows, prefix, dtype=torch.float32)
        self.k, self.v, self.k_scale, self.v_scale = allocate_pairs((layers, rows, heads), head_dim, self.slots)
        self.arrays = slots_of((*self._stores, self.length, self.prefix_bias), self.limits)
        self._keys, self._values = (store.view(torch.int16).unflatten(-1, (-1, 2)) for store in (self.k, self.v))

    @property
    def _stores(self) -> tuple[Tensor, ...]:
        return self.k, self.v, self.k_scale, self.v_scale

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores)

    def write_prefix(self, layer: int, v_RPGK: Tensor) -> None:
        """Store the values of the conditioning, float32. Its keys are zero, as LlamaGen's always are."""
        values, scale = quantize_activations(v_RPGK, self.limits[1], torch.int16)
        slot = torch.arange(self.prefix)
        self._values[layer, :, :, slot // 2, : self.head_dim, slot % 2] = values.transpose(0, 1)
        self.v_scale[layer, :, :, : self.prefix] = scale[..., 0].transpose(1, 2)

    def prefix_only(self, rows: int, prefix: int | None = None) -> Int8Cache:
        """Return a cache for the prefill of `rows` rows; see `KVCache.prefix_only`."""
        shape = self.layers, rows, self.heads, self.head_dim
        new = Int8Cache(*shape, prefix=self.prefix if prefix is None else prefix, tokens=0, scratch=0, compiled=self.compiled)
        new.limits = self.limits
        return new

    def start_rows(self, new: Int8Cache, rows: Tensor) -> None:
        """Start rows with the prefixes of another cache; see `KVCache.start_rows`."""
        if new.prefix != self.prefix:
            raise ValueError(f"condition must have {self.prefix} rows, for which there is room, got {new.prefix}")
        for held, given in zip(self._stores, new._stores, strict=True):
            held.index_fill_(1, rows, 0)
            part = (slice(None), slice(None), *(slice(min(a, b)) for a, b in zip(held.shape[2:], given.shape[2:], strict=True)))
            held[part].index_copy_(1, rows, given[part])
        self.prefix_bias.index_copy_(0, rows, new.prefix_bias)
        self.length.index_fill_(0, rows, 0)

    def slots_of_pass(self, T: int) -> Tensor:
        """Return the slots int64 `[R, T]` that a pass over T tokens writes. Full rows write only to scratch."""
        return self.prefix + self.length.clamp(max=self.tokens)[:, None] + torch.arange(T)

    def write(self, layer: int, slots_RT: Tensor, k_RTGK: Tensor, v_RTGK: Tensor) -> None:
        """Quantize and store the rotated keys and the values of a pass, float32."""
        k, k_scale = quantize_activations(k_RTGK, self.limits[0], torch.int16)
        v, v_scale = quantize_activations(v_RTGK, self.limits[1], torch.int16)
        row = torch.arange(self.rows)[:, None]
        # Indexed dimensions come first, so each assigned value is [R, T, ...].
        self._keys[layer][row, :, :, slots_RT] = k.unflatten(-1, (-1, 2))
        self._values[layer][row, :, slots_RT // 2, : self.head_dim, slots_RT % 2] = v
        self.k_scale[layer][row, :, slots_RT], self.v_scale[layer][row, :, slots_RT] = k_scale[..., 0], v_scale[..., 0]

    def view(self, layer: int, slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return keys, their scales, values and their scales of the first slots of a layer, as `attend_int8` takes them."""
        pairs = self._keys[layer, ..., :slots, :], self._values[layer, :, :, : slots + 1 >> 1, : self.head_dim]
        k, v = (each.mT.to(torch.float32, memory_format=torch.contiguous_format).flatten(2, 3) for each in pairs)
        v = v[:, :, :slots]
        return k, self.k_scale[layer, ..., :slots], v, self.v_scale[layer, ..., :slots]

    def attention_bias(self, T: int, ancestors: Tensor | None) -> Tensor:
        """Return the additive bias float32 `[R, 1, T, S]` of a pass over T tokens, for the slots in use.

        Args:
            ancestors: bool `[T, T]` or `[R, T, T]`, which fed tokens each fed token attends to. None for a chain.
        """
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
        """Commit the first `count` tokens of the last pass, a chain; argument as in `KVCache.commit_chain`."""
        if self.compiled is None or isinstance(count, int):
            self.length.unflatten(0, (-1, count.numel() if isinstance(count, Tensor) else 1)).add_(count)
        else:
            self.compiled.advance(self.arrays.length, np.ascontiguousarray(count.numpy()))

    def rollback(self, length_R: Tensor) -> None:
        """Set every row's pointer, and discard the tokens after it."""
        self.length.copy_(length_R)

    def commit_path(self, accepted_RA: Tensor, count_R: Tensor) -> None:
        """Commit a path of the last pass; arguments as in `KVCache.commit_path`."""
        if self.compiled is None:
            self._move_slots(accepted_RA, count_R)
        else:
            path, count = (np.ascontiguousarray(each.numpy()) for each in (accepted_RA, count_R))
            self.compiled.move_slots(self.arrays, path, count, self.tokens)
        self.length += count_R

    def _move_slots(self, accepted_RA: Tensor, count_R: Tensor) -> None:
        steps = torch.arange(accepted_RA.shape[1])
        source = torch.where(steps < count_R[:, None], accepted_RA, steps)
        first = self.prefix + self.length.clamp(max=self.tokens)[:, None]
        row = torch.arange(self.rows)[:, None]
        target, source = ((first + each).clamp(max=self.slots - 1) for each in (steps, source))
        self._keys[:, row, :, :, target] = self._keys[:, row, :, :, source]
        self._values[:, row, :, target // 2, :, target % 2] = self._values[:, row, :, source // 2, :, source % 2]
        for store in (self.k_scale, self.v_scale):
            store[:, row, :, target] = store[:, row, :, source]

    def fill_randomly(self) -> None:
        """Fill all slots with random keys and values, for measurements."""
        for integers, limit in zip((self._keys, self._values), self.limits, strict=True):
            integers.copy_(torch.randn(integers.shape, dtype=torch.float32).mul_(100).round_().clamp_(-limit, limit))
        self.k_scale.fill_(0.01)
        self.v_scale.fill_(0.01)
