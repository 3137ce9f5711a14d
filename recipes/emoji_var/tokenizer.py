"""Train a `MultiScaleVQModel` on whole images.

VAR's authors have not published training code; this follows their section 3.2 for the sum over scales, and results of smaller
runs for the rest (see `MultiScaleTokenizerConfig`). It trains on whole images, because in crops the scales would correspond to
other object sizes.

Flat patches of one color do not share a code here, as they do for `VQModel`: what a scale adds depends on what the coarser
scales left, which a next-scale generator receives as its input, so there is nothing to guess.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from recipes.emoji.codebook import reconstruction_loss
from recipes.emoji.dataset import EmojiDataset
from recipes.emoji.tokenizer import validate_phases
from recipes.emoji_var.codebook import ScaleCodebook, TokenPerturbation, quantize_scales
from recipes.emoji_var.tokenizer_evaluation import evaluate_multi_scale, save_reconstructions
from vargen.models.component_files import validate_network_files
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.training.augment import SamplingWeights, WeightedIndices
from vargen.training.config import Schedule, at_least, validate_fractions
from vargen.training.dataset import to_pixels
from vargen.training.next_token import validate_same_shape
from vargen.training.run import Trainer, export, fit
from vargen.weight_files import weights_digest

_RECENT = 16  # batches of latents that the codebook is fitted to


@dataclass(frozen=True)
class MultiScaleTokenizerConfig:
    """How to train a `MultiScaleVQModel`. `model` contains the keyword arguments of its constructor.

    There are three phases: `autoencoder_steps` without quantization, then with it, then `decoder_steps` of the decoder alone.
    If `autoencoder_steps` is 0, all steps train the decoder of an existing tokenizer (`init_folder`).
    """

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    sampling_weights: SamplingWeights = field(default_factory=SamplingWeights)
    seed: int = 0
    batch_size: int = 64
    shift: int = 8  # pixels, in each direction
    zoom: list[Any] = field(default_factory=lambda: [0.8, 1.1])  # of half of the images, on white
    autoencoder_steps: int = 300
    decoder_steps: int = 0  # last steps: encoder, codes and phi are frozen, and with them the tokens
    l1_weight: float = 1.0
    mse_weight: float = 2.0
    gradient_weight: float = 0.5
    color_weight: float = 2.0
    wavelet_weight: float = 0.5
    commitment_weight: float = 0.25  # mean over the scales
    truncated_fraction: float = 0.1  # of the images, decoded from their first scales only, so that previews are meaningful
    perturbed_fraction: float = 0.5  # of the images in the decoder's phase, because generated tokens contain errors
    perturbed_tokens: float = 0.1  # fraction of these images' tokens, replaced by one of the nearest codes
    near_codes: int = 100
    codebook_decay: float = 0.99
    revive_every: int = 50  # steps between replacements of unused codes
    weight_decay: float = 0.01
    evaluate_every: int = 250
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "revive_every", "evaluate_every", "checkpoint_every", "near_codes")
        at_least(self, 0, "autoencoder_steps", "decoder_steps", "shift")
        validate_fractions(self, "truncated_fraction", "perturbed_fraction", "perturbed_tokens")
        validate_zoom(self.zoom)
        if self.autoencoder_steps:
            validate_phases(self.schedule, self.autoencoder_steps, self.decoder_steps)

    def is_frozen(self, step: int) -> bool:
        """Whether only the decoder learns at `step`."""
        return self.autoencoder_steps == 0 or step >= self.schedule.steps - self.decoder_steps


def validate_zoom(zoom: list[Any]) -> None:
    """Raise ValueError unless `zoom` is a pair of a minimum and a maximum factor."""
    if len(zoom) != 2 or not 0 < zoom[0] <= zoom[1]:
        raise ValueError(f"zoom must be two factors above 0, the smaller one first, got {zoom}")


class WholeImageBatches:
    """Training images as a function of (seed, step): shifted, half of them mirrored, half of them zoomed, on white."""

    def __init__(self, data: EmojiDataset, config: MultiScaleTokenizerConfig):
        self.images, self.config = data.images, config
        indices = data.indices("train")
        self.sample = WeightedIndices(indices, config.sampling_weights.weights([data.records[i] for i in indices]))

    def __call__(self, step: int) -> np.ndarray:
        config = self.config
        rng = np.random.default_rng((config.seed, step))
        indices = self.sample(rng.random(config.batch_size))
        size = self.images.shape[1]
        batch = np.full((config.batch_size, size, size, 3), 255, dtype=np.uint8)
        for canvas, index in zip(batch, indices, strict=True):
            image = self.images[index]
            if rng.random() < 0.5:
                side = round(size * rng.uniform(*config.zoom))
                image = np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS))
            if rng.random() < 0.5:
                image = image[:, ::-1]
            y, x = (size - len(image)) // 2 + rng.integers(-config.shift, config.shift + 1, 2)
            paste(canvas, image, int(y), int(x))
        return batch


def paste(canvas: np.ndarray, image: np.ndarray, y: int, x: int) -> None:
    """Put the corner of an image at (y, x) of the canvas; what is outside is cut off."""
    (height, width), (rows, columns) = canvas.shape[:2], image.shape[:2]
    top, left, bottom, right = max(y, 0), max(x, 0), min(y + rows, height), min(x + columns, width)
    if top < bottom and left < right:
        canvas[top:bottom, left:right] = image[top - y : bottom - y, left - x : right - x]


def wavelet_loss(error: Tensor, levels: int = 2) -> Tensor:
    """Return the L1 norm of the Haar coefficients of an error `[B, C, Y, X]` at two scales, without the mean."""
    loss = error.new_zeros(())
    for _ in range(levels):
        a, b = error[..., ::2, :] + error[..., 1::2, :], error[..., ::2, :] - error[..., 1::2, :]
        parts = [a[..., ::2] - a[..., 1::2], b[..., ::2] + b[..., 1::2], b[..., ::2] - b[..., 1::2]]
        loss = loss + sum(part.abs().mean() for part in parts) / 2
        error = (a[..., ::2] + a[..., 1::2]) / 4
    return loss / levels


def _initial_model(config: MultiScaleTokenizerConfig, init_folder: Path | None) -> tuple[MultiScaleVQModel, dict[str, str]]:
    """Return the model to train, and the digest of the weights that it starts from as `init`, if there are some.

    Raises:
        ValueError: if there are trained weights to start from, but not all steps are the decoder's, or the reverse; or if the
            weights are damaged or differ in shape from the config.
    """
    if (config.autoencoder_steps == 0) != (init_folder is not None):
        raise ValueError(
            "init must be given if autoencoder_steps is 0, when only the decoder learns, and only then; got "
            f"autoencoder_steps = {config.autoencoder_steps} and init {None if init_folder is None else str(init_folder)!r}"
        )
    options = {"scale_gains": True, **config.model}
    model = MultiScaleVQModel(**options)
    if init_folder is None:
        return model, {}
    validate_network_files(init_folder, MultiScaleVQModel)
    start = MultiScaleVQModel.from_pretrained(init_folder)
    validate_same_shape(init_folder, start, model, list(options))
    model.load_state_dict(start.state_dict())
    return model, {"init": weights_digest(start)}


class MultiScaleTokenizerTrainer(Trainer):
    """Trains a multi-scale tokenizer.

    Attributes:
        recent: latents of the last steps before there is a codebook, which is then fitted to them.
    """

    def __init__(
        self,
        config: MultiScaleTokenizerConfig,
        data: EmojiDataset,
        folder: Path,
        device: torch.device,
        init_folder: Path | None = None,
    ):
        torch.manual_seed(config.seed)
        model, identity = _initial_model(config, init_folder)
        if (size := data.images.shape[1]) != model.image_size:
            raise ValueError(f"scales {model.scales} are for images of {model.image_size} pixels, got images of {size}")
        super().__init__(config, model, folder, device, "var-tokenizer", **identity)
        model.quantize.embedding.weight.requires_grad_(False)  # the codebook follows the latents instead
        trained = [p for p in model.parameters() if p.requires_grad]
        rate, decay = config.schedule.learning_rate, config.weight_decay
        self.optimizers = [torch.optim.AdamW(trained, rate, (0.9, 0.99), weight_decay=decay, fused=True)]
        self.codebook = ScaleCodebook(model, config.codebook_decay)
        self.batches = WholeImageBatches(data, config)
        self.validation = data.images[data.indices("validation")]
        self.sample = self.validation[:: max(1, len(self.validation) // 128)]
        self.recent: list[Tensor] = []
        self.perturbation: TokenPerturbation | None = None

    def state_dict(self) -> dict[str, Any]:
        codebook = {"sums": self.codebook.sums, "counts": self.codebook.counts, "recent": self.recent}
        return {**super().state_dict(), **codebook}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.codebook.sums.copy_(state["sums"])
        self.codebook.counts.copy_(state["counts"])
        self.recent = state["recent"]

    def evaluate(self) -> dict[str, float]:
        self.save_reconstructions()
        return evaluate_multi_scale(self.model, self.sample, self.device)

    def save_reconstructions(self) -> None:
        shown = self.sample[:: max(1, len(self.sample) // 12)][:12]
        save_reconstructions(self.model, shown, self.device, self.folder / "reconstructions.png")

    def step(self, step: int) -> dict[str, Any]:
        config = self.config
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        pixels = to_pixels(self.batches(step), self.device)
        latents, loss, metrics = self.latents(pixels, step, generator)
        with self.amp():
            decoded = self.model.decode_unclamped(latents)
        decoded = decoded.float()
        reconstruction = reconstruction_loss(decoded, pixels, config, self.model.downsampling)
        reconstruction = reconstruction + config.wavelet_weight * wavelet_loss(decoded - pixels)
        self.update(step, reconstruction + loss)
        return {"loss": (reconstruction + loss).detach(), "reconstruction": reconstruction.detach(), **metrics}

    def latents(self, pixels: Tensor, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return the latents to decode, the loss on latents, and metrics for the log."""
        config, model = self.config, self.model
        frozen = config.is_frozen(step)
        with self.amp(), torch.set_grad_enabled(not frozen):
            f = model.encode_latent(pixels)
        f = f.float()
        if step < config.autoencoder_steps:
            self.recent = [*self.recent[1 - _RECENT :], f.detach()]
            return f, f.new_zeros(()), {}
        if self.recent:
            self.codebook.fit_scales(torch.cat([*self.recent, f.detach()]), generator)
            self.recent = []
        if frozen:
            return self.perturb(f, generator), f.new_zeros(()), {}
        quantized = quantize_scales(model, f)
        errors = quantized.errors(f.detach())
        # Equal in value to the mean of `errors`, but with a gradient for the encoder where `errors` has one for phi.
        commitment = torch.stack([F.mse_loss(f, f_hat.detach()) for f_hat in quantized.sums]).mean()
        f_hat = self.truncate_scales(quantized.sums, generator)
        self.codebook.ema_update(quantized)
        metrics: dict[str, Any] = {"commitment": commitment.detach(), "left": errors[-1].detach()}
        # The decoder could not adapt to late replacements: none while the learning rate decays.
        if (step + 1) % config.revive_every == 0 and config.schedule.factor(step) >= 1:
            metrics["revived"] = self.codebook.replace_dead_codes_by_scale(quantized, generator)
        # Straight-through gradient to the encoder; phi gets its own gradient.
        return f + f_hat - f.detach(), config.commitment_weight * commitment + errors.mean(), metrics

    @torch.no_grad()
    def perturb(self, f: Tensor, generator: torch.Generator) -> Tensor:
        """Quantize latents, with some tokens replaced by similar ones."""
        config = self.config
        self.perturbation = self.perturbation or TokenPerturbation(self.model, config.near_codes)
        tokens = self.model.quantize_latent(f)
        tokens = self.perturbation(tokens, config.perturbed_fraction, config.perturbed_tokens, generator)
        added = [self.model.quantize.lookup(of_scale, k) for k, of_scale in enumerate(tokens)]
        return self.truncate_scales(list(accumulate(added)), generator)

    def truncate_scales(self, sums: list[Tensor], generator: torch.Generator) -> Tensor:
        """Return each image's sum over all scales or, for a fraction of the images, over a random number of first scales."""
        B, S = len(sums[0]), len(sums)
        truncated = torch.rand(B, generator=generator) < self.config.truncated_fraction
        last = torch.where(truncated, torch.randint(S, (B,), generator=generator), S - 1).to(self.device)
        return torch.stack(sums, 1)[torch.arange(B, device=self.device), last]


def train_multi_scale_tokenizer(
    config: MultiScaleTokenizerConfig,
    data: EmojiDataset,
    folder: Path,
    device: torch.device,
    init_folder: Path | None = None,
) -> dict[str, float]:
    """Train until `config.schedule.steps`, resuming the run in `folder`; saves the model to `folder/vqvae`.

    Each evaluation saves `folder/reconstructions.png`.

    Args:
        init_folder: a saved tokenizer whose decoder is trained further; its tokens do not change.

    Returns:
        The metrics of `evaluate_multi_scale` on the validation images.

    Raises:
        ValueError: if the images do not have the model's size, `init_folder` does not suit the config, the folder contains
            another run, or the run diverged.
    """
    trainer = MultiScaleTokenizerTrainer(config, data, folder, device, init_folder)
    fit(trainer)
    trainer.save_reconstructions()
    model = trainer.model
    metrics = evaluate_multi_scale(model, trainer.validation, device)
    use = tuple(f"use_{k}" for k in range(len(model.scales)))
    return export(trainer.run, model, "vqvae", metrics, ("loss", "reconstruction"), ("psnr", "psnr_0", "psnr_2"), use)
