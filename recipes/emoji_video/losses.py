"""Losses of a video model: the flow of data, and consistency with a teacher's flow.

Flow matching with noise of its own on each block is diffusion forcing (Chen et al. 2024, arXiv:2407.01392); with clean blocks
before noisy ones it is teacher forcing with a cache's visibility (Hu et al. 2024, "ACDiT", arXiv:2412.07720). Consistency:
Song et al. 2023 (arXiv:2303.01469), causally: each block along its own trajectory, behind clean context.

Shape suffixes: B clips, F frames, C latent channels, Y/X latent rows and columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recipes.emoji_video.batches import NO_CAPTION, Batch, text_of
from recipes.emoji_video.config import VideoConfig
from recipes.emoji_video.generate import draw_latents
from vargen.decoding.video.denoising import TIMESTEPS, add_noise, predict_clean, shift_level, shifted_levels
from vargen.device import preferred_dtype
from vargen.models.causal_video import CausalVideoTransformer
from vargen.training.caption_bank import CaptionBank

Told = tuple[Tensor, dict[str, Tensor]]  # a loss, and figures for the log
_HUBER = 0.1  # errors of latents below it count squared, above it as they are


def euler_levels(recipe: VideoConfig) -> list[float]:
    """Noise levels of a flow's steps, from 1 down, without 0."""
    return [shift_level(1 - i / recipe.euler_steps, recipe.shift) for i in range(recipe.euler_steps)]


def drawing(recipe: VideoConfig) -> dict[str, object]:
    """How a model of this recipe is drawn with: `levels`, `euler` and `guidance` of `draw_latents`."""
    if recipe.objective == "flow":
        return {"levels": euler_levels(recipe), "euler": True, "guidance": recipe.guidance}
    return {"levels": list(shifted_levels(recipe.levels, recipe.shift)), "euler": False, "guidance": 1.0}


class Losses:
    """The loss of a step, by (seed, step), the batch and the networks alone.

    Args:
        average: the average of the model's weights, which consistency aims at and contexts are drawn with.
        teacher: whose flow consistency follows.
    """

    def __init__(
        self,
        model: CausalVideoTransformer,
        average: CausalVideoTransformer,
        bank: CaptionBank,
        recipe: VideoConfig,
        teacher: CausalVideoTransformer | None,
    ):
        self.model, self.average, self.bank, self.recipe, self.teacher = model, average, bank, recipe, teacher
        self.dtype = preferred_dtype(model.device)

    def amp(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def __call__(self, step: int, batch: Batch) -> Told:
        recipe = self.recipe
        draw = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        noise = torch.randn(batch.clean.shape, generator=draw).to(batch.clean)
        if recipe.objective == "consistency":
            return self.consistency(batch, noise, self.context(step, batch, draw), draw)
        alone = step < recipe.independent * recipe.schedule.steps
        return self.flow(batch, noise, None if alone else self.context(step, batch, draw), draw)

    # -- contexts ----------------------------------------------------------------------------------------------------

    def context(self, step: int, batch: Batch, draw: torch.Generator) -> Tensor:
        """Clean latents with hidden noise on half of the clips; at times what the model itself draws after the first block."""
        recipe, B = self.recipe, len(batch.clean)
        own = torch.rand((), generator=draw).item() < recipe.rollout
        strength = recipe.context_noise * torch.rand(B, generator=draw) * (torch.rand(B, generator=draw) < 0.5)
        noise = torch.randn(batch.clean.shape, generator=draw).to(batch.clean)
        if own:
            return self.drawn(step, batch)
        return add_noise(batch.clean, noise, strength.to(noise)[:, None, None, None, None])

    @torch.no_grad()
    def drawn(self, step: int, batch: Batch) -> Tensor:
        b = self.model.geometry.block_frames
        how = drawing(self.recipe)
        levels = how["levels"]
        assert isinstance(levels, list)
        if how["euler"]:  # rough, as mistakes are what is wanted
            levels = levels[:: max(1, len(levels) // 4)]
        with self.amp(), torch.compiler.set_stance("force_eager"):
            text = text_of(self.average, self.bank, batch.texts, batch.motion)
            return draw_latents(
                self.average, text, batch.clean.shape[1] // b, levels, self.recipe.seed * 7919 + step,
                euler=bool(how["euler"]), first=batch.clean[:, :b],
            )  # fmt: skip

    # -- objectives --------------------------------------------------------------------------------------------------

    def flow(self, batch: Batch, noise: Tensor, context: Tensor | None, draw: torch.Generator) -> Told:
        """Squared error of the velocity, at logit-normal levels, one for each block."""
        B, F = noise.shape[:2]
        b = self.model.geometry.block_frames
        level = torch.randn(B, -(-F // b), generator=draw).sigmoid()
        level = (self.recipe.shift * level / (1 + (self.recipe.shift - 1) * level)).to(noise)
        level = level.repeat_interleave(b, 1)[:, :F]
        noisy = add_noise(batch.clean, noise, level[..., None, None, None])
        with self.amp():
            text = text_of(self.model, self.bank, batch.texts, batch.motion)
            velocity = self.model(noisy, level * TIMESTEPS, text, context=context)
        error = (velocity.float() - (noise - batch.clean)).square()
        return _mean(error, batch.weights), {"velocity": error.detach().mean()}

    def consistency(self, batch: Batch, noise: Tensor, context: Tensor, draw: torch.Generator) -> Told:
        """From a level the model goes where its average goes from the next one, to which the teacher's flow has led."""
        assert self.teacher is not None
        B, F = noise.shape[:2]
        b = self.model.geometry.block_frames
        grid = torch.tensor([*euler_levels(self.recipe), 0.0])
        index = torch.randint(self.recipe.euler_steps, (B, -(-F // b)), generator=draw).repeat_interleave(b, 1)[:, :F]
        level, following = (grid[index + i].to(noise) for i in (0, 1))
        wide, wide_following = (x[..., None, None, None] for x in (level, following))
        noisy = add_noise(batch.clean, noise, wide)
        with self.amp(), torch.no_grad():
            leading = self.guided(noisy, level, batch, context)
            nearer = noisy + (wide_following - wide) * leading
            text = text_of(self.average, self.bank, batch.texts, batch.motion)
            v = self.average(nearer, following * TIMESTEPS, text, context=context).float()
            target = predict_clean(nearer, v, wide_following)
        with self.amp():
            text = text_of(self.model, self.bank, batch.texts, batch.motion)
            v = self.model(noisy, level * TIMESTEPS, text, context=context)
        error = predict_clean(noisy, v.float(), wide) - target
        smooth = (error.square() + _HUBER**2).sqrt() - _HUBER
        return _mean(smooth, batch.weights), {"apart": error.detach().abs().mean()}

    def guided(self, noisy: Tensor, level: Tensor, batch: Batch, context: Tensor) -> Tensor:
        """The teacher's velocity, led away from no caption."""
        assert self.teacher is not None
        steps, given = level * TIMESTEPS, text_of(self.teacher, self.bank, batch.texts, batch.motion)
        conditional = self.teacher(noisy, steps, given, context=context).float()
        if self.recipe.guidance == 1:
            return conditional
        null = text_of(self.teacher, self.bank, [NO_CAPTION] * len(noisy), None)
        unconditional = self.teacher(noisy, steps, null, context=context).float()
        return unconditional + self.recipe.guidance * (conditional - unconditional)


def _mean(error_BFCYX: Tensor, weights_BF1YX: Tensor) -> Tensor:
    """Weighted by place."""
    return (error_BFCYX * weights_BF1YX).mean() / weights_BF1YX.mean().clamp_min(1e-6)
