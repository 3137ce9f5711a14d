"""A static key/value cache with a pointer per row.

It is allocated once per (rows, grid). Rollback only moves a pointer, because slots from the pointer on are masked until they
are rewritten. Slots are [ conditioning prefix | image tokens | scratch ]. Scratch slots receive the tokens that a pass near the
end of the grid would write past it.

Shape suffixes: R rows (images, times two under guidance), S slots, P prefix slots, T tokens of one pass, H heads, K head width.
"""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from vargen.kernels import ops
from vargen.kernels.host import normal_tensors
from vargen.kernels.ops import KernelMask


class KVCache:
    """Keys and values of every layer, `[R, H, S, K]` each, and the number of cached image tokens of each row.

    Args:
        prefix: number of conditioning slots P.
        tokens: number of image tokens N of the grid.
        scratch: maximum number of tokens per pass, which is the number of slots after the grid.

    Attributes:
        length: `[R]` int64, number of cached image tokens per row (the pointer). The next fed token has position `length`.
        fused: whether Triton kernels compute attention.
        prefix_bias: `[R, P]` float32, added to the scores of the prefix slots; set by `set_prefix_bias`.
        kv: `[layers, 2, R, H, S, K]`, keys and values, so that a pass writes both at once.
    """

    _by_row: ClassVar[tuple[str, ...]] = ("length", "prefix_bias", "_bias", "_first_slot")

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
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.rows, self.heads, self.prefix, self.tokens, self.scratch = rows, heads, prefix, tokens, scratch
        self.length = torch.zeros(rows, dtype=torch.int64, device=device)
        self.fused, multiple, room = ops.choose_cache_layout(self.length, head_dim, dtype)
        self.slots = -(-(prefix + tokens + scratch) // multiple) * multiple
        self.kv = torch.zeros(layers, 2, rows, heads, self.slots, room, dtype=dtype, device=device)
        if room > head_dim:
            self.kv = self.kv[..., :head_dim]
        self.prefix_bias = torch.zeros(rows, prefix, dtype=torch.float32, device=device)
        self._bias = torch.zeros(rows, self.slots, dtype=dtype, device=device)  # of visible slots: 0 after the prefix
        first = torch.arange(2 * rows * heads, device=device).view(2, rows, heads) * self.slots
        first = first.transpose(0, 1).reshape(rows, 1, 2 * heads)
        self._first_slot = first + prefix  # of the image, in the flattened slots of all rows, and heads of keys and values
        self._image_slot = torch.arange(self.slots, device=device) - prefix  # by slot; negative: conditioning

    @property
    def k(self) -> Tensor:
        """Keys `[layers, R, H, S, K]`, a view."""
        return self.kv[:, 0, : self.rows]

    @property
    def v(self) -> Tensor:
        """Values `[layers, R, H, S, K]`, a view."""
        return self.kv[:, 1, : self.rows]

    @cached_property
    def conditional(self) -> Self:
        """This cache for passes that run the first half of its rows, the conditional ones; it commits for all rows."""
        part = copy(self)
        part.rows = self.rows // 2
        for name in self._by_row:
            setattr(part, name, getattr(self, name)[: part.rows])
        return part

    def write_prefix(self, layer: int, k_RPHK: Tensor | None, v_RPHK: Tensor) -> None:
        """Store the conditioning. `k_RPHK=None` leaves the keys at zero, as LlamaGen's conditioning keys always are."""
        if k_RPHK is not None:
            self.k[layer, :, :, : self.prefix] = k_RPHK.transpose(1, 2)
        self.v[layer, :, :, : self.prefix] = v_RPHK.transpose(1, 2)

    def set_prefix_bias(self, bias_RP: Tensor) -> None:
        """Set what is added to the scores of the prefix slots, float32 `[R, P]`: -inf where a row has no condition."""
        self.prefix_bias.copy_(bias_RP)
        self._bias[:, : self.prefix].copy_(bias_RP)

    def prefix_only(self, rows: int, prefix: int | None = None) -> KVCache:
        """Return a cache of the same network for the prefill of `rows` rows, without slots for image tokens."""
        layers, _, heads, _, head_dim = self.k.shape
        options: dict[str, Any] = {"tokens": 0, "scratch": 0, "dtype": self.k.dtype, "device": self.k.device}
        with normal_tensors():  # weights that hooks move make the prefill leave inference mode
            return KVCache(layers, rows, heads, head_dim, prefix=self.prefix if prefix is None else prefix, **options)

    def start_rows(self, new: KVCache, rows: Tensor) -> None:
        """Start rows of the network, int64 `[n]`, with the prefixes of another cache; whatever they held before is cleared.

        Its prefix, see `prefix_only`, is aligned with the end of this one's. A longer one is refused; nothing is changed then.
        """
        if new.prefix > self.prefix:
            raise ValueError(f"condition must have at most {self.prefix} rows, for which there is room, got {new.prefix}")
        first = self.prefix - new.prefix
        self.kv.index_fill_(2, rows, 0)
        self.kv[..., first : self.prefix, :].index_copy_(2, rows, new.kv[..., : new.prefix, :])
        for held, given in ((self.prefix_bias, new.prefix_bias), (self._bias[:, : self.prefix], new._bias)):
            held.index_fill_(0, rows, float("-inf"))
            held[:, first:].index_copy_(0, rows, given[:, : new.prefix])
        self.length.index_fill_(0, rows, 0)

    def view_for_pass(self, T: int, earlier: int = 0) -> CacheView:
        """Return the view of the cache for a pass that feeds T tokens after each row's pointer.

        `earlier` tokens that preceding passes fed after the pointer, and that were not committed, come first and stay visible.
        On a CPU, the view reads only the slots in use, and writes to one range of slots if all rows have the same length.
        On other devices, it reads all slots and writes to scattered slots, so shapes are static and no length is synchronized
        with the host.
        """
        if self.scratch < earlier + T:
            raise ValueError(f"the cache was made for at most {self.scratch} tokens a pass, got {earlier + T}")
        lengths = ops.host_values(self.length)
        if lengths is None:
            return CacheView(self, self._flat_slots(T, earlier), self.slots)
        reach = min(self.prefix + max(lengths) + earlier + T, self.slots)
        alike = min(lengths) == max(lengths) <= self.tokens and not torch.is_grad_enabled()  # not with autograd
        return CacheView(self, slice(reach - T, reach) if alike else self._flat_slots(T, earlier), reach)

    def _flat_slots(self, T: int, earlier: int) -> Tensor:
        last = self.length[:, None].clamp(max=self.tokens)  # full rows write only to scratch
        return self._first_slot + (last + self._next(T, earlier))[..., None]

    def _next(self, T: int, earlier: int = 0) -> Tensor:
        """int64 `[T]`: `earlier`, `earlier` + 1, ..."""
        return self._image_slot[self.prefix + earlier : self.prefix + earlier + T]

    def positions(self, T: int, earlier: int = 0) -> Tensor:
        """Positions int64 `[R, T]` of the tokens that a pass feeds as a chain; those past the grid do not count."""
        return self.length[:, None] + self._next(T, earlier)

    def attention_mask(self, T: int, ancestors: Tensor | None, heads: int, reach: int, earlier: int = 0) -> Tensor | KernelMask:
        """Return the mask argument of `attention` for a pass over T tokens with `heads` query heads that reads `reach` slots.

        Args:
            ancestors, earlier: as in `additive_mask`. For a `fused` cache, ancestors may be packed as int64 words `[T, W]` or
                `[B, T, W]`, one tree per image, in passes without gradients.
        """
        if self.fused and not torch.is_grad_enabled():
            if ancestors is not None and ancestors.dtype == torch.bool:
                ancestors = ops.pack_bits(ancestors)
            return KernelMask(self.length.clamp(max=self.tokens), self.prefix_bias, ancestors, earlier)
        return ops.fold_bias(self.additive_mask(T, ancestors, reach, earlier), heads, self.heads)

    def additive_mask(self, T: int, ancestors: Tensor | None, slots: int | None = None, earlier: int = 0) -> Tensor:
        """Return the additive attention bias `[R, 1, T, S]` of a pass over T tokens.

        Args:
            ancestors: bool `[T, E + T]` or `[R, T, E + T]` with E = `earlier`. `[..., i, j]` is True if token j after the
                pointer is token E + i or one of its ancestors. None for a chain, where all earlier tokens are ancestors.
            slots: number of slots S to include. Default: all.
        """
        image_slot, bias = self._image_slot[:slots], self._bias[:, None, :slots]
        if ancestors is None:
            visible = image_slot <= self.positions(T, earlier)[..., None]
        else:
            held, offset = earlier + T, image_slot - self.length[:, None]  # [R, S]; negative: committed; t: draft token t
            table = ancestors.expand(self.rows, T, held)
            index = offset.clamp(0, held - 1)[:, None, :].expand(-1, T, -1)
            visible = (offset < 0)[:, None, :] | (table.gather(2, index) & (offset < held)[:, None, :])
        return torch.where(visible, bias, float("-inf"))[:, None]

    def commit_chain(self, count: Tensor | int) -> None:
        """Commit the first `count` tokens of the last pass, a chain.

        Args:
            count: a number for all rows, or int64 `[R]` or `[B]`: by image, whose rows are B apart.
        """
        self.length.unflatten(0, (-1, count.numel() if isinstance(count, Tensor) else 1)).add_(count)

    def rollback(self, length_R: Tensor) -> None:
        """Set every row's pointer."""
        self.length.copy_(length_R)

    def commit_path(self, accepted_RA: Tensor, count_R: Tensor) -> None:
        """Commit a path of the last pass: move its tokens to consecutive slots, and the pointer past them.

        Args:
            accepted_RA: int64 `[R, A]`, indices among the pass's tokens, root first, strictly increasing while valid.
            count_R: int64 `[R]`, number of valid indices.
        """
        A = accepted_RA.shape[1]
        steps = torch.arange(A, device=accepted_RA.device)
        valid = steps[None] < count_R[:, None]
        offset = torch.where(valid, accepted_RA, steps[None])  # invalid columns are copied onto themselves
        base = self.length[:, None].clamp(max=self.tokens)
        limit = self.tokens + self.scratch - 1
        source = (self._first_slot + (base + offset).clamp(max=limit)[..., None]).flatten()
        target = (self._first_slot + (base + steps).clamp(max=limit)[..., None]).flatten()
        flat = self.kv.flatten(1, 4)
        flat.index_copy_(1, target, flat.index_select(1, source))
        self.length += count_R


class LayerView:
    """The part of one layer that a pass reads and writes. Blocks get this and not their number: code is compiled once for all.

    Args:
        kv: keys and values of the layer, `[2, R, H, slots, K]`; a pass may run fewer rows, the first ones.
        slots: flat indices `[R, T, 2 H]` of the slots to write, over rows, heads and slots.
        reach: number of slots S to read.
    """

    def __init__(self, kv: Tensor, slots: Tensor, reach: int):
        self.kv, self.slots, self.reach = kv, slots, reach

    def write(self, kv_RTHK: Tensor) -> tuple[Tensor, Tensor]:
        """Write a pass's keys and values `[R, T, 2 H, K]`, and return all of the layer, `[R, H, S, K]` each."""
        self.kv.flatten(0, 3).index_put_((self.slots,), kv_RTHK)
        rows = len(self.slots)
        return self.kv[0, :rows, :, : self.reach], self.kv[1, :rows, :, : self.reach]


class PrefixView:
    """The part of a layer that a prefill writes, with the interface of `LayerView`: conditioning rows see themselves alone."""

    def __init__(self, cache: KVCache, layer: int):
        self.cache, self.layer = cache, layer

    def write(self, kv_RPHK: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values `[R, P, 2 H, K]` of all rows, and return them, `[R, H, P, K]` each."""
        k, v = kv_RPHK.chunk(2, dim=2)
        self.cache.write_prefix(self.layer, k, v)
        return k.transpose(1, 2), v.transpose(1, 2)


class _RangeView:
    """The same where a pass writes to one range of slots: views of what it writes, of all keys and of all values."""

    def __init__(self, new: Tensor, k: Tensor, v: Tensor):
        self.new, self.k, self.v = new, k, v

    def write(self, kv_RTHK: Tensor) -> tuple[Tensor, Tensor]:
        self.new.copy_(kv_RTHK.unflatten(2, (2, -1)))
        return self.k, self.v


class CacheView:
    """The part of a cache that one pass reads and writes.

    Args:
        slots: slots to write: one range in every row, or flat indices; see `LayerView`.
        reach: number of slots S to read.

    Attributes:
        layers: the part of each layer.
    """

    layers: list[LayerView] | list[_RangeView]

    def __init__(self, cache: KVCache, slots: slice | Tensor, reach: int):
        self.slots, self.num_slots_read = slots, reach
        if isinstance(slots, slice):  # views of all layers at once, which saves an operation per layer
            held = (store[:, :, :, :reach].unbind() for store in (cache.k, cache.v))
            new = cache.kv[:, :, : cache.rows, :, slots].permute(0, 2, 4, 1, 3, 5).unbind()  # [R, T, 2, H, K] each
            self.layers = list(map(_RangeView, new, *held))
        else:
            self.layers = [LayerView(cache.kv[layer], slots, reach) for layer in range(len(cache.kv))]
