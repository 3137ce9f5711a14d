"""Train a `PreviewDecoder`, which shows approximately what latents decode to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.emoji.codebook import reconstruction_loss
from recipes.emoji_video.autoencoder import to_video
from recipes.emoji_video.batches import clip_latents, hash_encoder
from recipes.emoji_video.clips import VideoDataset
from vargen.models.component_files import validate_network_files
from vargen.models.tokenizers.preview_decoder import PreviewDecoder
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.training.config import Schedule, at_least
from vargen.training.run import Trainer, export, fit


@dataclass(frozen=True)
class PreviewConfig:
    """How to train a `PreviewDecoder` on latents and frames. `model` contains the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    batch_size: int = 64  # frames
    latent_noise: float = 0.2  # maximum noise, in standard deviations
    l1_weight: float = 1.0
    mse_weight: float = 2.0
    gradient_weight: float = 0.5
    color_weight: float = 1.0
    weight_decay: float = 0.01
    evaluate_every: int = 500
    checkpoint_every: int = 200

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "latent_noise", "weight_decay")


@torch.no_grad()
def preview_psnr(model: PreviewDecoder, latents: np.ndarray, frames: np.ndarray, device: torch.device) -> float:
    """Return the mean PSNR in dB of previews of `[N, F, C, Y, X]` relative to uint8 frames `[N, F, Y', X', 3]`."""
    psnr: list[Tensor] = []
    for latent, real in zip(latents, frames, strict=True):
        shown = model(torch.from_numpy(latent[None].astype(np.float32)).to(device)).clamp(-1, 1)
        error = ((shown - to_video(real[None], device)) / 2).square().mean((2, 3, 4))
        psnr.append(-10 * error.clamp_min(1e-10).log10().flatten())
    return torch.cat(psnr).mean().item()


class PreviewTrainer(Trainer):
    """Trains a preview decoder on the latents of an autoencoder."""

    def __init__(self, config: PreviewConfig, data: VideoDataset, vae_folder: Path, folder: Path, device: torch.device):
        validate_network_files(vae_folder, CausalVideoVAE)
        vae = CausalVideoVAE.from_pretrained(vae_folder).to(device).eval().requires_grad_(False)
        torch.manual_seed(config.seed)
        model = PreviewDecoder(**config.model)
        for name, value, expected in (
            ("latent_channels", model.config.latent_channels, vae.config.latent_channels),
            ("stride", model.config.stride, vae.spatial_stride),
        ):
            if value != expected:
                raise ValueError(f"{name} must be the autoencoder's, {expected}, got {value}")
        super().__init__(config, model, folder, device, "video-preview", vae=hash_encoder(vae))
        self.data, self.stride = data, vae.spatial_stride
        self.latents = clip_latents(folder, data, vae, device)
        self.train, self.validation = data.indices("train"), data.indices("validation")
        rate, decay = config.schedule.learning_rate, config.weight_decay
        self.optimizers = [torch.optim.AdamW(model.parameters(), rate, (0.9, 0.99), weight_decay=decay, fused=True)]

    def step(self, step: int) -> dict[str, Tensor]:
        config, frames = self.config, self.data.frames
        rng = np.random.default_rng((config.seed, step))
        clips, times = rng.choice(self.train, config.batch_size), rng.integers(frames.shape[1], size=config.batch_size)
        z = torch.from_numpy(self.latents[clips, times].astype(np.float32)).to(self.device)
        real = to_video(np.stack([frames[c, t] for c, t in zip(clips, times, strict=True)])[:, None], self.device)[:, 0]
        noise = torch.randn(z.shape, generator=torch.Generator().manual_seed(config.seed * 1_000_003 + step)).to(z)
        strength = torch.from_numpy(rng.random(len(z)).astype(np.float32)).to(z)[:, None, None, None]
        with self.amp():
            shown = self.model((z + config.latent_noise * strength * noise)[:, None])[:, 0]
        loss = reconstruction_loss(shown.float(), real, config, self.stride)
        self.update(step, loss)
        return {"loss": loss.detach()}

    def evaluate(self) -> dict[str, float]:
        frames = self.data.frames[self.validation]
        return {"psnr": preview_psnr(self.model, self.latents[self.validation], frames, self.device)}


def train_video_preview(
    config: PreviewConfig, data: VideoDataset, vae_folder: Path, folder: Path, device: torch.device
) -> dict[str, float]:
    """Train until `config.schedule.steps`, resuming the run in `folder`; saves the model to `folder/preview`.

    Returns:
        `psnr` on validation clips.

    Raises:
        ValueError: if the saved autoencoder is damaged or does not match the clips or the config; if the folder contains
            another run; or if the run diverged.
    """
    trainer = PreviewTrainer(config, data, vae_folder, folder, device)
    fit(trainer)
    return export(trainer.run, trainer.model, "preview", trainer.evaluate(), ("loss",), ("psnr",))
