"""Train a `VQModel`: reconstruction plus a gradient term, and a codebook kept in use by construction (see `Codebook`)."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.emoji.codebook import Codebook, quantise_together
from recipes.emoji.config import TokenizerConfig
from recipes.emoji.dataset import EmojiDataset
from recipes.emoji.pixels import plain_colours, reconstruction_loss
from vargen.device import preferred_dtype
from vargen.files import atomic_merge
from vargen.models.tokenizers.vq import VQModel
from vargen.training.dataset import to_pixels
from vargen.training.run import TrainingRun

logger = logging.getLogger("vargen")


class Batches:
    """Pictures of the training split, by (seed, step) alone: the busier of two random crops of a weighted draw."""

    def __init__(self, data: EmojiDataset, recipe: TokenizerConfig):
        self.images = data.images
        self.indices = data.indices("train")
        weights = np.array([data.records[i]["weight"] for i in self.indices], dtype=np.float64)
        self.cumulative = np.cumsum(weights / weights.sum())
        self.recipe = recipe

    def __call__(self, step: int) -> np.ndarray:
        recipe = self.recipe
        random = np.random.default_rng((recipe.seed, step))
        size = self.images.shape[1]
        steps = recipe.schedule.steps
        whole = step >= min(steps * (1 - recipe.full_fraction), steps - recipe.decoder_steps)
        crop = size if whole else min(recipe.crop, size)
        count = max(1, recipe.batch_size * recipe.crop**2 // size**2) if whole else recipe.batch_size
        chosen = self.indices[
            np.searchsorted(self.cumulative, random.random(count), side="right").clip(max=len(self.indices) - 1)
        ]
        batch = []
        for index in chosen:
            picture = self.images[index]
            corners = random.integers(0, size - crop + 1, (2, 2))
            crops = [picture[y : y + crop, x : x + crop] for y, x in corners]
            busiest = max(crops, key=lambda part: np.count_nonzero(part != 255))
            batch.append(busiest[:, ::-1] if random.random() < 0.5 else busiest)
        return np.stack(batch)


@torch.no_grad()
def evaluate_tokenizer(model: VQModel, images: np.ndarray, device: torch.device, batch_size: int = 16) -> dict[str, float]:
    """Figures over uint8 pictures `[N, Y, X, 3]`.

    Returns `psnr` (mean, dB), `codebook_use` (share of codes), `perplexity` of their use, and `plain_perplexity`, that of the
    codes which plain patches of one colour take: 1 where each colour has its code.
    """
    model.eval()
    V = model.config.codebook_size
    psnr, used, plain = [], torch.zeros(V, device=device), []
    for start in range(0, len(images), batch_size):
        pixels = to_pixels(images[start : start + batch_size], device)
        output = model(pixels)
        error = (output.sample.float().clamp(-1, 1) - pixels) / 2
        psnr.append(-10 * error.square().mean((1, 2, 3)).clamp_min(1e-10).log10())
        used += torch.bincount(output.indices.flatten(), minlength=V).float()
        colours = plain_colours(pixels, model.downsampling)
        plain.append((colours * V + output.indices)[colours >= 0])
    model.train()

    def entropy(counts: Tensor) -> float:
        probs = counts / counts.sum().clamp_min(1)
        return -(probs * probs.clamp_min(1e-12).log()).sum().item()

    pairs, counts = torch.cat(plain).unique(return_counts=True)
    colours = torch.zeros(len(pairs), device=device)
    colours.index_add_(0, (pairs // V).unique(return_inverse=True)[1], counts.float())
    return {
        "psnr": torch.cat(psnr).mean().item(),
        "codebook_use": (used > 0).float().mean().item(),
        "perplexity": math.exp(entropy(used)),
        "plain_perplexity": math.exp(entropy(counts.float()) - entropy(colours)),
    }


def train_tokenizer(recipe: TokenizerConfig, data: EmojiDataset, folder: Path, device: torch.device) -> dict[str, float]:
    """Train until `recipe.schedule.steps`, resuming what is in `folder`; the model lands in `folder/vqvae`.

    The last `recipe.decoder_steps` leave encoder and codebook as they are, and with them the tokens of every picture.

    Returns:
        The held-out figures of the final model: `psnr` (dB), `codebook_use` (share), `perplexity`.

    Raises:
        ValueError: if `folder` holds another run, or one that cannot be gone on with; see `TrainingRun.resume`.
    """
    trainer = _Trainer(recipe, data, folder, device)
    run, steps = trainer.run, recipe.schedule.steps
    for step in run.progress(trainer.resumed()):
        logged = trainer.step(step)
        done = step + 1
        if done % 10 == 0:
            run.log(done, **logged)
        if done % recipe.evaluate_every == 0:
            run.log(done, **evaluate_tokenizer(trainer.model, trainer.sample, device))
        if done % recipe.checkpoint_every == 0 and done != steps:
            trainer.save(done, recent=trainer.recent)
    figures = evaluate_tokenizer(trainer.model, trainer.held_out, device)
    run.log(steps, **figures)
    trainer.save(steps)
    with atomic_merge(folder / "vqvae") as staged:
        trainer.model.save_pretrained(staged)
    run.plot(("loss", "reconstruction"), ("psnr",), ("codebook_use",))
    logger.info("tokenizer %s: %s (%s)", folder, figures, asdict(recipe.schedule))
    return figures


class _Trainer:
    """A tokenizer and all that its training changes.

    Attributes:
        recent: latents `[N, E]` of the last steps before there is a codebook, which will be fitted to them.
    """

    def __init__(self, recipe: TokenizerConfig, data: EmojiDataset, folder: Path, device: torch.device):
        torch.manual_seed(recipe.seed)
        self.recipe, self.device = recipe, device
        self.model = VQModel(**recipe.model).to(device)
        self.trained = [p for name, p in self.model.named_parameters() if name != "quantize.embedding.weight"]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=recipe.schedule.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        self.codebook = Codebook(self.model, recipe.codebook_decay)
        identity = {"kind": "tokenizer", "model": dict(recipe.model), "seed": recipe.seed}
        self.run = TrainingRun(folder, identity, recipe.schedule.steps)
        self.batches = Batches(data, recipe)
        self.held_out = data.images[data.indices("validation")]
        self.sample = self.held_out[:: max(1, len(self.held_out) // 128)]
        self.amp = torch.autocast(device.type, torch.bfloat16, enabled=preferred_dtype(device) == torch.bfloat16)
        self.recent: list[Tensor] = []

    def resumed(self) -> int:
        """Take up what the folder holds; returns the step to go on with."""
        state = self.run.resume(self.device, ("model", "optimizer", "sums", "counts"))
        if not state:
            return 0
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.codebook.sums.copy_(state["sums"])
        self.codebook.counts.copy_(state["counts"])
        self.recent = state.get("recent", [])
        return state["step"]

    def save(self, step: int, **more: Any) -> None:
        self.run.checkpoint(
            step,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            sums=self.codebook.sums,
            counts=self.codebook.counts,
            **more,
        )

    def step(self, step: int) -> dict[str, Any]:
        """One step; returns what is logged of it."""
        recipe, model = self.recipe, self.model
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.schedule.learning_rate * recipe.schedule.factor(step)
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        pixels = to_pixels(self.batches(step), self.device)
        settled = step >= recipe.schedule.steps - recipe.decoder_steps
        with self.amp, torch.set_grad_enabled(not settled):
            z_BERG = model.encode_latents(pixels)
        z_BERG = z_BERG.float()
        z_NE = z_BERG.detach().movedim(1, -1).flatten(0, 2)
        if step == recipe.autoencoder_steps:
            self.codebook.fit(torch.cat([*self.recent, z_NE])[-65536:], generator)
        if step < recipe.autoencoder_steps:
            self.recent = [*self.recent[-40:], z_NE]
            indices, codes, commitment = None, z_BERG, z_BERG.new_zeros(())
        else:
            self.recent = []
            indices, codes, commitment = self.quantised(z_BERG, pixels, settled)
        with self.amp:
            decoded = model.decode_latents(z_BERG + (codes - z_BERG).detach())  # straight-through gradient
        reconstruction = reconstruction_loss(decoded.float(), pixels, recipe, model.downsampling)
        loss = reconstruction + recipe.commitment_weight * commitment
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        revived = 0
        if indices is not None and not settled:
            self.codebook.update(z_NE, indices.flatten())
            # Late changes of the codebook cannot be followed by the decoder any more: none while the rate decays.
            if (step + 1) % recipe.revive_every == 0 and recipe.schedule.factor(step) >= 1:
                revived = self.codebook.revive(z_NE, generator)
        return {
            "loss": loss.detach(),
            "reconstruction": reconstruction.detach(),
            "commitment": commitment.detach(),
            "revived": revived,
        }

    def quantised(self, z_BERG: Tensor, pixels: Tensor, settled: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Indices `[B, R, G]`, their codes `[B, E, R, G]`, and how far the latents are from them; plain patches of a colour
        share a code, until the codebook is settled."""
        recipe, model = self.recipe, self.model
        together = recipe.plain_weight > 0 and not settled
        colours = plain_colours(pixels, model.downsampling) if together else torch.full_like(z_BERG[:, 0], -1).long()
        indices = quantise_together(model, z_BERG, colours)
        codes = model.quantize.lookup(indices).detach()
        weight = torch.where(colours >= 0, recipe.plain_weight, 1.0)
        return indices, codes, ((z_BERG - codes).square().sum(1) * weight).mean()
