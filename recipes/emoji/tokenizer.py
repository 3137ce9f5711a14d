"""Train a `VQModel`: reconstruction plus a gradient term, and a codebook that stays in use by construction (see `Codebook`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.emoji.codebook import Codebook, flat_color_codes, quantize_flat_patches_together, reconstruction_loss
from recipes.emoji.dataset import EmojiDataset
from vargen.models.tokenizers.vq import VQModel
from vargen.training.augment import WeightedIndices
from vargen.training.config import Schedule, at_least
from vargen.training.dataset import to_pixels
from vargen.training.run import Trainer, export, fit


@dataclass(frozen=True)
class TokenizerConfig:
    """How to train a `VQModel`. `model` contains the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    batch_size: int = 32
    crop: int = 64  # pixels; crops of the content teach more per multiplication than the white background
    full_image_fraction: float = 0.15  # final part of training, on whole images, as used later
    autoencoder_steps: int = 200  # without quantization, before the codebook is fitted by k-means
    decoder_steps: int = 0  # last steps: encoder and codebook are frozen, and the decoder learns from whole images
    l1_weight: float = 1.0
    mse_weight: float = 2.0
    gradient_weight: float = 0.5
    color_weight: float = 2.0
    commitment_weight: float = 0.25
    flat_patch_weight: float = 10.0  # commitment of patches of one color, which share a code; 0: each has its own code
    codebook_decay: float = 0.98
    revive_every: int = 50  # steps between replacements of unused codes
    weight_decay: float = 0.01
    evaluate_every: int = 250
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "crop", "revive_every", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "autoencoder_steps", "decoder_steps", "full_image_fraction")
        validate_phases(self.schedule, self.autoencoder_steps, self.decoder_steps)


def validate_phases(schedule: Schedule, autoencoder_steps: int, decoder_steps: int) -> None:
    """Raise ValueError unless a tokenizer's run has steps for its codebook between its first and its last phase."""
    phases = autoencoder_steps + decoder_steps
    if schedule.steps <= phases:
        raise ValueError(
            f"steps must be at least {phases + 1}, got {schedule.steps}: autoencoder_steps ({autoencoder_steps}) without "
            f"quantization, then some for the codebook, then decoder_steps ({decoder_steps})"
        )


class CropBatches:
    """Training images as a function of (seed, step): of each sampled image, the crop with more content out of two."""

    def __init__(self, data: EmojiDataset, config: TokenizerConfig):
        self.images, self.config = data.images, config
        indices = data.indices("train")
        weights = np.array([data.records[i]["weight"] for i in indices], dtype=np.float64)
        self.sample = WeightedIndices(indices, weights / weights.sum())

    def __call__(self, step: int) -> np.ndarray:
        config = self.config
        rng = np.random.default_rng((config.seed, step))
        size, steps = self.images.shape[1], config.schedule.steps
        whole = step >= min(steps * (1 - config.full_image_fraction), steps - config.decoder_steps)
        crop = size if whole else min(config.crop, size)
        count = max(1, config.batch_size * config.crop**2 // size**2) if whole else config.batch_size
        batch = []
        for index in self.sample(rng.random(count)):
            image = self.images[index]
            corners = rng.integers(0, size - crop + 1, (2, 2))
            crops = [image[y : y + crop, x : x + crop] for y, x in corners]
            busiest = max(crops, key=lambda part: np.count_nonzero(part != 255))
            batch.append(busiest[:, ::-1] if rng.random() < 0.5 else busiest)
        return np.stack(batch)


@torch.no_grad()
def evaluate_tokenizer(model: VQModel, images: np.ndarray, device: torch.device, batch_size: int = 16) -> dict[str, float]:
    """Evaluate a tokenizer on uint8 images `[N, Y, X, 3]`.

    Returns:
        `psnr` (mean, dB), `codebook_use` (fraction of codes in use), their `perplexity`, and `plain_perplexity`, that of the
            codes of flat patches given their color: 1 if each color has one code.
    """
    model.eval()
    V = model.config.codebook_size
    psnr, used, flat = [], torch.zeros(V, device=device), []
    for start in range(0, len(images), batch_size):
        pixels = to_pixels(images[start : start + batch_size], device)
        output = model(pixels)
        error = (output.sample.float().clamp(-1, 1) - pixels) / 2
        psnr.append(-10 * error.square().mean((1, 2, 3)).clamp_min(1e-10).log10())
        used += torch.bincount(output.indices.flatten(), minlength=V).float()
        colors = flat_color_codes(pixels, model.downsampling)
        flat.append((colors * V + output.indices)[colors >= 0])

    def entropy(counts: Tensor) -> float:
        probs = counts / counts.sum().clamp_min(1)
        return -(probs * probs.clamp_min(1e-12).log()).sum().item()

    pairs, counts = torch.cat(flat).unique(return_counts=True)
    colors = torch.zeros(len(pairs), device=device)
    colors.index_add_(0, (pairs // V).unique(return_inverse=True)[1], counts.float())
    return {
        "psnr": torch.cat(psnr).mean().item(),
        "codebook_use": (used > 0).float().mean().item(),
        "perplexity": math.exp(entropy(used)),
        "plain_perplexity": math.exp(entropy(counts.float()) - entropy(colors)),
    }


def train_tokenizer(config: TokenizerConfig, data: EmojiDataset, folder: Path, device: torch.device) -> dict[str, float]:
    """Train until `config.schedule.steps`, resuming the run in `folder`; saves the model to `folder/vqvae`.

    The last `config.decoder_steps` do not change encoder and codebook, nor therefore the tokens of any image.

    Returns:
        The metrics of `evaluate_tokenizer` on the validation images.

    Raises:
        ValueError: if `folder` contains another run, or one that cannot be resumed; see `TrainingRun.load_checkpoint`.
    """
    trainer = TokenizerTrainer(config, data, folder, device)
    fit(trainer)
    metrics = evaluate_tokenizer(trainer.model, trainer.validation, device)
    return export(trainer.run, trainer.model, "vqvae", metrics, ("loss", "reconstruction"), ("psnr",), ("codebook_use",))


class TokenizerTrainer(Trainer):
    """Trains an image tokenizer.

    Attributes:
        recent: latents `[N, E]` of the last steps before there is a codebook, which is then fitted to them.
    """

    def __init__(self, config: TokenizerConfig, data: EmojiDataset, folder: Path, device: torch.device):
        torch.manual_seed(config.seed)
        super().__init__(config, VQModel(**config.model), folder, device, "tokenizer")
        trained = [p for name, p in self.model.named_parameters() if name != "quantize.embedding.weight"]
        rate, decay = config.schedule.learning_rate, config.weight_decay
        self.optimizers = [torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=decay)]
        self.codebook = Codebook(self.model, config.codebook_decay)
        self.batches = CropBatches(data, config)
        self.validation = data.images[data.indices("validation")]
        self.recent: list[Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        codebook = {"sums": self.codebook.sums, "counts": self.codebook.counts, "recent": self.recent}
        return {**super().state_dict(), **codebook}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.codebook.sums.copy_(state["sums"])
        self.codebook.counts.copy_(state["counts"])
        self.recent = state.get("recent", [])

    def evaluate(self) -> dict[str, float]:
        sample = self.validation[:: max(1, len(self.validation) // 128)]
        return evaluate_tokenizer(self.model, sample, self.device)

    def step(self, step: int) -> dict[str, Any]:
        """Run one training step; returns its losses and the number of codes that were replaced."""
        config, model = self.config, self.model
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        pixels = to_pixels(self.batches(step), self.device)
        frozen = step >= config.schedule.steps - config.decoder_steps
        with self.amp(), torch.set_grad_enabled(not frozen):
            z_BERG = model.encode_latents(pixels)
        z_BERG = z_BERG.float()
        z_NE = z_BERG.detach().movedim(1, -1).flatten(0, 2)
        if step == config.autoencoder_steps:
            self.codebook.fit(torch.cat([*self.recent, z_NE])[-65536:], generator)
        if step < config.autoencoder_steps:
            self.recent = [*self.recent[-40:], z_NE]
            indices, codes, commitment = None, z_BERG, z_BERG.new_zeros(())
        else:
            self.recent = []
            indices, codes, commitment = self.quantize_latents(z_BERG, pixels, frozen)
        with self.amp():
            decoded = model.decode_latents(z_BERG + (codes - z_BERG).detach())  # straight-through gradient
        reconstruction = reconstruction_loss(decoded.float(), pixels, config, model.downsampling)
        loss = reconstruction + config.commitment_weight * commitment
        self.update(step, loss)
        revived = 0
        if indices is not None and not frozen:
            self.codebook.update(z_NE, indices.flatten())
            # The decoder could not adapt to late replacements: none while the learning rate decays.
            if (step + 1) % config.revive_every == 0 and config.schedule.factor(step) >= 1:
                revived = self.codebook.replace_dead_codes(z_NE, generator)
        losses = {"loss": loss.detach(), "reconstruction": reconstruction.detach(), "commitment": commitment.detach()}
        return {**losses, "revived": revived}

    def quantize_latents(self, z_BERG: Tensor, pixels: Tensor, frozen: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return indices `[B, R, G]`, their codes `[B, E, R, G]`, and the commitment loss.

        Flat patches of the same color share a code, until the codebook is frozen.
        """
        config, model = self.config, self.model
        together = config.flat_patch_weight > 0 and not frozen
        colors = flat_color_codes(pixels, model.downsampling) if together else torch.full_like(z_BERG[:, 0], -1).long()
        indices = quantize_flat_patches_together(model, z_BERG, colors)
        codes = model.quantize.lookup(indices).detach()
        weight = torch.where(colors >= 0, config.flat_patch_weight, 1.0)
        return indices, codes, ((z_BERG - codes).square().sum(1) * weight).mean()
