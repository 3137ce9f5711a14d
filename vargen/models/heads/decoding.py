"""Trained drafters of a LlamaGen transformer as decoding sees them. They share its embedding, final norm and output layer.

Shape suffixes: B images, R rows (B, or 2 B under guidance: conditional first), T fed slots, D width, V vocabulary, h heads.
"""

from __future__ import annotations

from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.decoding import AutoregressiveHead, Engine, LowResModel, Output, ParallelHeads, Sampling, TokenModel, Tree
from vargen.decoding.decode import generate_images
from vargen.decoding.noise import Purpose, derive_seeds
from vargen.decoding.sampling import SlotSampling
from vargen.decoding.tree_drafters import repeat_for_cfg
from vargen.models.guidance import Condition, GuidedTokenModel
from vargen.models.heads.network import EagleCache, EagleDrafter, MedusaDrafter, TokenUpsampler
from vargen.models.tokenizers.vq import VQModel


class EagleModel(AutoregressiveHead):
    """`AutoregressiveHead` of an `EagleDrafter` and its target."""

    def __init__(self, drafter: EagleDrafter, target: GuidedTokenModel):
        self.drafter, self.target, self.vocab, self.grid = drafter, target, target.vocab, target.grid
        self.networks = (drafter,)

    def allocate(self, slots: int, width: int) -> EagleCache:
        return self.drafter.new_cache(slots * self.target.rows_per_image, width, self.target.device)

    def reset(self, state: EagleCache, rows: Tensor) -> None:
        rows = repeat_for_cfg(rows, state.rows // self.target.rows_per_image, state.rows)
        state.kv.index_fill_(2, rows, 0)  # a product of 0 and NaN, such as that of a failed image, is NaN
        state.length.index_fill_(0, rows, 0)
        if state.seen is not None:
            state.seen.index_fill_(0, rows, 0)

    def forward(self, tokens: Tensor, features: Tensor, state: EagleCache, tree: Tree) -> Output:
        B, T = tokens.shape
        rows_per_image = self.target.rows_per_image
        earlier = tree.parents.shape[-1] - T
        depth = tree.depth[..., earlier:]
        position = state.length[:B, None] + depth
        places = {}
        if not tree.is_chain:
            ancestors = tree.ancestors[..., earlier:, :]
            ancestors = ancestors if ancestors.dim() == 2 else ancestors.repeat(rows_per_image, 1, 1)
            places = {"ancestors": ancestors, "positions": position.repeat(rows_per_image, 1)}
        above = None if state.seen is None else self._above(features, state, position, earlier)
        hidden = self.drafter(features, self.target.embed(tokens), state, earlier=earlier, above=above, **places)
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
        last = position if earlier == 0 else state.length[:, None]
        known = (source >= 1) & (source <= last)
        index = source.clamp(0, seen.shape[1] - 1)[..., None].expand(-1, -1, seen.shape[2])
        return seen.gather(1, index) * known[..., None]

    def commit(self, state: EagleCache, count: Tensor) -> None:
        state.commit_chain(count)


class MedusaHeads(ParallelHeads):
    """`ParallelHeads` of a `MedusaDrafter` and its target."""

    def __init__(self, drafter: MedusaDrafter, target: GuidedTokenModel):
        self.drafter, self.target, self.vocab, self.grid = drafter, target, target.vocab, target.grid
        self.networks, self.num_heads = (drafter,), drafter.config.heads

    def forward(self, tokens: Tensor, features: Tensor, position: Tensor) -> Tensor:
        hidden = self.drafter(features, self.target.embed(tokens[:, None]))[:, 0]
        ahead = torch.arange(self.num_heads, device=position.device)
        return self.target.head(hidden, position[:, None] + ahead)


class LowResolutionDrafter(LowResModel):
    """`LowResModel` of a low-resolution transformer.

    Args:
        model: of the transformer.
        grid: of the target.
        upsampler: predicts token probabilities. None: the image is decoded, enlarged and encoded, and its tokens are the drafts
            (MuLo-SD's training-free up-sampler).
    """

    def __init__(self, model: TokenModel, grid: tuple[int, int], upsampler: TokenUpsampler | None, vqvae: VQModel):
        self.model, self.vocab, self.grid, self.upsampler, self.vqvae = model, model.vocab, grid, upsampler, vqvae
        self.networks = () if upsampler is None else (upsampler,)
        self._is_bound = False
        self._engine: Engine | None = None  # by `start`

    def bind(self) -> LowResolutionDrafter:
        """Return a copy for one engine, which keeps an engine of its own if passes are captured."""
        bound = copy(self)
        bound._is_bound = True
        return bound

    def start(self, condition: Condition, seeds: Tensor, sampling: Sampling) -> Tensor:
        """Return features `[n, D, R, C]` of the up-sampler, or tokens `[n, N]` without one."""
        rows, columns = self.model.grid
        method, own = "gumbel" if rows * columns >= 16 else "ar", derive_seeds(seeds, Purpose.LOW_RES)  # its window is 16
        engine, self._engine = self._engine, None
        if engine is None or engine.batch_size < len(seeds):
            engine = Engine(self.model, method, batch_size=len(seeds))
        low = generate_images(engine, condition, own, sampling).tokens.unflatten(1, self.model.grid)
        if self._is_bound and engine.captures:
            engine.restart()
            self._engine = engine
        if self.upsampler is not None:
            return self.upsampler.features(low)
        pixels = self.vqvae.decode(low)
        factor = [float(high // side) for high, side in zip(self.grid, self.model.grid, strict=True)]
        larger = F.interpolate(pixels, scale_factor=factor, mode="bicubic", align_corners=False)
        return self.vqvae.encode(larger.clamp(-1, 1)).flatten(1)

    def probs(self, images: Tensor, tokens: Tensor, length: Tensor, position: Tensor, sampling: SlotSampling) -> Tensor:
        if self.upsampler is None:
            return F.one_hot(images.gather(1, position), self.vocab).float()
        known = torch.arange(tokens.shape[1], device=tokens.device) < length[:, None]
        return sampling.probs(self.upsampler(images, tokens, known, position))
