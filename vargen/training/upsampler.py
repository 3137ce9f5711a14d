"""Train a `TokenUpsampler` on images encoded by one tokenizer at two resolutions.

It learns to predict the tokens of a row from the low resolution and the rows above, and from the low resolution alone where the
rows above are not generated yet.

Shape suffixes: B images, N tokens at the high resolution, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vargen.device import preferred_dtype
from vargen.files import atomic_merge
from vargen.models.heads.upsampler import TokenUpsampler
from vargen.models.tokenizers.vq import VQModel
from vargen.training.blanks import tokens_digest
from vargen.training.config import Schedule, at_least
from vargen.training.dataset import CaptionedImages
from vargen.training.focus import Focus
from vargen.training.low_res import TokenPairs
from vargen.training.run import TrainingRun
from vargen.training.variants import Looks

logger = logging.getLogger("vargen")


@dataclass(frozen=True)
class UpsamplerConfig:
    """How to train a `TokenUpsampler`. `model`: constructor arguments other than vocabulary and grids."""

    model: dict[str, Any] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)
    focus: Focus = field(default_factory=Focus)
    low_grid: int = 8
    seed: int = 0
    batch_size: int = 32
    caption_dropout: float = 0.0  # unused: the upsampler has no caption
    shift_pixels: int = 8
    shift_variants: int = 4
    mirrored: float = 0.5
    recoloured: float = 0.15
    token_noise: float = 0.1  # share of known tokens that are wrong, per image uniform from 0 to this: drafts contain errors
    ahead_weight: float = 0.25  # loss weight of tokens whose row above is unknown
    weight_decay: float = 0.01
    evaluate_every: int = 200
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "low_grid", "batch_size", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "shift_pixels", "shift_variants", "mirrored", "recoloured", "token_noise", "weight_decay")
        at_least(self, 0, "ahead_weight")


def train_upsampler(
    recipe: UpsamplerConfig, data: CaptionedImages, tokenizer_folder: Path, folder: Path, device: torch.device
) -> dict[str, float]:
    """Train until `recipe.schedule.steps`, resuming the run in `folder`; saves the weights to `folder/upsampler`.

    Args:
        tokenizer_folder: a saved `VQModel`.

    Returns:
        Held-out nats per token and top-1 accuracy, with all rows above known (`row`) and with none known (`picture`).

    Raises:
        ValueError: for images whose grid is not a multiple of the low-resolution one, a run in `folder` that is damaged or has
            another config, or a run that diverged.
    """
    trainer = _Trainer(recipe, data, tokenizer_folder, folder, device)
    run, steps = trainer.run, recipe.schedule.steps
    for step in run.progress(trainer.resumed()):
        loss = trainer.step(step)
        done = step + 1
        if done % 10 == 0:
            run.log(done, loss=loss)
        if done % recipe.evaluate_every == 0 and done != steps:
            run.log(done, **trainer.figures())
        if done % recipe.checkpoint_every == 0 or done == steps:
            run.checkpoint(done, model=trainer.model.state_dict(), optimizer=trainer.stepper.state_dict())
    figures = trainer.figures()
    if not all(math.isfinite(value) for value in figures.values()):
        raise ValueError(f"the run in {folder} diverged ({figures}): lower the learning rate")
    run.log(steps, **figures, **{f"final_{name}": value for name, value in figures.items()})
    with atomic_merge(folder / "upsampler") as staged:
        trainer.model.eval().save_pretrained(staged)
    run.plot(("loss", "row_loss", "picture_loss"), ("row_accuracy", "picture_accuracy"))
    logger.info("up-sampler %s: %s", folder, figures)
    return figures


class _Trainer:
    """An upsampler and the state that its training changes."""

    def __init__(
        self, recipe: UpsamplerConfig, data: CaptionedImages, tokenizer_folder: Path, folder: Path, device: torch.device
    ):
        torch.manual_seed(recipe.seed)
        self.recipe, self.device = recipe, device
        vqvae = VQModel.from_pretrained(tokenizer_folder).to(device).float().eval().requires_grad_(False)
        grid, vocab = data.images.shape[1] // vqvae.downsampling, vqvae.config.codebook_size
        self.model = TokenUpsampler(vocab, recipe.low_grid, grid, **recipe.model, codes=vqvae.quantize.digest()).to(device)
        identity = {"kind": "upsampler", "model": recipe.model, "low_grid": recipe.low_grid, "seed": recipe.seed}
        self.run = TrainingRun(folder, identity | {"tokenizer": tokens_digest(vqvae)}, recipe.schedule.steps)
        self.state = self.run.resume(device, ("model", "optimizer"))
        self.store = TokenPairs(folder, data.images, vqvae, recipe, device, self.model.factor)
        self.looks = Looks(data, self.store, recipe)
        self.held_out = data.indices("validation")[:: max(1, len(data.indices("validation")) // 256)].tolist()
        rate, decay = recipe.schedule.learning_rate, recipe.weight_decay
        self.stepper = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=decay)
        self.dtype = preferred_dtype(device)

    def resumed(self) -> int:
        """Restore the checkpoint in the folder, if any; returns the next step."""
        if not self.state:
            return 0
        self.model.load_state_dict(self.state["model"])
        self.stepper.load_state_dict(self.state["optimizer"])
        return self.state["step"]

    def logits(self, low: Tensor, tokens: Tensor, known: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return self.model(self.model.features(low), tokens, known).float()

    def step(self, step: int) -> Tensor:
        """Run one training step; returns the loss in nats per token."""
        recipe = self.recipe
        for group in self.stepper.param_groups:
            group["lr"] = recipe.schedule.learning_rate * recipe.schedule.factor(step)
        self.model.train()
        chosen, variants, _, _ = self.looks(step, recipe.batch_size)
        low, high = self.store(chosen, variants)
        draw = np.random.default_rng((recipe.seed, step, 1))
        (B, N), columns = high.shape, self.model.config.grid_size
        length = torch.from_numpy(draw.integers(1, N + 1, B)).to(self.device)
        place = torch.arange(N, device=self.device)
        known = place < length[:, None]
        noise = torch.from_numpy(draw.random((B, N)) < recipe.token_noise * draw.random((B, 1))).to(self.device)
        seen = torch.where(noise, high.roll(1, dims=0), high)
        weight = torch.where(place < length[:, None] + columns, 1.0, recipe.ahead_weight)
        losses = F.cross_entropy(self.logits(low, seen, known).movedim(-1, 1), high, reduction="none")
        loss = (losses * weight).sum() / weight.sum()
        self.stepper.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.stepper.step()
        return loss.detach()

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        """Return the metrics on held-out concepts; see `train_upsampler`."""
        self.model.eval()
        found: dict[str, list[Tensor]] = {}
        for start in range(0, len(self.held_out), self.recipe.batch_size):
            part = self.held_out[start : start + self.recipe.batch_size]
            low, high = self.store(part, [0] * len(part))
            for name, known in (("row", torch.ones_like(high).bool()), ("picture", torch.zeros_like(high).bool())):
                logits = self.logits(low, high, known)
                found.setdefault(f"{name}_loss", []).append(F.cross_entropy(logits.flatten(0, 1), high.flatten()))
                found.setdefault(f"{name}_accuracy", []).append((logits.argmax(-1) == high).float().mean())
        return {name: float(torch.stack(values).mean()) for name, values in found.items()}
