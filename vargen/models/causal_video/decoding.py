"""A `CausalVideoTransformer` as the block loop sees it: prompts, CFG rows, caches, timesteps, and the router of drafts.

Shape suffixes: H drafts, F latent frames, C channels, Y/X rows and columns, P rows of text, D statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, pad

from vargen.decoding.video.denoising import TIMESTEPS, predict_clean
from vargen.decoding.video.interfaces import BlockModel, DraftView
from vargen.models.causal_video.cache import TextCache, VideoCache
from vargen.models.causal_video.network import CausalVideoTransformer
from vargen.models.guidance import Condition, Guidance, cost_key, to_guidance
from vargen.models.storage import ModelMixin, QuantizedStorageMixin  # noqa: F401


@dataclass
class VideoState:
    """State of a video in one model: its cache, and the prompt's keys and values (under guidance, the unguided row second)."""

    cache: VideoCache
    text: TextCache


class CausalVideoBlockModel(BlockModel):
    """`BlockModel` of a causal video transformer.

    Args:
        levels: noise level of each step; see `vargen.decoding.video.denoising.shifted_levels`.
        guidance: classifier-free guidance; with scale 1 only the row with the prompt runs, as in distilled models. Any other
            scale requires its negative condition.
        window, sinks: which latent frames a block attends to; see `VideoCache`.
        motion: motion level, for networks trained with levels; None for any.
        device: of the passes. Default: the device of the weights, which is a different one while they are offloaded.
    """

    def __init__(
        self,
        transformer: CausalVideoTransformer,
        levels: Sequence[float],
        *,
        resamples_noise: bool = True,
        guidance: Guidance | float = 1.0,
        window: int | None = None,
        sinks: int = 0,
        motion: int | None = None,
        draft_model: CausalVideoBlockModel | None = None,
        device: torch.device | None = None,
    ):
        guidance = to_guidance(guidance)
        if guidance.rows_per_image == 2 and guidance.negative is None:
            raise ValueError(f"guidance must have a negative condition for scale {guidance.scale}")
        self.transformer, self.levels, self.resamples_noise = transformer, tuple(levels), resamples_noise
        self.guidance, self.rows_per_video = guidance, guidance.rows_per_image
        self.window, self.sinks, self.motion, self.draft_model = window, sinks, motion, draft_model
        self.device = device or transformer.device
        geometry = transformer.geometry
        self.block_shape = (geometry.block_frames, geometry.channels, geometry.height, geometry.width)
        self.shares_cache = draft_model is not None and self._has_cache_of(draft_model)
        self.cost_key = cost_key(transformer, f"{self.rows_per_video} rows", f"window {window}")

    def _has_cache_of(self, other: CausalVideoBlockModel) -> bool:
        """Whether the caches of both models would be equal."""
        own, others = ((m.transformer, m.rows_per_video, m.window, m.sinks, m.motion, m.device) for m in (self, other))
        return own == others and (self.rows_per_video == 1 or other.guidance.negative is self.guidance.negative)

    def start(self, condition: Condition, frames: int) -> VideoState:
        window = None if self.window is None or self.window >= frames else self.window
        sinks = 0 if window is None else self.sinks
        cache = self.transformer.new_cache(self.rows_per_video, frames, window=window, sinks=sinks, device=self.device)
        return VideoState(cache, self._text(condition))

    def switch(self, state: VideoState, condition: Condition) -> None:
        state.text = self._text(condition)

    def _text(self, condition: Condition) -> TextCache:
        rows, valid = [], []
        for each in self.guidance.conditions(condition, self.transformer):
            assert each.caption_embeds is not None
            rows.append(each.caption_embeds)
            shape = each.caption_embeds.shape[:2]
            valid.append(torch.ones(shape, dtype=torch.bool) if each.caption_mask is None else each.caption_mask.bool())
        longest = max(part.shape[1] for part in rows)
        padded = torch.cat([pad(part, (0, 0, 0, longest - part.shape[1])).to(self.device) for part in rows])
        mask = torch.cat([pad(part, (0, longest - part.shape[1])).to(self.device) for part in valid])
        levels = None if self.motion is None else torch.full((self.rows_per_video,), self.motion, device=self.device)
        if levels is not None and self.rows_per_video == 2:
            levels[1] = self.transformer.config.motion_levels  # the unguided row has the null level
        return self.transformer.text_cache(padded, mask, levels)

    def free_frames(self, state: VideoState) -> int:
        return max(state.cache.free_frames(), self.block_shape[0])

    def forward(
        self, state: VideoState, clean: Sequence[Tensor], noisy: Tensor | None = None, level: float = 0.0
    ) -> Tensor | None:
        cache = state.cache
        held = sum(part.shape[1] for part in clean)
        latents = torch.cat([*clean, *(() if noisy is None else (noisy,))], 1)
        cache.begin_block(latents.shape[1])
        steps = torch.zeros(self.rows_per_video, latents.shape[1], dtype=torch.float32, device=self.device)
        steps[:, held:] = level * TIMESTEPS
        velocity = self.transformer(latents.expand(self.rows_per_video, -1, -1, -1, -1), steps, state.text, cache)
        cache.commit(held)
        if noisy is None:
            return None
        velocity = velocity[:, held:].float()
        if self.rows_per_video == 2:
            with_prompt, without = velocity.chunk(2)
            velocity = without + self.guidance.scale * (with_prompt - without)
        return predict_clean(noisy, velocity, level)


_REGIONS, _CHANGES = 4, 8  # regions along a side of the mean frame; other statistics
_LEAST = 1e-6  # added to mean squares before their logarithm
RANKS = 101  # predicted gains at equal shares of the training pairs: what a share of the drafts is measured with


def describe_draft(draft_HFCYX: Tensor, previous_HFCYX: Tensor, first_HFCYX: Tensor, number: int) -> Tensor:
    """Return statistics of drafts, float32 `[H, D]`.

    They are the mean frame of the draft and of the first block, averaged over 4 x 4 regions; logarithms of mean squares, namely
    the drift of the mean frame from the first block, of the draft and of the previous block, their sharpness relative to the
    first block and to each other, the sharpness of the first block, and the motion relative to it; and the number of the block.

    Latents are clean: of drafts, of the finished blocks before them, and of the blocks at the start, which the target made.
    """
    draft, previous, first = draft_HFCYX.float(), previous_HFCYX.float(), first_HFCYX.float()
    shown, before, start = (block.mean(1) for block in (draft, previous, first))
    sharp, sharp_before, sharp_start = (_sharpness(block) for block in (draft, previous, first))
    changes = [
        _magnitude(shown - start), _magnitude(before - start), sharp - sharp_start, sharp_before - sharp_start,
        sharp - sharp_before, sharp_start, _magnitude(draft.diff(dim=1)) - _magnitude(first.diff(dim=1)),
        torch.full_like(sharp, float(number)),
    ]  # fmt: skip
    regions = [adaptive_avg_pool2d(frame, _REGIONS).flatten(1) for frame in (shown, start)]
    return torch.cat([*regions, torch.stack(changes, 1)], 1)


def _sharpness(block_HFCYX: Tensor) -> Tensor:
    return _magnitude(block_HFCYX.diff(dim=-1)) + _magnitude(block_HFCYX.diff(dim=-2))


def _magnitude(difference: Tensor) -> Tensor:
    """Return the logarithm of the mean square of each row; also of rows without values."""
    return (difference.flatten(1).square().sum(1) / max(1, difference[0].numel()) + _LEAST).log()


class BlockRouter(QuantizedStorageMixin, ConfigMixin):
    """Ranks drafts by how much the target would gain over them: a prediction without decoding or scorer.

    It is linear in a few statistics of a block, so that it can be fitted in closed form to some hundred pairs.

    Args:
        channels: C.
        drafter: digest of the network that makes the drafts, which `validate_drafter` compares.
        exit_step: None if a small model drafts; otherwise the draft is the target's estimate after this many steps.
    """

    @register_to_config
    def __init__(self, channels: int = 4, drafter: str = "", exit_step: int | None = None):
        super().__init__()
        count = 2 * channels * _REGIONS**2 + _CHANGES
        self.register_buffer("mean", torch.zeros(count))
        self.register_buffer("scale", torch.ones(count))
        self.gain = nn.Linear(count, 1)
        self.register_buffer("ranks", torch.linspace(-1, 1, RANKS))

    def predict_gain(self, statistics_HD: Tensor) -> Tensor:
        """Return the predicted score of the target's block minus that of the draft, float32 `[H]`."""
        return self.gain((statistics_HD - self.mean) / self.scale)[:, 0]

    def forward(self, draft_HFCYX: Tensor, previous_HFCYX: Tensor, first_HFCYX: Tensor, number: int) -> Tensor:
        """Return for each draft the share of the training drafts from which the target would gain less, `[H]` in [0, 1]."""
        gain = self.predict_gain(describe_draft(draft_HFCYX, previous_HFCYX, first_HFCYX, number).to(self.mean))
        return torch.searchsorted(self.ranks, gain).clamp(max=RANKS - 1) / (RANKS - 1)

    def rank(self, view: DraftView) -> float:
        """Return `forward` of one draft."""
        return float(self(view.latents, view.previous, view.first, view.number)[0])

    def validate_drafter(self, drafter: str, exit_step: int) -> None:
        """Raise ValueError unless drafts are made by the network with the digest `drafter` and this `exit_step` (0: none)."""
        if exit_step != (self.config.exit_step or 0):
            raise ValueError(f"the router is for exit_step {self.config.exit_step or 0}, the method has {exit_step}")
        if drafter != self.config.drafter:
            known = self.config.drafter
            raise ValueError(
                f"the router is for drafts of {known!r}, not of {drafter!r}: `vargen train router` trains it again"
            )
