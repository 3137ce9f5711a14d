"""Caches of quantized keys and values, with a pointer per row, as `KVCache` has them in floating point.

`Int8Cache` holds integers as float32, for torch's products; `PairedInt8Cache` holds pairs of 16-bit integers, for compiled
passes on a CPU. Slots are [ conditioning prefix | image tokens | scratch ].

Shape suffixes: L layers, R rows (images, times two under guidance), S slots, P prefix slots, T tokens of one pass, G key
heads, K head width, A path slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vargen.kernels.int8.arithmetic import quantize_activations
from vargen.kernels.int8.format import Slots, score_limit, value_limit


class Int8Cache:
    """Keys `[L, R, G, K, S]` and values `[L, R, G, S, K]`, as integers with a float32 scale per slot and head.

    Args:
        layers, rows, heads, head_dim: shape of the network and of the batch.
        prefix: number of conditioning slots P.
        tokens: number of image tokens N of the grid.
        scratch: maximum number of tokens per pass, which is the number of slots after the grid.

    Attributes:
        length: `[R]` int64, number of cached image tokens per row (the pointer). The next fed token has position `length`.
        prefix_bias: `[R, P]` float32, added to the scores of the prefix slots.
        limits: largest integers of keys and of values.
        fused: as in `KVCache`: whether Triton kernels use it, which they never do.
    """

    fused = False

    def __init__(self, layers: int, rows: int, heads: int, head_dim: int, *, prefix: int, tokens: int, scratch: int = 1):
        self.layers, self.rows, self.heads, self.head_dim = layers, rows, heads, head_dim
        self.prefix, self.tokens, self.scratch = prefix, tokens, scratch
        self.slots = prefix + tokens + scratch
        self.limits = (score_limit(head_dim), value_limit(prefix + tokens))
        self.length = torch.zeros(rows, dtype=torch.int64)
        self.prefix_bias = torch.zeros(rows, prefix, dtype=torch.float32)
        self._allocate()

    def _allocate(self) -> None:
        shape = (self.layers, self.rows, self.heads, self.slots)
        self.k = torch.zeros(*shape[:3], self.head_dim, self.slots, dtype=torch.float32)
        self.v = torch.zeros(*shape, self.head_dim, dtype=torch.float32)
        self.k_scale, self.v_scale = torch.zeros(shape, dtype=torch.float32), torch.zeros(shape, dtype=torch.float32)

    @property
    def _stores(self) -> tuple[Tensor, ...]:
        return self.k, self.v, self.k_scale, self.v_scale

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores)

    def write_prefix(self, layer: int, v_RPGK: Tensor) -> None:
        """Store the values of the conditioning, float32. Its keys are zero, as LlamaGen's always are."""
        values, scale = quantize_activations(v_RPGK.transpose(1, 2), self.limits[1], torch.float32)
        self._write_values(layer, values, scale[..., 0])

    def _write_values(self, layer: int, values_RGPK: Tensor, scale_RGP: Tensor) -> None:
        self.v[layer, :, :, : self.prefix], self.v_scale[layer, :, :, : self.prefix] = values_RGPK, scale_RGP

    def prefix_only(self, rows: int, prefix: int | None = None) -> Int8Cache:
        """Return a cache for the prefill of `rows` rows; see `KVCache.prefix_only`."""
        new = self._make(rows, self.prefix if prefix is None else prefix)
        new.limits = self.limits
        return new

    def _make(self, rows: int, prefix: int) -> Int8Cache:
        return Int8Cache(self.layers, rows, self.heads, self.head_dim, prefix=prefix, tokens=0, scratch=0)

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
        k, k_scale = quantize_activations(k_RTGK, self.limits[0], torch.float32)
        v, v_scale = quantize_activations(v_RTGK, self.limits[1], torch.float32)
        row = torch.arange(self.rows)[:, None]
        # Indexed dimensions come first, so each assigned value is [R, T, ...].
        self.k[layer][row, :, :, slots_RT], self.k_scale[layer][row, :, slots_RT] = k, k_scale[..., 0]
        self.v[layer][row, :, slots_RT], self.v_scale[layer][row, :, slots_RT] = v, v_scale[..., 0]

    def view(self, layer: int, slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return keys, their scales, values and their scales of the first slots of a layer, as `attend_int8` takes them."""
        k, v = self.k[layer, ..., :slots], self.v[layer, :, :, :slots]
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

    def commit_chain(self, count_R: Tensor | int) -> None:
        """Commit the first `count` tokens of the last pass in every row (a chain)."""
        self.length += count_R

    def commit_images(self, count_B: Tensor) -> None:
        """The same, with a count for each image, which has as many rows as any other."""
        self.commit_chain(count_B.repeat(self.rows // len(count_B)))

    def rollback(self, length_R: Tensor) -> None:
        """Set every row's pointer, and discard the tokens after it."""
        self.length.copy_(length_R)

    def commit_path(self, accepted_RA: Tensor, count_R: Tensor) -> None:
        """Commit a path of the last pass; arguments as in `KVCache.commit_path`."""
        self._move_slots(accepted_RA, count_R)
        self.length += count_R

    def _move_slots(self, accepted_RA: Tensor, count_R: Tensor) -> None:
        steps = torch.arange(accepted_RA.shape[1])
        source = torch.where(steps < count_R[:, None], accepted_RA, steps)
        first = self.prefix + self.length.clamp(max=self.tokens)[:, None]
        row = torch.arange(self.rows)[:, None]
        target, source = ((first + each).clamp(max=self.slots - 1) for each in (steps, source))
        self.k[:, row, :, :, target] = self.k[:, row, :, :, source]
        for store in (self.v, self.k_scale, self.v_scale):
            store[:, row, :, target] = store[:, row, :, source]

    def fill_randomly(self) -> None:
        """Fill all slots with random keys and values, for measurements."""
        for store, limit in zip((self.k, self.v), self.limits, strict=True):
            integers = store if store.dtype == torch.float32 else store.view(torch.int16)
            integers.copy_(torch.randn(integers.shape, dtype=torch.float32).mul_(100).round_().clamp_(-limit, limit))
        self.k_scale.fill_(0.01)
        self.v_scale.fill_(0.01)


class PairedInt8Cache(Int8Cache):
    """The same cache for the compiled pass: keys `[L, R, G, K/2, S']` and values `[L, R, G, S'/2, K']`, int32.

    Each is a pair of 16-bit integers, of the same slot or of two slots. S' and K' are slots and head width rounded up to 16.
    Only the compiled pass writes tokens.

    Args:
        compiled: module `vargen.kernels.int8.token_pass`.
    """

    def __init__(self, compiled: Any, *shape: int, **options: int):
        self.compiled = compiled
        super().__init__(*shape, **options)
        stores: Any = [store.numpy() for store in (*self._stores, self.length, self.prefix_bias)]
        self.arrays = Slots(*stores, self.limits)
        self.weights: Any = None  # packed, and buffers of the passes: set by the first pass
        self.buffers: Any = None

    def _allocate(self) -> None:
        slots, width = (-(-each // 16) * 16 for each in (self.slots, self.head_dim))
        shape = (self.layers, self.rows, self.heads)
        self.k = torch.zeros(*shape, self.head_dim // 2, slots, dtype=torch.int32)
        self.v = torch.zeros(*shape, slots // 2, width, dtype=torch.int32)
        self.k_scale, self.v_scale = (torch.zeros(*shape, slots, dtype=torch.float32) for _ in range(2))

    def _make(self, rows: int, prefix: int) -> PairedInt8Cache:
        return PairedInt8Cache(self.compiled, self.layers, rows, self.heads, self.head_dim, prefix=prefix, tokens=0, scratch=0)

    def _write_values(self, layer: int, values_RGPK: Tensor, scale_RGP: Tensor) -> None:
        for slot in range(self.prefix):
            pairs = self.v[layer, :, :, slot // 2].view(torch.int16).unflatten(-1, (-1, 2))
            pairs[:, :, : self.head_dim, slot % 2] = values_RGPK[:, :, slot].to(torch.int16)
        self.v_scale[layer, :, :, : self.prefix] = scale_RGP

    def write(self, layer: int, slots_RT: Tensor, k_RTGK: Tensor, v_RTGK: Tensor) -> None:
        raise NotImplementedError("the compiled pass writes tokens itself")

    def view(self, layer: int, slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        k, v = (store[layer].view(torch.int16).unflatten(-1, (-1, 2)).mT.flatten(2, 3) for store in (self.k, self.v))
        k, v = k[..., :slots], v[:, :, :slots, : self.head_dim]
        return k, self.k_scale[layer, ..., :slots], v, self.v_scale[layer, ..., :slots]

    def commit_images(self, count_B: Tensor) -> None:
        self.compiled.advance(self.arrays.length, np.ascontiguousarray(count_B.numpy()))

    def _move_slots(self, accepted_RA: Tensor, count_R: Tensor) -> None:
        path, count = (np.ascontiguousarray(each.numpy()) for each in (accepted_RA, count_R))
        self.compiled.move_slots(self.arrays, path, count, self.tokens)
