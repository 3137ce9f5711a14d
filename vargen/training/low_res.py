"""Train drafters from a low resolution: a `LlamaGenTransformer` on small images, and a `TokenUpsampler`.

Shape suffixes: B images, N tokens at the high resolution, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.models.heads.upsampler import TokenUpsampler
from vargen.models.tokenizers.vq import VQModel
from vargen.training.augment import AugmentationConfig, SamplingWeights
from vargen.training.config import Schedule, at_least
from vargen.training.dataset import CaptionedImages
from vargen.training.next_token import ImageMetrics, NextTokenConfig, train_next_token
from vargen.training.run import Trainer, export, fit
from vargen.training.token_cache import BackgroundTokenizer, hash_tokens
from vargen.training.variants import AugmentedBatches, EncodedVariants

_AT_ONCE = 512


def downscale(pixels_BCYX: Tensor, factor: int) -> Tensor:
    """Average each block of `factor` x `factor` pixels."""
    return F.avg_pool2d(pixels_BCYX, factor)


def downscale_dataset(data: CaptionedImages, config: NextTokenConfig, downsampling: int) -> CaptionedImages:
    """Downscale the images to the grid of the config, for a tokenizer with one token per `downsampling` pixels.

    Raises:
        ValueError: if the grid's side in pixels does not divide the side of the images.
    """
    side, size = data.images.shape[1], config.model["grid_size"] * downsampling
    if size > side or side % size:
        raise ValueError(
            f"grid_size {config.model['grid_size']} is {size} pixels, which must divide the {side} pixels of the images"
        )
    if size == side:
        return data
    small = np.empty((len(data.images), size, size, 3), np.uint8)
    for start in range(0, len(small), _AT_ONCE):
        part = torch.from_numpy(np.asarray(data.images[start : start + _AT_ONCE])).movedim(-1, 1).float()
        small[start : start + _AT_ONCE] = downscale(part, side // size).round().to(torch.uint8).movedim(1, -1).numpy()
    return replace(data, images=small)


class TwoResolutionTokens(EncodedVariants):
    """Image tokens at both resolutions, `[images, variants, n + N]`, stored plus 1: zero means not computed yet."""

    fast = False

    def __init__(
        self, folder: Path, images: np.ndarray, vqvae: VQModel, config: AugmentationConfig, device: torch.device, factor: int
    ):
        self.vqvae, self.factor = vqvae.eval(), factor
        self.tokenize = BackgroundTokenizer(vqvae)
        side = images.shape[1] // vqvae.downsampling
        self.low = side // factor
        dtype = np.uint16 if vqvae.config.codebook_size < 2**16 - 1 else np.uint32
        count = self.low**2 + side**2
        super().__init__(folder, f"pairs-{factor}", hash_tokens(vqvae), images, config, device, (count,), dtype)

    def encode(self, pixels_BCYX: Tensor) -> np.ndarray:
        levels = ((downscale(pixels_BCYX, self.factor) + 1) * 127.5).round() / 127.5 - 1  # rounded like stored images
        parts = self.tokenize(levels), self.tokenize(pixels_BCYX)
        return torch.cat(parts, dim=1).cpu().numpy() + 1

    def __call__(self, indices: Sequence[int], variants: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the tokens at both resolutions, int64 `[B, r, c]` and `[B, N]`."""
        rows = torch.from_numpy(self.load(indices, variants).astype(np.int64) - 1).to(self.device)
        low, high = rows.split([self.low**2, rows.shape[1] - self.low**2], dim=1)
        return low.unflatten(1, (self.low, self.low)), high


def train_low_res(
    config: NextTokenConfig,
    data: CaptionedImages,
    tokenizer_folder: Path,
    text_encoder_folder: Path,
    folder: Path,
    device: torch.device,
    init_folder: Path | None = None,
    image_metrics: ImageMetrics | None = None,
) -> dict[str, float]:
    """Run `train_next_token` on images at the resolution of the config's grid, with the same arguments and results."""
    downsampling = VQModel.from_pretrained(tokenizer_folder).downsampling
    small = downscale_dataset(data, config, downsampling)
    return train_next_token(config, small, tokenizer_folder, text_encoder_folder, folder, device, init_folder, image_metrics)


@dataclass(frozen=True)
class UpsamplerConfig:
    """How to train a `TokenUpsampler`. `model`: constructor arguments other than vocabulary and grids."""

    model: dict[str, Any] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)
    sampling_weights: SamplingWeights = field(default_factory=SamplingWeights)
    low_grid: int = 8
    seed: int = 0
    batch_size: int = 32
    caption_dropout: float = 0.0  # unused: the upsampler has no caption
    shift_pixels: int = 8
    shift_variants: int = 4
    flip_probability: float = 0.5
    recolor_probability: float = 0.15
    token_noise: float = 0.1  # share of known tokens that are wrong, per image uniform from 0 to this: drafts contain errors
    ahead_weight: float = 0.25  # loss weight of tokens whose row above is unknown
    weight_decay: float = 0.01
    evaluate_every: int = 200
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "low_grid", "batch_size", "evaluate_every", "checkpoint_every")
        at_least(
            self, 0, "shift_pixels", "shift_variants", "flip_probability", "recolor_probability", "token_noise", "weight_decay"
        )
        at_least(self, 0, "ahead_weight")


def train_upsampler(
    config: UpsamplerConfig, data: CaptionedImages, tokenizer_folder: Path, folder: Path, device: torch.device
) -> dict[str, float]:
    """Train until `config.schedule.steps`, resuming the run in `folder`; saves the weights to `folder/upsampler`.

    Args:
        tokenizer_folder: a saved `VQModel`.

    Returns:
        Nats per token and top-1 accuracy on validation images, with all rows above known (`row_loss`, `row_accuracy`) and with
            none known (`image_loss`, `image_accuracy`).

    Raises:
        ValueError: for images whose grid is not a multiple of the low-resolution one, a run in `folder` that is damaged or has
            another config, or a run that diverged.
    """
    trainer = UpsamplerTrainer(config, data, tokenizer_folder, folder, device)
    fit(trainer)
    panels = ("loss", "row_loss", "image_loss"), ("row_accuracy", "image_accuracy")
    return export(trainer.run, trainer.model, "upsampler", trainer.evaluate(), *panels)


class UpsamplerTrainer(Trainer):
    """Trains an upsampler to predict the tokens of a row from the low resolution and the rows above.

    Where the rows above are not generated yet, it predicts from the low resolution alone.
    """

    def __init__(
        self, config: UpsamplerConfig, data: CaptionedImages, tokenizer_folder: Path, folder: Path, device: torch.device
    ):
        torch.manual_seed(config.seed)
        vqvae = VQModel.from_pretrained(tokenizer_folder).to(device).float().eval().requires_grad_(False)
        grid, vocab = data.images.shape[1] // vqvae.downsampling, vqvae.config.codebook_size
        model = TokenUpsampler(vocab, config.low_grid, grid, **config.model, codes=vqvae.quantize.digest())
        identity = {"low_grid": config.low_grid, "tokenizer": hash_tokens(vqvae)}
        super().__init__(config, model, folder, device, "upsampler", **identity)
        self.store = TwoResolutionTokens(folder, data.images, vqvae, config, device, model.factor)
        self.batches = AugmentedBatches(data, self.store, config)
        validation = data.indices("validation")
        self.validation = validation[:: max(1, len(validation) // 256)].tolist()
        rate, decay = config.schedule.learning_rate, config.weight_decay
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=decay)]

    def logits(self, low: Tensor, tokens: Tensor, known: Tensor) -> Tensor:
        """Return float32 logits `[B, N, V]`; only the `known` tokens are seen."""
        with self.amp():
            return self.model(self.model.features(low), tokens, known).float()

    def step(self, step: int) -> dict[str, Tensor]:
        """Run one training step; returns the loss in nats per token."""
        config = self.config
        indices, variants, _, _ = self.batches(step, config.batch_size)
        low, high = self.store(indices, variants)
        rng = np.random.default_rng((config.seed, step, 1))
        (B, N), columns = high.shape, self.model.config.grid_size
        length = torch.from_numpy(rng.integers(1, N + 1, B)).to(self.device)
        place = torch.arange(N, device=self.device)
        known = place < length[:, None]
        noise = torch.from_numpy(rng.random((B, N)) < config.token_noise * rng.random((B, 1))).to(self.device)
        seen = torch.where(noise, high.roll(1, dims=0), high)
        weight = torch.where(place < length[:, None] + columns, 1.0, config.ahead_weight)
        losses = F.cross_entropy(self.logits(low, seen, known).movedim(-1, 1), high, reduction="none")
        loss = (losses * weight).sum() / weight.sum()
        self.update(step, loss)
        return {"loss": loss.detach()}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the metrics on validation images; see `train_upsampler`."""
        self.model.eval()
        values: dict[str, list[Tensor]] = {}
        for start in range(0, len(self.validation), self.config.batch_size):
            part = self.validation[start : start + self.config.batch_size]
            low, high = self.store(part, [0] * len(part))
            for name, known in (("row", torch.ones_like(high).bool()), ("image", torch.zeros_like(high).bool())):
                logits = self.logits(low, high, known)
                values.setdefault(f"{name}_loss", []).append(F.cross_entropy(logits.flatten(0, 1), high.flatten()))
                values.setdefault(f"{name}_accuracy", []).append((logits.argmax(-1) == high).float().mean())
        return {name: float(torch.stack(parts).mean()) for name, parts in values.items()}
