"""Losses of a video model: flow matching, and consistency with a teacher's flow.

Flow matching with a separate noise level for each block is diffusion forcing (Chen et al. 2024, arXiv:2407.01392); with clean
blocks before noisy ones it is teacher forcing with a cache's visibility (Hu et al. 2024, "ACDiT", arXiv:2412.07720).
Consistency: Song et al. 2023 (arXiv:2303.01469), section 4, causally: each block along its own trajectory of the teacher's
flow, after clean context.

Shape suffixes: B clips, F frames, C latent channels, Y/X latent rows and columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recipes.emoji_video.batches import EMPTY_CAPTION, ClipBatch, encode_captions
from recipes.emoji_video.generate import euler_levels, sample_latents, sampling_settings
from vargen.decoding.video.denoising import TIMESTEPS, add_noise, predict_clean
from vargen.device import preferred_dtype
from vargen.models.causal_video import CausalVideoTransformer
from vargen.training.dataset import CaptionBank

if TYPE_CHECKING:
    from recipes.emoji_video.lora import LoRAConfig
    from recipes.emoji_video.transformer import VideoConfig

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]
_HUBER = 0.1  # below it, latent errors count squared, above it linearly


class VideoLoss:
    """The loss of a step, as a function of (seed, step), the batch and the networks.

    Args:
        average: the average of the model's weights, the target of consistency, which also generates contexts.
        teacher: its flow is the target of consistency.
    """

    def __init__(
        self,
        model: CausalVideoTransformer,
        average: CausalVideoTransformer,
        bank: CaptionBank,
        config: VideoConfig | LoRAConfig,
        teacher: CausalVideoTransformer | None = None,
    ):
        self.model, self.average, self.bank, self.config, self.teacher = model, average, bank, config, teacher
        self.dtype = preferred_dtype(model.device)

    def amp(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def __call__(self, step: int, batch: ClipBatch) -> LossAndMetrics:
        """Return the loss and values to log."""
        config = self.config
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        noise = torch.randn(batch.clean.shape, generator=generator).to(batch.clean)
        if config.objective != "flow":
            return self.consistency_loss(batch, noise, self.context(step, batch, generator), generator)
        forcing = step < config.diffusion_forcing_fraction * config.schedule.steps
        return self.flow_loss(batch, noise, None if forcing else self.context(step, batch, generator), generator)

    # -- contexts ----------------------------------------------------------------------------------------------------

    def context(self, step: int, batch: ClipBatch, generator: torch.Generator) -> Tensor:
        """Return clean latents, half of them with noise; sometimes latents that the model generates after the first block."""
        config, B = self.config, len(batch.clean)
        rollout = torch.rand((), generator=generator).item() < config.self_rollout_probability
        strength = config.context_noise * torch.rand(B, generator=generator) * (torch.rand(B, generator=generator) < 0.5)
        noise = torch.randn(batch.clean.shape, generator=generator).to(batch.clean)
        if rollout:
            return self.sample_context(step, batch)
        return add_noise(batch.clean, noise, strength.to(noise)[:, None, None, None, None])

    @torch.no_grad()
    def sample_context(self, step: int, batch: ClipBatch) -> Tensor:
        """Generate the blocks after the first one with the averaged weights."""
        b = self.model.geometry.block_frames
        settings = sampling_settings(self.config)
        levels = settings["levels"]
        assert isinstance(levels, list)
        if settings["euler"]:  # few steps: errors are the purpose
            levels = levels[:: max(1, len(levels) // 4)]
        with self.amp(), torch.compiler.set_stance("force_eager"):
            text = encode_captions(self.average, self.bank, batch.texts, batch.motion)
            return sample_latents(
                self.average,
                text,
                batch.clean.shape[1] // b,
                levels,
                self.config.seed * 7919 + step,
                euler=bool(settings["euler"]),
                first=batch.clean[:, :b],
            )

    # -- objectives --------------------------------------------------------------------------------------------------

    def flow_loss(self, batch: ClipBatch, noise: Tensor, context: Tensor | None, generator: torch.Generator) -> LossAndMetrics:
        """Return the squared error of the velocity at logit-normal noise levels, one for each block."""
        B, F = noise.shape[:2]
        b = self.model.geometry.block_frames
        level = torch.randn(B, -(-F // b), generator=generator).sigmoid()
        level = (self.config.shift * level / (1 + (self.config.shift - 1) * level)).to(noise)
        level = level.repeat_interleave(b, 1)[:, :F]
        noisy = add_noise(batch.clean, noise, level[..., None, None, None])
        with self.amp():
            text = encode_captions(self.model, self.bank, batch.texts, batch.motion)
            velocity = self.model(noisy, level * TIMESTEPS, text, context=context)
        error = (velocity.float() - (noise - batch.clean)).square()
        return weighted_mean(error, batch.weights), {"velocity": error.detach().mean()}

    def consistency_loss(self, batch: ClipBatch, noise: Tensor, context: Tensor, generator: torch.Generator) -> LossAndMetrics:
        """Return the distance of the model's prediction at a level from its average's at the next one of the teacher's flow."""
        B, F = noise.shape[:2]
        b = self.model.geometry.block_frames
        grid = torch.tensor([*euler_levels(self.config), 0.0])
        index = torch.randint(self.config.euler_steps, (B, -(-F // b)), generator=generator)
        level, following = (grid[i].repeat_interleave(b, 1)[:, :F].to(noise) for i in (index, index + 1))
        wide, wide_following = (x[..., None, None, None] for x in (level, following))
        noisy = add_noise(batch.clean, noise, wide)
        with self.amp(), torch.no_grad():
            nearer = noisy + (wide_following - wide) * self.guided_velocity(noisy, level, batch, context)
            target = self.prediction(self.average, nearer, following, batch, context)
        with self.amp():
            error = self.prediction(self.model, noisy, level, batch, context) - target
        return consistency_distance(error, batch.weights)

    def prediction(
        self, network: CausalVideoTransformer, noisy: Tensor, level: Tensor, batch: ClipBatch, context: Tensor
    ) -> Tensor:
        """Return the clean latents that a network predicts."""
        text = encode_captions(network, self.bank, batch.texts, batch.motion)
        v = network(noisy, level * TIMESTEPS, text, context=context).float()
        return predict_clean(noisy, v, level[..., None, None, None])

    def guided_velocity(self, noisy: Tensor, level: Tensor, batch: ClipBatch, context: Tensor) -> Tensor:
        """Return the teacher's velocity with classifier-free guidance."""
        assert self.teacher is not None
        steps, text = level * TIMESTEPS, encode_captions(self.teacher, self.bank, batch.texts, batch.motion)
        conditional = self.teacher(noisy, steps, text, context=context).float()
        if self.config.guidance == 1:
            return conditional
        null = encode_captions(self.teacher, self.bank, [EMPTY_CAPTION] * len(noisy), None)
        unconditional = self.teacher(noisy, steps, null, context=context).float()
        return unconditional + self.config.guidance * (conditional - unconditional)


def consistency_distance(error: Tensor, weights: Tensor) -> LossAndMetrics:
    """Return the pseudo-Huber loss of errors of latents, and values to log."""
    smooth = (error.square() + _HUBER**2).sqrt() - _HUBER
    return weighted_mean(smooth, weights), {"consistency_error": error.detach().abs().mean()}


def weighted_mean(error_BFCYX: Tensor, weights_BF1YX: Tensor) -> Tensor:
    return (error_BFCYX * weights_BF1YX).mean() / weights_BF1YX.mean().clamp_min(1e-6)
