"""Train a `CausalVideoVAE` on windows of clips.

The loss includes differences of consecutive frames: otherwise each frame is reconstructed as well as possible by itself, and
static edges flicker. Noise on the latents keeps the decoder from depending on details that a generator cannot reproduce.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from recipes.emoji.codebook import reconstruction_loss
from recipes.emoji_var.tokenizer import paste, validate_zoom, wavelet_loss
from recipes.emoji_var.tokenizer_evaluation import save_rows
from recipes.emoji_video.clips import VideoDataset, motion_weights
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.training.augment import WeightedIndices
from vargen.training.config import Schedule, at_least
from vargen.training.run import Trainer, export, fit

_STRIP = 12  # frames of a clip on a sheet
_CLIPS = 8  # clips that are encoded at once
_MOVING = 2 / 255 * 2  # minimum change of a moving pixel, in the range [-1, 1]


@dataclass(frozen=True)
class AutoencoderConfig:
    """How to train a `CausalVideoVAE`. `model` contains the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    batch_size: int = 16  # clips
    frames: int = 6  # consecutive ones of each clip: the decoder's causal layers look back four
    shift: int = 4  # pixels, in each direction
    zoom: list[Any] = field(default_factory=lambda: [0.8, 1.1])  # of half of the clips, on white
    l1_weight: float = 1.0
    mse_weight: float = 2.0
    gradient_weight: float = 0.5
    color_weight: float = 1.0
    wavelet_weight: float = 0.5
    motion_weight: float = 1.0  # L1 of differences of consecutive frames: without it, static parts flicker
    kl_weight: float = 3e-4  # divergence from N(0, 1) per latent value: keeps the latents' scale even and their map smooth
    latent_noise: float = 0.2  # maximum noise on half of the clips' latents, in standard deviations
    weight_decay: float = 0.01
    evaluate_every: int = 250
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "evaluate_every", "checkpoint_every")
        at_least(self, 2, "frames")
        at_least(self, 0, "shift", "motion_weight", "kl_weight", "latent_noise", "weight_decay")
        validate_zoom(self.zoom)


def to_video(frames: np.ndarray, device: torch.device) -> Tensor:
    """Convert uint8 `[B, F, Y, X, 3]` to float32 `[B, F, 3, Y, X]` in [-1, 1]."""
    return torch.from_numpy(np.ascontiguousarray(frames)).to(device).movedim(-1, 2).contiguous().float() / 127.5 - 1


class WindowBatches:
    """Windows of training clips as a function of (seed, step).

    Half of them are mirrored, half of them zoomed, half of them at double speed; all are shifted.
    """

    def __init__(self, data: VideoDataset, config: AutoencoderConfig):
        self.data, self.config = data, config
        indices = data.indices("train")
        self.sample = WeightedIndices(indices, motion_weights([data.records[i] for i in indices]))

    def __call__(self, step: int) -> np.ndarray:
        """Return uint8 `[B, F, Y, X, 3]`."""
        config = self.config
        rng = np.random.default_rng((config.seed, step))
        indices = self.sample(rng.random(config.batch_size))
        size = self.data.frames.shape[2]
        batch = np.full((config.batch_size, config.frames, size, size, 3), 255, dtype=np.uint8)
        for canvas, index in zip(batch, indices, strict=True):
            every = int(rng.integers(1, 3))
            window = self.data.window(int(index), int(rng.integers(1 << 30)), config.frames * every)[::every]
            if rng.random() < 0.5:
                side = round(size * rng.uniform(*config.zoom))
                resized = [Image.fromarray(f).resize((side, side), Image.Resampling.LANCZOS) for f in window]
                window = np.stack([np.asarray(f) for f in resized])
            if rng.random() < 0.5:
                window = window[:, :, ::-1]
            y, x = (size - window.shape[1]) // 2 + rng.integers(-config.shift, config.shift + 1, 2)
            for target, frame in zip(canvas, window, strict=True):
                paste(target, frame, int(y), int(x))
        return batch


@torch.no_grad()
def evaluate_video_vae(model: CausalVideoVAE, clips: np.ndarray, device: torch.device) -> dict[str, float]:
    """Evaluate an autoencoder on uint8 clips `[N, F, Y, X, 3]`, decoded from latents without noise.

    Returns:
        `psnr` (mean over frames, dB); `motion`: mean change between decoded frames relative to real ones, 1 at best;
            `motion_error`: mean error of these changes relative to the real mean change, 0 at best; `flicker`: mean change of
            static pixels relative to the real mean change of moving pixels, 0 at best.
    """
    model.eval()
    psnr: list[Tensor] = []
    sums = torch.zeros(6, dtype=torch.float64)
    for start in range(0, len(clips), _CLIPS):
        pixels = to_video(clips[start : start + _CLIPS], device)
        decoded = model.decode(model.encode(pixels)).clamp(-1, 1)
        psnr.append(-10 * ((decoded - pixels) / 2).square().mean((2, 3, 4)).clamp_min(1e-10).log10().flatten().cpu())
        real, made = pixels.diff(dim=1), decoded.diff(dim=1)
        moves = real.abs().amax(2, keepdim=True).expand_as(real) > _MOVING
        parts = [
            made.abs().sum(), real.abs().sum(), (made - real).abs().sum(),
            (made.abs() * ~moves).sum(), (~moves).sum(), moves.sum(),
        ]  # fmt: skip
        sums += torch.stack([part.double() for part in parts]).cpu()
    made_sum, real_sum, error, flicker, still, moving = sums.clamp_min(1e-9).tolist()
    metrics = {"motion": made_sum / real_sum, "motion_error": error / real_sum}
    metrics["flicker"] = (flicker / still) / (real_sum / moving)
    return {"psnr": torch.cat(psnr).mean().item(), **metrics}


@torch.no_grad()
def save_clip_strips(model: CausalVideoVAE, clips: np.ndarray, device: torch.device, path: Path) -> None:
    """Save a PNG with two rows for each clip: its frames, and their reconstructions."""
    pixels = to_video(clips[:, :_STRIP], device)
    decoded = model.eval().decode(model.encode(pixels))
    save_rows([row for pair in zip(pixels, decoded, strict=True) for row in pair], path)


@torch.no_grad()
def fit_standardization(model: CausalVideoVAE, data: VideoDataset, device: torch.device) -> None:
    """Set the statistics by which latents of the training clips get mean 0 and variance 1 per channel."""
    model.eval()
    indices = data.indices("train")
    every_fourth = slice(None, None, 4)  # consecutive frames are similar
    count, total, squares = 0, torch.zeros(2), torch.zeros(2)
    for start in range(0, len(indices), _CLIPS):
        mean, _ = model.encode_moments(to_video(data.frames[indices[start : start + _CLIPS], every_fourth], device))
        channels = mean.double().movedim(2, 0).flatten(1).cpu()
        if not count:
            total, squares = torch.zeros(len(channels)).double(), torch.zeros(len(channels)).double()
        count += channels.shape[1]
        total, squares = total + channels.sum(1), squares + channels.square().sum(1)
    average = total / count
    model.latent_mean.copy_(average)
    model.latent_std.copy_((squares / count - average.square()).clamp_min(1e-8).sqrt())


class AutoencoderTrainer(Trainer):
    """Trains a video autoencoder."""

    def __init__(self, config: AutoencoderConfig, data: VideoDataset, folder: Path, device: torch.device):
        torch.manual_seed(config.seed)
        model = CausalVideoVAE(**config.model)
        if (size := data.frames.shape[2]) != model.config.size:
            raise ValueError(f"size must be that of the data set's frames, {size}, got {model.config.size}")
        super().__init__(config, model, folder, device, "video-vae")
        rate, decay = config.schedule.learning_rate, config.weight_decay
        self.optimizers = [torch.optim.AdamW(model.parameters(), rate, (0.9, 0.99), weight_decay=decay, fused=True)]
        self.batches = WindowBatches(data, config)
        validation, train = data.indices("validation"), data.indices("train")
        first = slice(0, _STRIP)
        self.clips = {
            "": data.frames[validation, first],
            "seen_": data.frames[train[:: max(1, len(train) // 24)], first],
        }
        self.shown = self.clips[""][:: max(1, len(validation) // 6)][:6]

    def add_noise(self, mean: Tensor, log_variance: Tensor, step: int) -> Tensor:
        """Sample latents, for half of the clips with further noise of a random strength up to the config's."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step)
        noise = torch.randn(mean.shape, generator=generator).to(mean)
        strength = torch.rand(len(mean), generator=generator) * (torch.rand(len(mean), generator=generator) < 0.5)
        more = torch.randn(mean.shape, generator=generator).to(mean) * strength.to(mean)[:, None, None, None, None]
        size = mean.detach().std((0, 1, 3, 4))[:, None, None]
        return mean + (log_variance / 2).exp() * noise + self.config.latent_noise * size * more

    def step(self, step: int) -> dict[str, Any]:
        config = self.config
        pixels = to_video(self.batches(step), self.device)
        with self.amp():
            mean, log_variance = self.model.encode_moments(pixels)
            decoded, _ = self.model.decoder(self.add_noise(mean, log_variance, step))
        decoded = decoded.float()
        frames, real = decoded.flatten(0, 1), pixels.flatten(0, 1)
        reconstruction = reconstruction_loss(frames, real, config, self.model.spatial_stride)
        reconstruction = reconstruction + config.wavelet_weight * wavelet_loss(frames - real)
        motion = (decoded - pixels).diff(dim=1).abs().mean()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        loss = reconstruction + config.motion_weight * motion + config.kl_weight * divergence
        self.update(step, loss)
        losses = {"loss": loss, "reconstruction": reconstruction, "difference": motion, "divergence": divergence}
        noise = (log_variance.detach() / 2).exp().mean()
        return {**{name: value.detach() for name, value in losses.items()}, "noise": noise}

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of validation clips and, with the prefix `seen_`, of training clips; saves `strips.png`."""
        save_clip_strips(self.model, self.shown, self.device, self.folder / "strips.png")
        return {
            prefix + name: value
            for prefix, part in self.clips.items()
            for name, value in evaluate_video_vae(self.model, part, self.device).items()
        }


def train_autoencoder(config: AutoencoderConfig, data: VideoDataset, folder: Path, device: torch.device) -> dict[str, float]:
    """Train until `config.schedule.steps`, resuming the run in `folder`; saves the model to `folder/vae`.

    Each evaluation saves validation clips and their reconstructions to `folder/strips.png`.

    Returns:
        The metrics of `evaluate_video_vae`: `psnr` and so on of validation clips, `seen_psnr` and so on of training clips.

    Raises:
        ValueError: if the clips do not have the model's size, the folder contains another run, or the run diverged.
    """
    trainer = AutoencoderTrainer(config, data, folder, device)
    fit(trainer)
    fit_standardization(trainer.model, data, device)
    panels = ("psnr", "seen_psnr"), ("motion", "motion_error", "flicker"), ("noise", "divergence")
    return export(trainer.run, trainer.model, "vae", trainer.evaluate(), ("loss", "reconstruction"), *panels)
