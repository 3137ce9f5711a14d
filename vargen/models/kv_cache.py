"""A static key/value cache with a pointer per row.

It is allocated once per (rows, grid). Rollback only moves a pointer, because slots from the pointer on are masked until they
are rewritten. Slots are [ conditioning prefix | image tokens | scratch ]. Scratch slots receive the tokens that a pass near the
end of the grid would write past it.

Shape suffixes: R rows (images, times two under guidance), S slots, P prefix slots, T tokens of one pass, H heads, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vargen.device import normal_tensors
from vargen.kernels.attention import KernelMask, fold_bias, pack_bits, unpack_bits
from vargen.kernels.attention_tiles import KERNEL_DTYPES, MAX_HEAD_DIM
from vargen.kernels.dispatch import is_eager_cpu, uses_triton


class KVCache:
    """Keys and values of every layer, `[R, H, S, K]` each, and the number of cached image tokens of each row.

    Args:
        layers, rows, heads, head_dim: shape of the network and of the batch.
        prefix: number of conditioning slots P.
        tokens: number of image tokens N of the grid.
        scratch: maximum number of tokens per pass, which is the number of slots after the grid.
        dtype, device: of keys and values.

    Attributes:
        length: `[R]` int64, number of cached image tokens per row (the pointer). The next fed token has position `length`.
        fused: whether Triton kernels compute attention and move slots. Decided once here instead of in every pass.
        prefix_bias: `[R, P]` float32, added to the scores of the prefix slots.
        norm_scales: by layer, precomputed weights of its two norms on a CPU; see `RMSNorm.weight_times_sqrt_dim`. Empty until
            the prefill.
    """

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
        self.rows, self.prefix, self.tokens, self.scratch = rows, prefix, tokens, scratch
        self.slots = prefix + tokens + scratch
        self.length = torch.zeros(rows, dtype=torch.int64, device=device)
        self.fused = head_dim <= MAX_HEAD_DIM and dtype in KERNEL_DTYPES and uses_triton(self.length)
        # For kernels, slots are padded (such as from a width of 100 to 112) so that each starts at a multiple of 16 bytes.
        room = -(-head_dim // 16) * 16 if self.fused else head_dim
        shape = (layers, rows, heads, self.slots, room)
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        if room > head_dim:
            self.k, self.v = self.k[..., :head_dim], self.v[..., :head_dim]
        self._done = torch.zeros(rows if self.fused else 0, dtype=torch.int32, device=device)
        self.prefix_bias = torch.zeros(rows, prefix, dtype=torch.float32, device=device)
        self.norm_scales: list[tuple[Tensor | None, Tensor | None]] = []
        first = torch.arange(rows * heads, device=device).view(rows, 1, heads) * self.slots
        self._first_slot = first + prefix  # of the image, in the flattened slots of all rows and heads
        self._image_slot = torch.arange(tokens + scratch, device=device)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def write_prefix(self, layer: int, k_RPHK: Tensor | None, v_RPHK: Tensor) -> None:
        """Store the conditioning. `k_RPHK=None` leaves the keys at zero, as LlamaGen's conditioning keys always are."""
        if k_RPHK is not None:
            self.k[layer, :, :, : self.prefix] = k_RPHK.transpose(1, 2)
        self.v[layer, :, :, : self.prefix] = v_RPHK.transpose(1, 2)

    def prefix_only(self, rows: int, prefix: int | None = None) -> KVCache:
        """Return a cache of the same network for the prefill of `rows` rows, without slots for image tokens."""
        layers, _, heads, _, head_dim = self.k.shape
        options: dict[str, Any] = {"tokens": 0, "scratch": 0, "dtype": self.k.dtype, "device": self.k.device}
        with normal_tensors():  # weights that hooks move make the prefill leave inference mode
            return KVCache(layers, rows, heads, head_dim, prefix=self.prefix if prefix is None else prefix, **options)

    def start_rows(self, new: KVCache, rows: Tensor) -> None:
        """Start rows of the network, int64 `[n]`, with the prefixes of another cache; whatever they held before is cleared.

        Args:
            new: see `prefix_only`; its prefix is aligned with the end of this one's.

        Raises:
            ValueError: if its prefix is longer than this one's. Nothing is changed then.
        """
        if new.prefix > self.prefix:
            raise ValueError(f"condition must have at most {self.prefix} rows, for which there is room, got {new.prefix}")
        first = self.prefix - new.prefix
        for held, given in ((self.k, new.k), (self.v, new.v)):
            held.index_fill_(1, rows, 0)
            held[:, :, :, first : self.prefix].index_copy_(1, rows, given)
        self.prefix_bias.index_fill_(0, rows, float("-inf"))
        self.prefix_bias[:, first:].index_copy_(0, rows, new.prefix_bias)
        self.length.index_fill_(0, rows, 0)
        self.norm_scales = new.norm_scales

    def view_for_pass(self, T: int, earlier: int = 0) -> CacheView:
        """Return the view of the cache for a pass that feeds T tokens after each row's pointer.

        `earlier` tokens that preceding passes fed after the pointer, and that were not committed, come first and stay visible.
        On a CPU, the view reads only the slots in use, and writes to one range of slots if all rows have the same length.
        On other devices, it reads all slots and writes to scattered slots, so shapes are static and no length is synchronized
        with the host.
        """
        if not is_eager_cpu(self.length):
            return CacheView(self, self._flat_slots(T, earlier), self.slots)
        lengths = self.length.tolist()
        reach = min(self.prefix + max(lengths) + earlier + T, self.slots)
        alike = min(lengths) == max(lengths) <= self.tokens and not torch.is_grad_enabled()  # not with autograd
        return CacheView(self, slice(reach - T, reach) if alike else self._flat_slots(T, earlier), reach)

    def _flat_slots(self, T: int, earlier: int) -> Tensor:
        offset = self.length[:, None].clamp(max=self.tokens)  # full rows write only to scratch
        ahead = self._image_slot[earlier : earlier + T] + offset
        return self._first_slot + ahead.clamp(max=self.tokens + self.scratch - 1)[..., None]

    def attention_mask(self, T: int, ancestors: Tensor | None, heads: int, reach: int, earlier: int = 0) -> Tensor | KernelMask:
        """Return the mask argument of `attention` for a pass over T tokens with `heads` query heads that reads `reach` slots.

        It is computed once for all layers.

        Args:
            ancestors: as in `additive_mask`, or packed as int64 words `[T, W]` or `[B, T, W]`: one tree per image.
            earlier: as in `view_for_pass`.
        """
        words = ancestors is not None and ancestors.dtype == torch.int64
        if self.fused and not torch.is_grad_enabled():
            bits = ancestors if words or ancestors is None else pack_bits(ancestors)
            return KernelMask(self.length.clamp(max=self.tokens), self.prefix_bias, bits, earlier)
        if words and ancestors is not None:
            ancestors = unpack_bits(ancestors, earlier + T)
            if ancestors.dim() == 3:
                ancestors = ancestors.repeat(self.rows // len(ancestors), 1, 1)
        return fold_bias(self.additive_mask(T, ancestors, self.k.dtype, reach, earlier), heads, self.k.shape[2])

    def additive_mask(
        self, T: int, ancestors: Tensor | None, dtype: torch.dtype, slots: int | None = None, earlier: int = 0
    ) -> Tensor:
        """Return the additive attention bias `[R, 1, T, S]` of a pass over T tokens.

        Args:
            ancestors: bool `[T, E + T]` or `[R, T, E + T]` with E = `earlier`. `[..., i, j]` is True if token j after the
                pointer is token E + i or one of its ancestors. None for a chain, where all earlier tokens are ancestors.
            slots: number of slots S to include. Default: all.
            earlier: as in `view_for_pass`.
        """
        image_slot = self._image_slot if slots is None else self._image_slot[: slots - self.prefix]
        offset = image_slot - self.length[:, None]  # [R, image slots]; negative: committed; t: draft token t
        if ancestors is None:
            steps = torch.arange(earlier, earlier + T, device=offset.device)
            visible = offset[:, None, :] <= steps[None, :, None]
        else:
            held = earlier + T
            table = ancestors.expand(self.rows, T, held)
            index = offset.clamp(0, held - 1)[:, None, :].expand(-1, T, -1)
            visible = (offset < 0)[:, None, :] | (table.gather(2, index) & (offset < held)[:, None, :])
        image = torch.zeros(visible.shape, dtype=torch.float32, device=visible.device).masked_fill_(~visible, float("-inf"))
        prefix = self.prefix_bias[:, None, :].expand(-1, T, -1)
        return torch.cat([prefix, image], dim=-1)[:, None].to(dtype)

    def commit_chain(self, count_R: Tensor | int) -> None:
        """Commit the first `count` tokens of the last pass in every row (a chain)."""
        self.length += count_R

    def rollback(self, length_R: Tensor) -> None:
        """Set every row's pointer, and discard the tokens after it."""
        self.length.copy_(length_R)

    def commit_path(self, accepted_RA: Tensor, count_R: Tensor) -> None:
        """Commit a path of the last pass: move its tokens to consecutive slots, and the pointer past them.

        Args:
            accepted_RA: int64 `[R, A]`, indices among the pass's tokens, root first, strictly increasing while valid.
            count_R: int64 `[R]`, number of valid indices.
        """
        if self.fused:
            from vargen.kernels.kv_compaction import compact_kv

            compact_kv(
                self.k,
                self.v,
                self.length,
                accepted_RA,
                count_R,
                self._done,
                image_start=self.prefix,
                grid_tokens=self.tokens,
            )
            return
        A = accepted_RA.shape[1]
        steps = torch.arange(A, device=accepted_RA.device)
        valid = steps[None] < count_R[:, None]
        offset = torch.where(valid, accepted_RA, steps[None])  # invalid columns are copied onto themselves
        base = self.length[:, None].clamp(max=self.tokens)
        limit = self.tokens + self.scratch - 1
        source = (self._first_slot + (base + offset).clamp(max=limit)[..., None]).flatten()
        target = (self._first_slot + (base + steps).clamp(max=limit)[..., None]).flatten()
        for store in (self.k, self.v):
            flat = store.flatten(1, 3)
            flat.index_copy_(1, target, flat.index_select(1, source))
        self.length += count_R


class CacheView:
    """The part of a cache that one pass reads and writes.

    Args:
        slots: slots to write: one range in every row, or flat indices `[R, T, H]` over rows, heads and slots.
        reach: number of slots S to read.
    """

    def __init__(self, cache: KVCache, slots: slice | Tensor, reach: int):
        self.cache, self.slots, self.num_slots_read = cache, slots, reach
        if isinstance(slots, slice):  # views of all layers at once, which saves an operation per layer
            self._held = [store[:, :, :, :reach].unbind() for store in (cache.k, cache.v)]
            self._new = [store[:, :, :, slots].transpose(2, 3).unbind() for store in (cache.k, cache.v)]

    def write(self, layer: int, k_RTHK: Tensor, v_RTHK: Tensor) -> tuple[Tensor, Tensor]:
        """Write a pass's keys and values of one layer, and return the layer's keys and values `[R, H, S, K]`."""
        if isinstance(self.slots, slice):
            for new, given in zip(self._new, (k_RTHK, v_RTHK), strict=True):
                new[layer].copy_(given)
            return self._held[0][layer], self._held[1][layer]
        k, v = self.cache.k[layer], self.cache.v[layer]
        k.flatten(0, 2).index_put_((self.slots,), k_RTHK)
        v.flatten(0, 2).index_put_((self.slots,), v_RTHK)
        return k[:, :, : self.num_slots_read], v[:, :, : self.num_slots_read]
