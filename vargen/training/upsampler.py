"""Train a `TokenUpsampler`: tokens of an image from the tokens of the same image at a low resolution.

Shape suffixes: B images, N tokens at the high resolution, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.models.heads.network import TokenUpsampler
from vargen.models.tokenizers.vq import VQModel
from vargen.training.config import Schedule, at_least, validate_fractions
from vargen.training.dataset import CaptionedImages, take_evenly
from vargen.training.image_tokens import hash_tokens, load_or_encode
from vargen.training.run import Trainer, export, fit

_EVALUATED = 256  # validation images


@dataclass(frozen=True)
class UpsamplerConfig:
    """How to train a `TokenUpsampler`. `model`: constructor arguments other than vocabulary and grids."""

    model: dict[str, Any] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)
    low_grid: int = 8
    seed: int = 0
    batch_size: int = 32
    token_noise: float = 0.1  # share of known tokens that are wrong, per image uniform from 0 to this: drafts contain errors
    ahead_weight: float = 0.25  # loss weight of tokens whose row above is unknown
    weight_decay: float = 0.01
    evaluate_every: int = 200
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "low_grid", "batch_size", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "weight_decay", "ahead_weight")
        validate_fractions(self, "token_noise")


def train_upsampler(
    config: UpsamplerConfig, data: CaptionedImages, tokenizer_folder: Path, folder: Path, device: torch.device
) -> dict[str, float]:
    """Train until `config.schedule.steps`, resuming the run in `folder`; saves the weights to `folder/upsampler`.

    Args:
        tokenizer_folder: a saved `VQModel`.

    Returns:
        Nats per token and top-1 accuracy on validation images, with all rows above known (`row_loss`, `row_accuracy`) and with
            none known (`image_loss`, `image_accuracy`).
    """
    trainer = UpsamplerTrainer(config, data, tokenizer_folder, folder, device)
    fit(trainer)
    return export(trainer.run, trainer.model, "upsampler", trainer.evaluate())


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
        self.low, self.high = (load_or_encode(folder, data.images, vqvae, each) for each in (config.low_grid, grid))
        self.training, validation = data.indices("train"), data.indices("validation")
        self.validation = np.array(take_evenly(validation.tolist(), _EVALUATED))
        rate, decay = config.schedule.learning_rate, config.weight_decay
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=decay)]

    def tokens(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the tokens of images at both resolutions, int64 `[B, r, c]` and `[B, N]`."""
        low, high = (torch.from_numpy(part[indices].astype(np.int64)).to(self.device) for part in (self.low, self.high))
        side = self.config.low_grid
        return low.unflatten(1, (side, side)), high

    def logits(self, low: Tensor, tokens: Tensor, known: Tensor) -> Tensor:
        """Return float32 logits `[B, N, V]`; only the `known` tokens are seen."""
        with self.amp():
            return self.model(self.model.features(low), tokens, known).float()

    def step(self, step: int) -> dict[str, Tensor]:
        """Run one training step; returns the loss in nats per token."""
        config = self.config
        rng = np.random.default_rng((config.seed, step))
        low, high = self.tokens(self.training[rng.integers(0, len(self.training), config.batch_size)])
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
            low, high = self.tokens(self.validation[start : start + self.config.batch_size])
            for name, known in (("row", torch.ones_like(high).bool()), ("image", torch.zeros_like(high).bool())):
                logits = self.logits(low, high, known)
                values.setdefault(f"{name}_loss", []).append(F.cross_entropy(logits.flatten(0, 1), high.flatten()))
                values.setdefault(f"{name}_accuracy", []).append((logits.argmax(-1) == high).float().mean())
        return {name: float(torch.stack(parts).mean()) for name, parts in values.items()}
