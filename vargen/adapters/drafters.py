"""Adapters of the trained drafters of a LlamaGen transformer, whose embedding, final norm and output layer they share.

Shape suffixes: B images, R rows (B, or 2 B under guidance: conditional first), T fed slots, D width, V vocabulary, h heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.decoding import AutoregressiveHead, Noise, Output, ParallelHeads, Sampling, Tree, decode
from vargen.decoding.next_token.graphs import register_state
from vargen.decoding.next_token.rows import insert_rows
from vargen.decoding.noise import Purpose, derive_seeds
from vargen.decoding.sampling import to_probs
from vargen.device import normal_tensors
from vargen.models.condition import Condition
from vargen.models.config_bounds import require_equal
from vargen.models.heads.eagle import EagleDrafter
from vargen.models.heads.medusa import MedusaDrafter
from vargen.models.heads.upsampler import TokenUpsampler
from vargen.models.kv_cache import KVCache
from vargen.models.tokenizers.vq import VQModel


class Target(Protocol):
    """What drafters use of the target transformer, whose features they extend."""

    @property
    def rows_per_image(self) -> int: ...

    @property
    def vocab(self) -> int: ...

    @property
    def grid(self) -> tuple[int, int]: ...

    @property
    def device(self) -> torch.device: ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings `[R, T, D]` of tokens `[B, T]`."""

    def head(self, hidden: Tensor, position: Tensor) -> Tensor:
        """Guided logits `[B, T, V]` for the tokens after positions `[B, T]`, from states `[R, T, D]` before the final norm."""


@register_state
@dataclass
class EagleCache:
    """The cache and, for drafters that use the row above, the target's features by slot `[R, N + scratch, D]`."""

    cache: KVCache
    seen: Tensor | None


class EagleModel(AutoregressiveHead):
    """`AutoregressiveHead` of an `EagleDrafter` and its target."""

    def __init__(self, drafter: EagleDrafter, target: Target):
        self.drafter, self.target, self.vocab, self.grid = drafter, target, target.vocab, target.grid

    def start(self, images: int, max_width: int) -> EagleCache:
        rows, device = images * self.target.rows_per_image, self.target.device
        cache, seen = self.drafter.new_cache(rows, max_width, device), None
        if self.drafter.config.above:
            with normal_tensors():
                size = (rows, self.drafter.tokens + max_width, self.drafter.config.dim)
                seen = torch.zeros(size, dtype=self.drafter.dtype, device=device)
        return EagleCache(cache, seen)

    def forward(self, tokens: Tensor, features: Tensor, state: EagleCache, tree: Tree) -> Output:
        B, T = tokens.shape
        cache, rows_per_image = state.cache, self.target.rows_per_image
        earlier = tree.parents.shape[-1] - T
        depth = tree.depth[..., earlier:]
        position = cache.length[:B, None] + depth
        places = {}
        if not tree.is_chain:
            ancestors = tree.ancestors[..., earlier:, :]
            places["ancestors"] = ancestors if ancestors.dim() == 2 else ancestors.repeat(rows_per_image, 1, 1)
            places["positions"] = position.repeat(rows_per_image, 1)
        above = None if state.seen is None else self._above(features, state, position, earlier)
        hidden = self.drafter(features, self.target.embed(tokens), cache, earlier=earlier, above=above, **places)
        return Output(self.target.head(hidden, position), hidden)

    def _above(self, features: Tensor, state: EagleCache, position: Tensor, earlier: int) -> Tensor:
        """Return the target's features after the tokens above those to predict, `[R, T, D]`; zero where there are none.

        Slot j has the feature that predicted token j. The feature after the token above token j + 1 is in slot j + 2 - columns.
        """
        seen, rows_per_image, columns = state.seen, self.target.rows_per_image, self.target.grid[1]
        assert seen is not None
        position = position.repeat(rows_per_image, 1)
        if earlier == 0:  # tokens that the target has processed; drafted ones follow
            at = position.clamp(max=seen.shape[1] - 1)[..., None].expand(-1, -1, seen.shape[2])
            seen.scatter_(1, at, features.to(seen.dtype))
        source = position + 2 - columns
        last = position if earlier == 0 else state.cache.length[:, None]
        known = (source >= 1) & (source <= last)
        index = source.clamp(0, seen.shape[1] - 1)[..., None].expand(-1, -1, seen.shape[2])
        return seen.gather(1, index) * known[..., None]

    def commit(self, state: EagleCache, count: Tensor) -> None:
        state.cache.commit_chain(count.repeat(self.target.rows_per_image))


class MedusaHeads(ParallelHeads):
    """`ParallelHeads` of a `MedusaDrafter` and its target."""

    def __init__(self, drafter: MedusaDrafter, target: Target):
        self.drafter, self.target, self.vocab, self.grid = drafter, target, target.vocab, target.grid
        self.num_heads = drafter.config.heads

    def forward(self, tokens: Tensor, features: Tensor, position: Tensor) -> Tensor:
        hidden = self.drafter(features, self.target.embed(tokens[:, None]))[:, 0]
        ahead = torch.arange(self.num_heads, device=position.device)
        return self.target.head(hidden, position[:, None] + ahead)


if TYPE_CHECKING:
    from vargen.adapters.llamagen import LlamaGenTokenModel

_WINDOW = 16
_ROWS_RESAMPLED = 2  # low-resolution rows to resample after the completed ones
_RESAMPLE_PASSES = 2  # over these rows: the second pass conditions on the tokens sampled in the first


@register_state
@dataclass
class LowResState:
    """The low-resolution images, and the predictions from them.

    Attributes:
        seeds: `[B]`, for the noise of the low-resolution images.
        low: low-resolution tokens, int64 `[B, n]`.
        upsampled: features `[B, D, R, C]` of the up-sampler, or tokens `[B, N]` without one.
        shown: `[B]`, number of low-resolution tokens that are synchronized with the accepted tokens.
        cache: cache of the low-resolution model, which holds the `shown` tokens; None before the first refresh.
    """

    condition: Condition
    seeds: Tensor
    sampling: Sampling
    low: Tensor
    upsampled: Tensor
    shown: Tensor
    cache: Any = None


class LowResolutionDrafter:
    """`LowResModel` of a low-resolution transformer.

    Args:
        model: adapter of the transformer.
        grid: grid of the target.
        upsampler: predicts token probabilities. None: the image is decoded, enlarged and encoded, and its tokens are the drafts
            (MuLo-SD's training-free up-sampler).
        vqvae: image tokenizer.
        codes: its codebook `[V, E]`.
    """

    def __init__(
        self, model: LlamaGenTokenModel, grid: tuple[int, int], upsampler: TokenUpsampler | None, vqvae: VQModel, codes: Tensor
    ):
        self.model, self.grid, self.upsampler, self.vqvae, self.codes = model, grid, upsampler, vqvae, codes

    @property
    def vocab(self) -> int:
        return self.model.vocab

    def start(self, condition: Condition, seeds: Tensor, sampling: Sampling) -> LowResState:
        rows, columns = self.model.grid
        method, own = "gumbel" if rows * columns >= _WINDOW else "ar", derive_seeds(seeds, Purpose.LOW_RES)
        low = decode(self.model, condition, own, method, sampling).tokens
        return LowResState(condition, own, sampling, low, self._upsample(low), torch.zeros_like(seeds))

    def _upsample(self, low: Tensor) -> Tensor:
        low = low.unflatten(1, self.model.grid)
        if self.upsampler is not None:
            return self.upsampler.features(low)
        return upsample_tokens(low, self.grid, self.vqvae.decode, self.vqvae.encode).flatten(1)

    def join(self, state: LowResState, new: LowResState, rows: Tensor) -> LowResState:
        if state.cache is not None:
            state.cache.insert_rows(self.model.prefill(new.condition, self.model.grid[0] * self.model.grid[1])[0], rows)
        inserted = insert_rows(replace(state, cache=None), replace(new, cache=None), rows)
        return replace(inserted, cache=state.cache)

    def refresh(self, state: LowResState, tokens: Tensor, committed: Tensor) -> LowResState:
        """Synchronize the low-resolution image with the tokens accepted so far (MuLo-SD).

        Runs once per completed low-resolution row. Each low-resolution token in the completed area is replaced by the codebook
        entry nearest to the mean of the accepted embeddings it covers. The next two rows are resampled with their original
        noise, so a refresh changes only what the new context changes. Without an up-sampler the whole image is decoded and
        encoded for each row.
        """
        rows, columns = self.model.grid
        whole = committed // (self.grid[1] * (self.grid[0] // rows)) * columns
        whole = torch.where(whole < rows * columns, whole, state.shown)  # no drafts are needed after the last row
        images = (whole > state.shown).nonzero()[:, 0]  # images with a newly completed row
        if not len(images):
            return state
        seen = downsample_tokens(tokens[:, : self.grid[0] * self.grid[1]], self.grid, self.model.grid, self.codes)
        low = torch.where(torch.arange(rows * columns, device=whole.device) < whole[:, None], seen, state.low)
        cache = self.model.prefill(state.condition, rows * columns)[0] if state.cache is None else state.cache
        low = self._resample_rows(replace(state, low=low, cache=cache), whole, images)
        upsampled = state.upsampled.index_copy(0, images, self._upsample(low[images]))
        return replace(state, low=low, upsampled=upsampled, shown=whole, cache=cache)

    def _resample_rows(self, state: LowResState, whole: Tensor, images: Tensor) -> Tensor:
        """Return the tokens `[B, n]` with the rows after the first `whole` `[B]` tokens resampled for the given images.

        Afterwards the cache holds the first `whole` tokens."""
        (rows, columns), device = self.model.grid, whole.device
        n, news = rows * columns, whole - state.shown
        T = min(int(news.max()) + _ROWS_RESAMPLED * columns - 1, n)
        tree, slots = Tree.make_chain(T - 1, device), torch.arange(T, device=device)
        fed = state.shown[:, None] + slots
        first = int(news[images].min()) - 1  # earlier slots predict tokens that are known
        position, start = fed[images, first:] + 1, whole[images, None]
        resampled = (position >= start) & (position < start + _ROWS_RESAMPLED * columns)
        noise, low = Noise(state.seeds[images], position), F.pad(state.low, (0, T + 1))
        sampling = state.sampling.select_rows(images)
        for _ in range(_RESAMPLE_PASSES):
            out = self.model.forward(low.gather(1, fed), state.cache, tree)
            sampled = noise.sample(to_probs(out.logits[images, first:], sampling), Purpose.TOKEN)
            row = low[images]
            low = low.index_copy(0, images, row.scatter(1, position, torch.where(resampled, sampled, row.gather(1, position))))
        self.model.commit(state.cache, slots.expand(len(low), T), news, tree)
        return low[:, :n]

    def probs(self, state: LowResState, tokens: Tensor, length: Tensor, position: Tensor) -> Tensor:
        if self.upsampler is None:
            return F.one_hot(state.upsampled.gather(1, position), self.vocab).float()
        N = self.grid[0] * self.grid[1]
        known = torch.arange(N, device=tokens.device) < length[:, None]
        return to_probs(self.upsampler(state.upsampled, tokens[:, :N], known, position), state.sampling)


def validate_low_res(configs: Mapping[str, Any]) -> None:
    """Raise ValueError unless the grid of the low-resolution transformer divides the transformer's, and its up-sampler fits.

    Args:
        configs: configuration by component, None for a missing one.
    """
    low, large = configs.get("low_res"), configs["transformer"]["grid_size"]
    if low is None and configs.get("upsampler") is not None:
        raise ValueError("upsampler needs the low_res transformer whose images it enlarges")
    if low is not None and (low["grid_size"] >= large or large % low["grid_size"]):
        raise ValueError(
            f"low_res and transformer do not belong together: grid_size {low['grid_size']} must divide {large} and be smaller"
        )
    require_equal(configs, "upsampler", "low_grid", "low_res", "grid_size")


def downsample_tokens(tokens: Tensor, grid: tuple[int, int], low: tuple[int, int], codes: Tensor) -> Tensor:
    """Downsample tokens `[B, N]` to the grid `low`, int64 `[B, n]`: the codes nearest to the mean embeddings of the blocks."""
    (R, C), (r, c) = grid, low
    means = codes[tokens].unflatten(1, (r, R // r, c, C // c)).mean((2, 4)).flatten(1, 2)
    return (means @ codes.T).argmax(-1)


def upsample_tokens(
    low: Tensor, grid: tuple[int, int], decoded: Callable[[Tensor], Tensor], encoded: Callable[[Tensor], Tensor]
) -> Tensor:
    """Upsample tokens `[B, r, c]` to a larger grid, int64 `[B, R, C]`: decode, resize the pixels and encode."""
    pixels = decoded(low)
    factor = grid[0] // low.shape[1], grid[1] // low.shape[2]
    larger = F.interpolate(pixels, scale_factor=[float(each) for each in factor], mode="bicubic", align_corners=False)
    return encoded(larger.clamp(-1, 1))
