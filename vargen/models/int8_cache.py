"""The cache of 8-bit passes of next-token transformers: quantized keys and values, with a pointer per row.

Shape suffixes: R rows, P prefix slots, T tokens of one pass, S slots, G key heads, K head width, A path slots.
"""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vargen.kernels.int8.arithmetic import quantize_activations
from vargen.kernels.int8.format import Slots, allocate_slots
from vargen.models.quantization import as_array


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
        self._use(allocate_slots(*shape, prefix=prefix, slots=self.slots, most=self.most_slots))

    def _use(self, arrays: Slots) -> None:
        self.arrays = arrays
        self.k, self.v, self.k_scale, self.v_scale, self.length, self.prefix_bias = map(torch.from_numpy, self.arrays[:6])
        self._stores = self.k, self.v, self.k_scale, self.v_scale
        self._keys, self._values = (store.view(torch.int16).unflatten(-1, (-1, 2)) for store in (self.k, self.v))

    @cached_property
    def conditional(self) -> Self:
        """As `KVCache.conditional`."""
        return self.first_half()

    def first_half(self) -> Self:
        """Return the first half of the rows: the same memory."""
        part = copy(self)
        part.rows, part.buffers = self.rows // 2, None
        stores = {name: each[: part.rows] for name, each in self.arrays._asdict().items() if name != "limits"}
        part._use(self.arrays._replace(**stores))
        return part

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
