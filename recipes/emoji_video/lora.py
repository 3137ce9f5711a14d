"""Train a LoRA with which a video model moves the image that a video starts from, as the caption says.

The network itself stays as it is, and generates the videos without a start image. Clips are animated ones and still images that
move; see `MixedBatches`. The average of the LoRA's weights is saved.

Shape suffixes: B clips, F frames, C latent channels, Y/X latent rows and columns.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from recipes.emoji.dataset import EmojiDataset
from recipes.emoji_var.tokenizer_evaluation import save_rows
from recipes.emoji_video.autoencoder import to_video
from recipes.emoji_video.batches import PreparedAhead, clip_latents, encode_captions, hash_encoder
from recipes.emoji_video.clips import VideoDataset
from recipes.emoji_video.generate import STATIC, euler_levels, sample_latents, sampling_settings
from recipes.emoji_video.losses import LossAndMetrics, VideoLoss, consistency_distance
from recipes.emoji_video.moving_stills import MixedBatches, MovingStills, encode, start_settings
from recipes.emoji_video.teacher_forcing import CleanContext
from recipes.emoji_video.transformer import SAMPLING, load_video_network
from vargen.decoding.video.denoising import TIMESTEPS, add_noise, predict_clean, shifted_levels
from vargen.files import atomic_file
from vargen.models.component_files import validate_network_files
from vargen.models.lora import CausalVideoLoRA
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.training.augment import SamplingWeights
from vargen.training.config import Schedule, at_least, validate_fractions
from vargen.training.dataset import CaptionBank
from vargen.training.run import Trainer, export, fit
from vargen.weight_files import weights_digest

_EVALUATED = 12  # clips generated in an evaluation
_EVALUATION_SEED = 999


@dataclass(frozen=True)
class LoRAConfig:
    """How to train a `CausalVideoLoRA`. `model` contains its `rank`."""

    objective: ClassVar[str] = "consistency"

    model: dict[str, Any] = field(default_factory=lambda: {"rank": 32})
    schedule: Schedule = field(default_factory=Schedule)  # its learning rate is AdamW's
    seed: int = 0
    batch_size: int = 8  # clips
    max_caption_tokens: int = 24  # longer captions are truncated: one shape for all batches
    caption_dropout: float = 0.05
    still_fraction: float = 0.625  # of a batch's clips that are still images in motion
    still_weights: SamplingWeights = field(default_factory=SamplingWeights)  # how often each kind of still image is sampled
    motion_label_probability: float = 0.5  # of conditioning on a clip's motion level
    motion_weight: float = 3.0  # additional loss weight of a place with average motion
    context_noise: float = 0.2  # maximum noise on half of the clean contexts, because generated ones contain errors
    self_rollout_probability: float = 0.05  # of contexts that the model itself generates
    shift: float = 2.0  # of noise levels, toward noise
    levels: list[Any] = field(default_factory=lambda: [1000, 750, 500, 250])  # timesteps of sampling, before the shift
    sampling_levels_fraction: float = 0.75  # of noisy blocks that are at one of these levels; others at any of `euler_steps`
    euler_steps: int = 16
    ema_decay: float = 0.99  # of the average of the weights
    compile: bool = False
    evaluate_every: int = 500
    checkpoint_every: int = 50

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "max_caption_tokens", "euler_steps", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "motion_weight")
        validate_fractions(self, "still_fraction", "caption_dropout", "motion_label_probability", "context_noise", "ema_decay")
        validate_fractions(self, "self_rollout_probability", "sampling_levels_fraction")
        if set(self.model) != {"rank"}:
            raise ValueError(f"model must contain rank, and nothing else, got {self.model}")
        shifted_levels(self.levels, self.shift)  # raises ValueError


class StartImageLoss(VideoLoss):
    """Consistency of the predictions for noisy blocks after clean ones; the first block, the start image, has no loss.

    Without a teacher, each block follows its own trajectory, the line from noise to clip (Song et al. 2023, arXiv:2303.01469,
    section 5). The target is what the network itself predicts at a lower level (Song and Dhariwal 2023, arXiv:2310.14189), down
    to the clip, from which new captions are learned.
    """

    config: LoRAConfig

    def __call__(self, step: int, batch: Any) -> LossAndMetrics:
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step)
        noise = torch.randn(batch.clean.shape, generator=generator).to(batch.clean)
        context = self.context(step, batch, generator)
        (B, F), b = noise.shape[:2], self.model.geometry.block_frames
        level, following = (each.repeat_interleave(b, 1).to(noise) for each in self._levels((B, F // b - 1), generator))
        wide, wide_following = (each[..., None, None, None] for each in (level, following))
        clean, noise = batch.clean[:, b:], noise[:, b:]
        noisy, nearer = add_noise(clean, noise, wide), add_noise(clean, noise, wide_following)
        with self.amp():
            text = encode_captions(self.model, self.bank, batch.texts, batch.motion)
            given = CleanContext(self.model, context, text)
            with torch.no_grad():
                velocity = given.velocity(self.model, nearer, following * TIMESTEPS, text).float()
                target = predict_clean(nearer, velocity, wide_following)
            velocity = given.velocity(self.model, noisy, level * TIMESTEPS, text).float()
            error = predict_clean(noisy, velocity, wide) - target
        return consistency_distance(error, batch.weights[:, b:])

    def _levels(self, shape: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the noise level of each block, and a lower one."""
        config = self.config
        grid = torch.tensor([*euler_levels(config), 0.0])
        sampled = torch.tensor([round(config.euler_steps * (1 - level / TIMESTEPS)) for level in config.levels])
        index = torch.randint(config.euler_steps, shape, generator=generator)
        chosen = sampled[torch.randint(len(sampled), shape, generator=generator)]
        index = torch.where(torch.rand(shape, generator=generator) < config.sampling_levels_fraction, chosen, index)
        ahead = 1 + (torch.rand(shape, generator=generator) * (config.euler_steps - index)).long()
        return grid[index], grid[index + ahead]


class LoRATrainer(Trainer):
    """Trains a LoRA on the gradients of `network`, whose matrices are those of `original` with the LoRA.

    Attributes:
        average: exponential moving average of the LoRA's weights. averaged_network: the network with it.
    """

    def __init__(
        self,
        config: LoRAConfig,
        data: VideoDataset,
        vae_folder: Path,
        text_encoder_folder: Path,
        folder: Path,
        device: torch.device,
        network_folder: Path,
        stills: EmojiDataset,
    ):
        validate_network_files(vae_folder, CausalVideoVAE)
        torch.manual_seed(config.seed)
        self.vae = CausalVideoVAE.from_pretrained(vae_folder).to(device).eval().requires_grad_(False)
        self.original = load_video_network(network_folder, self.vae, data, device)
        size = self.original.config
        lora = CausalVideoLoRA(dim=size.dim, ffn_dim=size.ffn_dim, num_layers=size.num_layers, **config.model)
        identity = {"vae": hash_encoder(self.vae), "network": weights_digest(self.original)}
        super().__init__(config, lora, folder, device, "video-lora", **identity)
        self.average = copy.deepcopy(lora).eval().requires_grad_(False)
        self.network, self.averaged_network = copy.deepcopy(self.original), copy.deepcopy(self.original)
        lora.require_gradients(self.network)
        latents = clip_latents(folder, data, self.vae, device)
        self.bank = CaptionBank(text_encoder_folder, config.max_caption_tokens, device)
        block, levels = self.network.geometry.block_frames, size.motion_levels
        self.batches = PreparedAhead(MixedBatches(data, stills, latents, self.vae, config, block, levels, device))
        self.shown = MovingStills(stills, config, *data.frames.shape[1:3], block).examples(_EVALUATION_SEED, _EVALUATED)
        self.loss = StartImageLoss(self.network, self.averaged_network, self.bank, config)
        rate = config.schedule.learning_rate
        self.optimizers = [torch.optim.AdamW(lora.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)]
        if config.compile:
            for part in self.network.blocks:
                part.compile(dynamic=False)  # same shapes and code: compiled only once

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.model.take_gradients(self.network)

    def step(self, step: int) -> dict[str, Tensor]:
        loss, metrics = self.loss(step, self.batches(step))
        self.update(step, loss)
        rate = 1 - min(self.config.ema_decay, (step + 1) / (step + 10))
        with torch.no_grad():
            for average, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
                average.lerp_(weight, rate)
        self._write()
        return {"loss": loss.detach(), **metrics}

    def _write(self) -> None:
        self.model.write(self.network, self.original)
        self.average.write(self.averaged_network, self.original)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": self.average.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.average.load_state_dict(state["average"])
        self._write()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Generate clips from the first frames of moving stills, and save them to `samples.png`.

        Returns:
            `motion`, the median of their motion relative to the real clips; `static_fraction`, the fraction that moves less
            than a fifth of it; `psnr`, in dB, of their frames relative to the real ones.
        """
        clips, texts = zip(*self.shown, strict=True)
        real = to_video(np.stack(clips), self.device)
        block, settings = self.network.geometry.block_frames, sampling_settings(self.config)
        with self.amp():
            clean = encode(self.vae, np.stack(clips), self.device)
            text = encode_captions(self.averaged_network, self.bank, list(texts))
            count = clean.shape[1] // block
            levels: Any = settings["levels"]
            options: dict[str, Any] = {"seed": 1, "euler": settings["euler"], "first": clean[:, :block]}
            latents = sample_latents(self.averaged_network, text, count, levels, **options)
            made = self.vae.decode(latents).clamp(-1, 1).float()
        save_rows([row[::2] for row in made], self.folder / "samples.png")
        ratios = made.diff(dim=1).abs().mean((1, 2, 3, 4)) / real.diff(dim=1).abs().mean((1, 2, 3, 4)).clamp_min(1e-6)
        error = ((made - real) / 2).square().mean((1, 2, 3, 4)).clamp_min(1e-10)
        static = (ratios < STATIC).float().mean().item()
        return {"motion": ratios.median().item(), "static_fraction": static, "psnr": (-10 * error.log10()).mean().item()}


def train_video_lora(
    config: LoRAConfig,
    data: VideoDataset,
    vae_folder: Path,
    text_encoder_folder: Path,
    folder: Path,
    device: torch.device,
    network_folder: Path,
    stills: EmojiDataset,
) -> dict[str, float]:
    """Train until `config.schedule.steps`, resuming the run in `folder`; saves the averaged LoRA to `folder/lora`.

    Args:
        vae_folder: a saved `CausalVideoVAE`. text_encoder_folder: contains `text_encoder/` and `tokenizer/`.
        network_folder: a saved `CausalVideoTransformer` of few steps. stills: images for `still_fraction` of the clips.

    Returns:
        The metrics of `LoRATrainer.evaluate`.

    Raises:
        ValueError: if a saved network is damaged; if clips, autoencoder and network are not compatible; if a run to resume has
            others of them; or if the run diverged.
    """
    trainer = LoRATrainer(config, data, vae_folder, text_encoder_folder, folder, device, network_folder, stills)
    fit(trainer)
    with atomic_file(folder / SAMPLING) as temporary:
        settings = {**sampling_settings(config), **start_settings(trainer.network.geometry.block_frames)}
        temporary.write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
    return export(trainer.run, trainer.average, "lora", trainer.evaluate(), ("loss",), ("motion", "static_fraction"), ("psnr",))
