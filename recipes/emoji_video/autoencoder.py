"""Train a `CausalVideoVAE` on windows of clips.

Differences of successive frames are in the loss, and weigh as much as the frames: else each frame is as good as it can be by
itself, and edges that stand still boil. Noise on the latents keeps the decoder from resting on digits that a generator cannot
hit.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from recipes.emoji.pixels import reconstruction_loss
from recipes.emoji_var.tokenizer import place, wavelet_loss
from recipes.emoji_video.clips import VideoDataset, motion_weights
from recipes.emoji_video.config import AutoencoderConfig
from vargen.device import preferred_dtype
from vargen.files import atomic_file, atomic_merge
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.training.run import TrainingRun

logger = logging.getLogger("vargen")

_STRIP = 12  # frames of a clip on a sheet
_CLIPS = 8  # clips that are encoded at once
_MOVES = 2 / 255 * 2  # a pixel that changes by more, of the range [-1, 1], moves


def to_video(frames: np.ndarray, device: torch.device) -> Tensor:
    """uint8 `[B, F, Y, X, 3]` to float32 `[B, F, 3, Y, X]` in [-1, 1]."""
    return torch.from_numpy(np.ascontiguousarray(frames)).to(device).movedim(-1, 2).contiguous().float() / 127.5 - 1


class Batches:
    """Windows of training clips, by (seed, step) alone: shifted, mirrored, half of them zoomed, some at double speed."""

    def __init__(self, data: VideoDataset, recipe: AutoencoderConfig):
        self.data, self.recipe = data, recipe
        self.indices = data.indices("train")
        self.cumulative = np.cumsum(motion_weights([data.records[i] for i in self.indices]))

    def __call__(self, step: int) -> np.ndarray:
        """uint8 `[B, F, Y, X, 3]`."""
        recipe = self.recipe
        random = np.random.default_rng((recipe.seed, step))
        drawn = np.searchsorted(self.cumulative, random.random(recipe.batch_size), side="right")
        chosen = self.indices[drawn.clip(max=len(self.indices) - 1)]
        size = self.data.frames.shape[2]
        batch = np.full((recipe.batch_size, recipe.frames, size, size, 3), 255, dtype=np.uint8)
        for canvas, index in zip(batch, chosen, strict=True):
            every = int(random.integers(1, 3))
            window = self.data.window(int(index), int(random.integers(1 << 30)), recipe.frames * every)[::every]
            if random.random() < 0.5:
                side = round(size * random.uniform(*recipe.zoom))
                resized = [Image.fromarray(f).resize((side, side), Image.Resampling.LANCZOS) for f in window]
                window = np.stack([np.asarray(f) for f in resized])
            if random.random() < 0.5:
                window = window[:, :, ::-1]
            y, x = (size - window.shape[1]) // 2 + random.integers(-recipe.shift, recipe.shift + 1, 2)
            for to, frame in zip(canvas, window, strict=True):
                place(to, frame, int(y), int(x))
        return batch


@torch.no_grad()
def evaluate_video_vae(model: CausalVideoVAE, clips: np.ndarray, device: torch.device) -> dict[str, float]:
    """Figures over uint8 clips `[N, F, Y, X, 3]`, decoded from latents without noise.

    Returns `psnr` (mean over frames, dB); `motion`: mean change between frames, decoded to real, 1 at best; `motion_error`:
    mean error of those changes, to their real mean, 0 at best; `flicker`: mean change of pixels that stand still, to the real
    mean change of those that move, 0 at best.
    """
    model.eval()
    psnr: list[Tensor] = []
    sums = torch.zeros(6, dtype=torch.float64)
    for start in range(0, len(clips), _CLIPS):
        pixels = to_video(clips[start : start + _CLIPS], device)
        decoded = model.decode(model.encode(pixels)).clamp(-1, 1)
        psnr.append(-10 * ((decoded - pixels) / 2).square().mean((2, 3, 4)).clamp_min(1e-10).log10().flatten().cpu())
        real, made = pixels.diff(dim=1), decoded.diff(dim=1)
        moves = real.abs().amax(2, keepdim=True).expand_as(real) > _MOVES
        parts = [
            made.abs().sum(), real.abs().sum(), (made - real).abs().sum(),
            (made.abs() * ~moves).sum(), (~moves).sum(), moves.sum(),
        ]  # fmt: skip
        sums += torch.stack([part.double() for part in parts]).cpu()
    model.train()
    made_sum, real_sum, error, flicker, still, moving = sums.clamp_min(1e-9).tolist()
    figures = {"motion": made_sum / real_sum, "motion_error": error / real_sum}
    figures["flicker"] = (flicker / still) / (real_sum / moving)
    return {"psnr": torch.cat(psnr).mean().item(), **figures}


@torch.no_grad()
def draw_strips(model: CausalVideoVAE, clips: np.ndarray, device: torch.device, path: Path) -> None:
    """A PNG: for each clip a row of its frames as they are, and below it one of what the model makes of them."""
    model.eval()
    pixels = to_video(clips[:, :_STRIP], device)
    decoded = model.decode(model.encode(pixels)).clamp(-1, 1)
    model.train()
    rows = [row for pair in zip(pixels, decoded, strict=True) for row in pair]
    write_strips(rows, path)


def write_strips(rows: list[Tensor], path: Path) -> None:
    """Videos `[F, 3, Y, X]` in [-1, 1], each a row of a PNG."""
    sheet = torch.cat([torch.cat(list(row), dim=-1) for row in rows], dim=-2)
    values = ((sheet + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    with atomic_file(path) as temporary:
        Image.fromarray(values).save(temporary, format="PNG")


@torch.no_grad()
def fit_standardisation(model: CausalVideoVAE, data: VideoDataset, device: torch.device) -> None:
    """Set what makes latents of the training clips of mean 0 and variance 1 per channel."""
    model.eval()
    indices = data.indices("train")
    spread = slice(None, None, 4)  # successive frames tell little that is new
    count, total, squares = 0, torch.zeros(2), torch.zeros(2)
    for start in range(0, len(indices), _CLIPS):
        mean, _ = model.moments(to_video(data.frames[indices[start : start + _CLIPS], spread], device))
        channels = mean.double().movedim(2, 0).flatten(1).cpu()
        if not count:
            total, squares = torch.zeros(len(channels)).double(), torch.zeros(len(channels)).double()
        count += channels.shape[1]
        total, squares = total + channels.sum(1), squares + channels.square().sum(1)
    average = total / count
    model.latent_mean.copy_(average)
    model.latent_std.copy_((squares / count - average.square()).clamp_min(1e-8).sqrt())
    model.train()


class _Trainer:
    """The model, and what a step changes: a step is a function of this state and of its number."""

    def __init__(self, recipe: AutoencoderConfig, device: torch.device):
        torch.manual_seed(recipe.seed)
        self.recipe, self.device = recipe, device
        self.model = CausalVideoVAE(**recipe.model).to(device)
        rate = recipe.schedule.learning_rate
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, rate, (0.9, 0.99), weight_decay=recipe.weight_decay, fused=True)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def amp(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=preferred_dtype(self.device) == torch.bfloat16)

    def add_noise(self, mean: Tensor, log_variance: Tensor, step: int) -> Tensor:
        """A sample of the latents, on half of the clips with more noise, of a strength between none and the recipe's."""
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + step)
        noise = torch.randn(mean.shape, generator=generator).to(mean)
        strength = torch.rand(len(mean), generator=generator) * (torch.rand(len(mean), generator=generator) < 0.5)
        more = torch.randn(mean.shape, generator=generator).to(mean) * strength.to(mean)[:, None, None, None, None]
        size = mean.detach().std((0, 1, 3, 4))[:, None, None]
        return mean + (log_variance / 2).exp() * noise + self.recipe.latent_noise * size * more

    def step(self, step: int, clips: np.ndarray) -> dict[str, Any]:
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.schedule.learning_rate * recipe.schedule.factor(step)
        pixels = to_video(clips, self.device)
        with self.amp():
            mean, log_variance = self.model.moments(pixels)
            decoded, _ = self.model.decoder(self.add_noise(mean, log_variance, step))
        decoded = decoded.float()
        frames, real = decoded.flatten(0, 1), pixels.flatten(0, 1)
        reconstruction = reconstruction_loss(frames, real, recipe, self.model.spatial_stride)
        reconstruction = reconstruction + recipe.wavelet_weight * wavelet_loss(frames - real)
        motion = (decoded - pixels).diff(dim=1).abs().mean()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        loss = reconstruction + recipe.motion_weight * motion + recipe.kl_weight * divergence
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        told = {"loss": loss, "reconstruction": reconstruction, "difference": motion, "divergence": divergence}
        return {**{name: value.detach() for name, value in told.items()}, "noise": (log_variance.detach() / 2).exp().mean()}


def train_autoencoder(recipe: AutoencoderConfig, data: VideoDataset, folder: Path, device: torch.device) -> dict[str, float]:
    """Train until `recipe.schedule.steps`, resuming what is in `folder`; the model lands in `folder/vae`.

    At every evaluation, `folder/strips.png` shows held-out clips beside what the model makes of them.

    Returns the figures of the final model: `psnr` and so on of held-out clips, `seen_psnr` and so on of training clips; see
    `evaluate_video_vae`.

    Raises:
        ValueError: if the clips are not of the model's size, the folder holds another run, or training diverges.
    """
    trainer = _Trainer(recipe, device)
    model, size = trainer.model, data.frames.shape[2]
    if size != model.config.size:
        raise ValueError(f"size must be that of the data set's frames, {size}, got {model.config.size}")
    batches, steps = Batches(data, recipe), recipe.schedule.steps
    run = TrainingRun(folder, {"kind": "video-vae", "model": dict(recipe.model), "seed": recipe.seed}, steps)
    start = 0
    if state := run.resume(device):
        trainer.load(state)
        start = state["step"]
    held_out, train = data.indices("validation"), data.indices("train")
    some = slice(0, _STRIP)
    clips = {"": data.frames[held_out, some], "seen_": data.frames[train[:: max(1, len(train) // 24)], some]}
    shown = clips[""][:: max(1, len(held_out) // 6)][:6]

    def looked_at() -> dict[str, float]:
        draw_strips(model, shown, device, folder / "strips.png")
        found = {prefix: evaluate_video_vae(model, part, device) for prefix, part in clips.items()}
        return {prefix + name: value for prefix, part in found.items() for name, value in part.items()}

    for step in run.progress(start):
        figures = trainer.step(step, batches(step))
        done = step + 1
        if done % 10 == 0:
            run.log(done, **figures)
        if done % recipe.evaluate_every == 0 and done != steps:
            run.log(done, **looked_at())
        if done % recipe.checkpoint_every == 0 and done != steps:
            run.checkpoint(done, **trainer.state())
    fit_standardisation(model, data, device)
    found = looked_at()
    if not math.isfinite(found["psnr"]):
        raise ValueError(f"the run in {folder} has diverged: its pictures are not finite; lower the learning_rate")
    run.log(steps, **found)
    run.checkpoint(steps, **trainer.state())
    with atomic_merge(folder / "vae") as staged:
        model.eval().save_pretrained(staged)
    run.plot(("loss", "reconstruction"), ("psnr", "seen_psnr"), ("motion", "motion_error", "flicker"), ("noise", "divergence"))
    logger.info("video-vae %s: %s", folder, found)
    return found
