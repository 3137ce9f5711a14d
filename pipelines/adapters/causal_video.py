"""Adapter of a `CausalVideoTransformer` for the block loop: prompts, CFG rows, caches and timesteps.

Shape suffixes: F latent frames, C channels, Y/X rows and columns, P rows of text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from vargen.decoding.video.denoising import TIMESTEPS, predict_clean
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.causal_video_cache import TextCache, VideoCache
from vargen.models.condition import Condition


@dataclass
class BlockState:
    """State of a video in one model: its cache, and the prompt's keys and values (unguided row second, under guidance)."""

    cache: VideoCache
    text: TextCache


class CausalVideoBlockModel:
    """`vargen.decoding.BlockModel` of a causal video transformer.

    Args:
        levels: noise level of each step; see `vargen.decoding.video.denoising.shifted_levels`.
        fresh_noise: see `BlockModel`.
        guidance_scale: scale of classifier-free guidance; 1 runs only the row with the prompt, as distilled models do.
        null: condition of the unguided row; required for any other scale.
        window: maximum number of latent frames that a block attends to, including its own and the sinks; None for all.
        sinks: number of first frames of the video that always stay visible.
        motion: motion level, for networks trained with levels; None for any.
        draft_model: a smaller model with the same latents.
        device: device of the passes. Default: the device of the weights, which is a different one while they are offloaded.

    Raises:
        ValueError: for guidance without `null`.
    """

    def __init__(
        self,
        transformer: CausalVideoTransformer,
        levels: Sequence[float],
        *,
        fresh_noise: bool = True,
        guidance_scale: float = 1.0,
        null: Condition | None = None,
        window: int | None = None,
        sinks: int = 0,
        motion: int | None = None,
        draft_model: CausalVideoBlockModel | None = None,
        device: torch.device | None = None,
    ):
        if guidance_scale != 1 and null is None:
            raise ValueError(f"null must be given with guidance_scale {guidance_scale}")
        self.transformer, self.levels, self.fresh_noise = transformer, tuple(levels), fresh_noise
        self.guidance_scale, self.null = guidance_scale, null
        self.window, self.sinks, self.motion, self.draft_model = window, sinks, motion, draft_model
        self.device = device or transformer.device
        geometry = transformer.geometry
        self.block_shape = (geometry.block_frames, geometry.channels, geometry.height, geometry.width)

    @property
    def rows(self) -> int:
        """CFG rows of every pass."""
        return 1 if self.guidance_scale == 1 else 2

    @property
    def cost_key(self) -> str:
        """Key of measured pass costs: what the time of a pass depends on, besides the machine: sizes and dtype."""
        config = {name: value for name, value in self.transformer.config.items() if not name.startswith("_")}
        sizes = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]
        dtype = str(self.transformer.dtype).removeprefix("torch.")
        return f"{type(self.transformer).__name__} {sizes}, {dtype}, {self.rows} rows, window {self.window}"

    def start(self, condition: Condition, frames: int) -> BlockState:
        window = None if self.window is None or self.window >= frames else self.window
        cache = self.transformer.new_cache(
            self.rows, frames, window=window, sinks=0 if window is None else self.sinks, device=self.device
        )
        return BlockState(cache, self._text(condition))

    def switch(self, state: BlockState, condition: Condition) -> None:
        state.text = self._text(condition)

    def _text(self, condition: Condition) -> TextCache:
        rows, valid = [], []
        for each in (condition, self.null)[: self.rows]:
            assert each is not None and each.caption_embeds is not None
            rows.append(each.caption_embeds)
            shape = each.caption_embeds.shape[:2]
            valid.append(torch.ones(shape, dtype=torch.bool) if each.caption_mask is None else each.caption_mask.bool())
        longest = max(part.shape[1] for part in rows)
        padded = torch.cat([pad(part, (0, 0, 0, longest - part.shape[1])).to(self.device) for part in rows])
        mask = torch.cat([pad(part, (0, longest - part.shape[1])).to(self.device) for part in valid])
        levels = None if self.motion is None else torch.full((self.rows,), self.motion, device=self.device)
        if levels is not None and self.rows == 2:
            levels[1] = self.transformer.config.motion_levels  # the unguided row has the null level
        return self.transformer.text_cache(padded, mask, levels)

    def room(self, state: BlockState) -> int:
        return max(state.cache.room(), self.block_shape[0])

    def forward(
        self, state: BlockState, clean: Sequence[Tensor], noisy: Tensor | None = None, level: float = 0.0
    ) -> Tensor | None:
        cache = state.cache
        held = sum(part.shape[1] for part in clean)
        latents = torch.cat([*clean, *(() if noisy is None else (noisy,))], 1)
        cache.begin(latents.shape[1])
        steps = torch.zeros(self.rows, latents.shape[1], device=self.device)
        steps[:, held:] = level * TIMESTEPS
        velocity = self.transformer(latents.expand(self.rows, -1, -1, -1, -1), steps, state.text, cache)
        cache.commit(held)
        if noisy is None:
            return None
        velocity = velocity[:, held:].float()
        if self.rows == 2:
            with_prompt, without = velocity.chunk(2)
            velocity = without + self.guidance_scale * (with_prompt - without)
        return predict_clean(noisy, velocity, level)
