"""Train a `MultiScaleVQModel` on whole pictures.

VAR's authors have published no training code; this follows their section 3.2 for the sum over scales, and what smaller runs
taught for the rest (see `MultiScaleTokenizerConfig`). Whole pictures, because in a crop the scales would mean other sizes of
things.

Plain patches of one colour do not share a code here, as they do for `VQModel`: what a scale adds depends on what the coarser
ones left, which a next-scale generator sees as its input, so there is nothing to guess.
"""

from __future__ import annotations

import logging
import math
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from recipes.emoji.dataset import EmojiDataset
from recipes.emoji.pixels import reconstruction_loss
from recipes.emoji_var.codebook import Perturbation, ScaleCodebook, quantise
from recipes.emoji_var.tokenizer_config import MultiScaleTokenizerConfig
from vargen.device import preferred_dtype
from vargen.files import atomic_file, atomic_merge
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.training.dataset import to_pixels
from vargen.training.run import TrainingRun

logger = logging.getLogger("vargen")

_RECENT = 16  # batches of latents that the codebook is fitted to


class Batches:
    """Whole pictures of the training split, by (seed, step) alone: shifted, mirrored, half of them zoomed, on white."""

    def __init__(self, data: EmojiDataset, recipe: MultiScaleTokenizerConfig):
        self.images = data.images
        self.indices = data.indices("train")
        self.cumulative = np.cumsum(recipe.focus.weights([data.records[i] for i in self.indices]))
        self.recipe = recipe

    def __call__(self, step: int) -> np.ndarray:
        recipe = self.recipe
        random = np.random.default_rng((recipe.seed, step))
        drawn = np.searchsorted(self.cumulative, random.random(recipe.batch_size), side="right")
        chosen = self.indices[drawn.clip(max=len(self.indices) - 1)]
        size = self.images.shape[1]
        batch = np.full((recipe.batch_size, size, size, 3), 255, dtype=np.uint8)
        for canvas, index in zip(batch, chosen, strict=True):
            picture = self.images[index]
            if random.random() < 0.5:
                side = round(size * random.uniform(*recipe.zoom))
                picture = np.asarray(Image.fromarray(picture).resize((side, side), Image.Resampling.LANCZOS))
            if random.random() < 0.5:
                picture = picture[:, ::-1]
            y, x = (size - len(picture)) // 2 + random.integers(-recipe.shift, recipe.shift + 1, 2)
            place(canvas, picture, int(y), int(x))
        return batch


def place(canvas: np.ndarray, picture: np.ndarray, y: int, x: int) -> None:
    """Put the picture's corner at (y, x) of the canvas; what is outside is lost."""
    (height, width), (rows, columns) = canvas.shape[:2], picture.shape[:2]
    top, left, bottom, right = max(y, 0), max(x, 0), min(y + rows, height), min(x + columns, width)
    if top < bottom and left < right:
        canvas[top:bottom, left:right] = picture[top - y : bottom - y, left - x : right - x]


def wavelet_loss(error: Tensor, levels: int = 2) -> Tensor:
    """L1 of the Haar coefficients of an error `[B, C, Y, X]`: sums and differences of neighbours, then of their means."""
    loss = error.new_zeros(())
    for _ in range(levels):
        a, b = error[..., ::2, :] + error[..., 1::2, :], error[..., ::2, :] - error[..., 1::2, :]
        parts = [a[..., ::2] - a[..., 1::2], b[..., ::2] + b[..., 1::2], b[..., ::2] - b[..., 1::2]]
        loss = loss + sum(part.abs().mean() for part in parts) / 2
        error = (a[..., ::2] + a[..., 1::2]) / 4
    return loss / levels


@torch.no_grad()
def evaluate_multi_scale(
    model: MultiScaleVQModel, images: np.ndarray, device: torch.device, batch_size: int = 32
) -> dict[str, float]:
    """Figures over uint8 pictures `[N, Y, X, 3]`.

    Returns `psnr` (mean, dB) and, for each scale k: `psnr_k` of the picture made of scales 0 to k, `use_k` (share of the
    scale's codes that occur), `entropy_k` (nats) of their use, `explained_k` (share of the latents' variance that scales 0 to k
    hold).
    """
    model.eval()
    S, V = len(model.scales), model.config.codebook_size
    psnr: list[list[Tensor]] = [[] for _ in range(S)]
    used, error = torch.zeros(S, V, device=device), torch.zeros(S)
    latents = []
    for start in range(0, len(images), batch_size):
        pixels = to_pixels(images[start : start + batch_size], device)
        f = model.latent(pixels).float()
        latents.append(f.cpu())
        quantised = quantise(model, f)
        for k, f_hat in enumerate(quantised.sums):
            missed = (model.decode_latent(f_hat).float() - pixels) / 2
            psnr[k].append(-10 * missed.square().mean((1, 2, 3)).clamp_min(1e-10).log10())
            used[k] += torch.bincount(quantised.tokens[k].flatten(), minlength=V).float()
        error += quantised.errors(f).cpu() * (len(f) / len(images))
    model.train()
    variance = torch.cat(latents).var((0, 2, 3), unbiased=False).mean().item()
    probs = used / used.sum(1, keepdim=True)
    entropy = -(probs * probs.clamp_min(1e-12).log()).sum(1)
    figures = {"psnr": torch.cat(psnr[-1]).mean().item()}
    for k in range(S):
        figures[f"psnr_{k}"] = torch.cat(psnr[k]).mean().item()
        figures[f"use_{k}"] = ((used[k] > 0).sum() / model.scale_codes[k]).item()
        figures[f"entropy_{k}"] = entropy[k].item()
        figures[f"explained_{k}"] = 1 - error[k].item() / max(variance, 1e-12)
    return figures


@torch.no_grad()
def draw_scales(model: MultiScaleVQModel, images: np.ndarray, device: torch.device, path: Path) -> None:
    """A PNG: a column for each picture, first as it is, then as all of its scales give it, then from the first scale on."""
    model.eval()
    pixels = to_pixels(images, device)
    tokens = model.encode(pixels)
    rows = [pixels, *(model.decode(tokens[:count]) for count in (len(tokens), *range(1, len(tokens))))]
    model.train()
    sheet = torch.cat([torch.cat(list(row.float().clamp(-1, 1)), dim=-1) for row in rows], dim=-2)
    values = ((sheet + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    with atomic_file(path) as temporary:
        Image.fromarray(values).save(temporary, format="PNG")


class _Trainer:
    """The model, and what a step changes: a step is a function of this state and of its number."""

    def __init__(self, recipe: MultiScaleTokenizerConfig, device: torch.device):
        torch.manual_seed(recipe.seed)
        self.recipe, self.device = recipe, device
        self.model = MultiScaleVQModel(**{"scale_gains": True, **recipe.model}).to(device)
        self.model.quantize.embedding.weight.requires_grad_(False)  # it follows the latents instead
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        rate, decay = recipe.schedule.learning_rate, recipe.weight_decay
        self.optimizer = torch.optim.AdamW(self.trained, rate, (0.9, 0.99), weight_decay=decay, fused=True)
        self.codebook = ScaleCodebook(self.model, recipe.codebook_decay)
        self.recent: list[Tensor] = []
        self.perturbation: Perturbation | None = None

    def amp(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=preferred_dtype(self.device) == torch.bfloat16)

    def state(self) -> dict[str, Any]:
        parts = {"sums": self.codebook.sums, "counts": self.codebook.counts, "recent": self.recent}
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **parts}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.codebook.sums.copy_(state["sums"])
        self.codebook.counts.copy_(state["counts"])
        self.recent = state["recent"]

    def latents(self, pixels: Tensor, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """What is decoded, the loss on the latents, and figures for the log."""
        recipe, model = self.recipe, self.model
        settled = step >= recipe.schedule.steps - recipe.decoder_steps
        with self.amp(), torch.set_grad_enabled(not settled):
            f = model.latent(pixels)
        f = f.float()
        if step < recipe.autoencoder_steps:
            self.recent = [*self.recent[1 - _RECENT :], f.detach()]
            return f, f.new_zeros(()), {}
        if self.recent:
            self.codebook.fit_scales(torch.cat([*self.recent, f.detach()]), generator)
            self.recent = []
        if settled:
            return self.perturbed(f, generator), f.new_zeros(()), {}
        quantised = quantise(model, f)
        errors = quantised.errors(f.detach())
        # Of two equal numbers, one pulls the encoder to the sums, the other trains phi.
        commitment = torch.stack([F.mse_loss(f, f_hat.detach()) for f_hat in quantised.sums]).mean()
        f_hat = self.stopped(quantised.sums, generator)
        self.codebook.follow(quantised)
        figures: dict[str, Any] = {"commitment": commitment.detach(), "left": errors[-1].detach()}
        # Late changes of the codebook cannot be followed by the decoder any more: none while the rate decays.
        if (step + 1) % recipe.revive_every == 0 and recipe.schedule.factor(step) >= 1:
            figures["revived"] = self.codebook.revive_groups(quantised, generator)
        # Straight through to the encoder; phi gets its own gradient.
        return f + f_hat - f.detach(), recipe.commitment_weight * commitment + errors.mean(), figures

    @torch.no_grad()
    def perturbed(self, f: Tensor, generator: torch.Generator) -> Tensor:
        recipe = self.recipe
        self.perturbation = self.perturbation or Perturbation(self.model, recipe.near_codes)
        tokens = self.model.quantize_latent(f)
        tokens = self.perturbation(tokens, recipe.perturbed_pictures, recipe.perturbed_tokens, generator)
        added = [self.model.quantize.lookup(of_scale, k) for k, of_scale in enumerate(tokens)]
        return self.stopped(list(accumulate(added)), generator)

    def stopped(self, sums: list[Tensor], generator: torch.Generator) -> Tensor:
        """Each picture's sum over all scales, or for a share of the pictures over the first ones, any number of them."""
        B, S = len(sums[0]), len(sums)
        stop = torch.rand(B, generator=generator) < self.recipe.prefix_share
        last = torch.where(stop, torch.randint(S, (B,), generator=generator), S - 1).to(self.device)
        return torch.stack(sums, 1)[torch.arange(B, device=self.device), last]

    def step(self, step: int, images: np.ndarray) -> dict[str, Any]:
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.schedule.learning_rate * recipe.schedule.factor(step)
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        pixels = to_pixels(images, self.device)
        latents, loss, figures = self.latents(pixels, step, generator)
        with self.amp():
            decoded = self.model.reconstruct(latents)
        decoded = decoded.float()
        reconstruction = reconstruction_loss(decoded, pixels, recipe, self.model.downsampling)
        reconstruction = reconstruction + recipe.wavelet_weight * wavelet_loss(decoded - pixels)
        self.optimizer.zero_grad(set_to_none=True)
        (reconstruction + loss).backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        return {"loss": (reconstruction + loss).detach(), "reconstruction": reconstruction.detach(), **figures}


def train_multi_scale_tokenizer(
    recipe: MultiScaleTokenizerConfig, data: EmojiDataset, folder: Path, device: torch.device
) -> dict[str, float]:
    """Train until `recipe.schedule.steps`, resuming what is in `folder`; the model lands in `folder/vqvae`.

    Returns the held-out figures of the final model, see `evaluate_multi_scale`.

    Raises:
        ValueError: if the pictures are not of the model's size, or the folder holds another run.
    """
    trainer = _Trainer(recipe, device)
    model, size = trainer.model, data.images.shape[1]
    if size != model.image_size:
        raise ValueError(f"scales {model.scales} are for pictures of {model.image_size} pixels, the data set's have {size}")
    batches = Batches(data, recipe)
    steps = recipe.schedule.steps
    run = TrainingRun(folder, {"kind": "var-tokenizer", "model": dict(recipe.model), "seed": recipe.seed}, steps)
    start = 0
    if state := run.resume(device):
        trainer.load(state)
        start = state["step"]
    held_out = data.images[data.indices("validation")]
    sample = held_out[:: max(1, len(held_out) // 128)]
    for step in run.progress(start):
        figures = trainer.step(step, batches(step))
        done = step + 1
        if done % 10 == 0:
            run.log(done, **figures)
        if done % recipe.evaluate_every == 0:
            run.log(done, **evaluate_multi_scale(model, sample, device))
            draw_scales(model, sample[:: max(1, len(sample) // 12)][:12], device, folder / "scales.png")
        if done % recipe.checkpoint_every == 0 and done != steps:
            run.checkpoint(done, **trainer.state())
    found = evaluate_multi_scale(model, held_out, device)
    if not math.isfinite(found["psnr"]):
        raise ValueError(f"the run in {folder} has diverged: its pictures are not finite; lower the learning_rate")
    run.log(steps, **found)
    run.checkpoint(steps, **trainer.state())
    draw_scales(model, sample[:: max(1, len(sample) // 12)][:12], device, folder / "scales.png")
    with atomic_merge(folder / "vqvae") as staged:
        model.save_pretrained(staged)
    run.plot(("loss", "reconstruction"), ("psnr", "psnr_0", "psnr_2"), tuple(f"use_{k}" for k in range(len(model.scales))))
    return found
