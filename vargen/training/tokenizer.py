"""Train a `VQModel`: reconstruction plus a gradient term, and a codebook kept in use by construction.

The codebook follows the encoder by exponential moving averages (van den Oord et al. 2017, appendix A.1), here on the unit
sphere: it starts from spherical k-means on real latents and codes that nothing chooses are moved to badly served latents.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.device import fast_dtype
from vargen.files import whole_files
from vargen.models.multi_scale_vq import MultiScaleVQModel
from vargen.models.vq import VQModel
from vargen.training.emoji import EmojiDataset
from vargen.training.recipe import TokenizerRecipe
from vargen.training.run import TrainingRun

logger = logging.getLogger("vargen")


def to_pixels(images: np.ndarray, device: torch.device) -> Tensor:
    """uint8 `[B, Y, X, 3]` to float32 `[B, 3, Y, X]` in [-1, 1]."""
    # contiguous: channels-last group norm and small convolutions are six times slower on a CPU
    return (
        torch.from_numpy(np.ascontiguousarray(images)).to(device).permute(0, 3, 1, 2).contiguous().float()
        / 127.5
        - 1
    )


class Batches:
    """Pictures of the training split, by (seed, step) alone: the busier of two random crops of a weighted draw."""

    def __init__(self, data: EmojiDataset, recipe: TokenizerRecipe):
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
            np.searchsorted(self.cumulative, random.random(count), side="right").clip(
                max=len(self.indices) - 1
            )
        ]
        batch = []
        for index in chosen:
            picture = self.images[index]
            corners = random.integers(0, size - crop + 1, (2, 2))
            crops = [picture[y : y + crop, x : x + crop] for y, x in corners]
            busiest = max(crops, key=lambda part: np.count_nonzero(part != 255))
            batch.append(busiest[:, ::-1] if random.random() < 0.5 else busiest)
        return np.stack(batch)


class Codebook:
    """Moving averages behind the codes: `sums [V, E]`, `counts [V]`. Codes and latents are of unit norm."""

    def __init__(self, model: VQModel | MultiScaleVQModel, decay: float):
        self.weight = model.quantize.embedding.weight
        self.decay = decay
        self.sums = self.weight.detach().clone()
        self.counts = torch.ones(len(self.weight), device=self.weight.device)

    def likeness(self, z_NE: Tensor, codes_VE: Tensor) -> Tensor:
        """`[N, V]`, greatest for the code that serves a latent best."""
        return z_NE @ codes_VE.T

    def miss(self, z_NE: Tensor, codes_VE: Tensor) -> Tensor:
        """`[N]`: how badly each latent is served by the best code."""
        return 1 - self.likeness(z_NE, codes_VE).amax(-1)

    def settle(self, sums: Tensor, counts: Tensor) -> Tensor:
        """The codes of cells with these sums and counts of latents."""
        return F.normalize(sums, dim=-1)

    @torch.no_grad()
    def centres(self, z_NE: Tensor, V: int, generator: torch.Generator, rounds: int = 8) -> Tensor:
        """k-means: `[V, E]`."""
        # Flat background gives thousands of equal latents: jitter lets their codes part instead of tying.
        picks = torch.randint(len(z_NE), (V,), generator=generator).to(z_NE.device)
        jitter = 1e-3 * torch.randn(V, z_NE.shape[1], generator=generator).to(z_NE.device)
        centres = self.settle(z_NE[picks] + jitter, torch.ones(V, device=z_NE.device))
        for _ in range(rounds):
            nearest = torch.cat([self.likeness(part, centres).max(-1).indices for part in z_NE.split(8192)])
            counts = torch.bincount(nearest, minlength=V)
            sums = torch.zeros_like(centres).index_add_(0, nearest, z_NE)
            spare = torch.randint(len(z_NE), (V,), generator=generator).to(z_NE.device)
            centres = self.settle(torch.where(counts[:, None] > 0, sums, z_NE[spare]), counts.clamp_min(1))
        return centres

    @torch.no_grad()
    def fit(self, z_NE: Tensor, generator: torch.Generator) -> None:
        """Start from the centres of these latents."""
        self.weight.copy_(self.centres(z_NE, len(self.weight), generator))
        self.sums.copy_(self.weight)
        self.counts.fill_(1.0)

    @torch.no_grad()
    def update(self, z_NE: Tensor, indices_N: Tensor) -> None:
        V = len(self.weight)
        counts = torch.bincount(indices_N, minlength=V).float()
        sums = torch.zeros_like(self.sums).index_add_(0, indices_N, z_NE)
        self.counts.lerp_(counts, 1 - self.decay)
        self.sums.lerp_(sums, 1 - self.decay)
        self.weight.copy_(self.settle(self.sums, self.counts))

    @torch.no_grad()
    def revive(
        self, z_NE: Tensor, generator: torch.Generator, threshold: float = 0.03, first: int = 0, last: int | None = None
    ) -> int:
        """Move those of the codes `first` to `last` that nearly nothing chooses to latents that the codes up to `last` serve
        badly; returns how many."""
        dead = first + (self.counts[first:last] < threshold).nonzero()[:, 0]
        if len(dead):
            miss = self.miss(z_NE, self.weight[:last]).clamp_min(1e-6)
            picks = torch.multinomial(miss.cpu(), min(len(dead), len(z_NE)), generator=generator).to(
                z_NE.device
            )
            dead = dead[: len(picks)]
            self.weight[dead] = z_NE[picks]
            self.sums[dead] = z_NE[picks] * 0.1
            self.counts[dead] = 0.1
        return len(dead)


def plain_colours(pixels: Tensor, patch: int, step: int = 4, tolerance: int = 2) -> Tensor:
    """Which patches are of one colour, and of which.

    Args:
        pixels: float `[B, 3, Y, X]` in [-1, 1]. patch: side of a patch in pixels.
        step: levels of 256 that count as one colour. tolerance: levels that may lie between a patch's extremes.

    Returns:
        int64 `[B, Y/patch, X/patch]`: a number for the colour, -1 where the patch is not plain.
    """
    levels = (pixels.float() + 1) * 127.5
    high, low = F.max_pool2d(levels, patch), -F.max_pool2d(-levels, patch)
    red, green, blue = ((high + low) / 2).round().long().div(step, rounding_mode="floor").unbind(1)
    colour = (red * 256 + green) * 256 + blue
    return torch.where(((high - low) <= tolerance + 0.5).all(1), colour, -1)


def quantise_together(model: VQModel, z_BERG: Tensor, colours_BRG: Tensor) -> Tensor:
    """Indices of the nearest codes, where all plain patches of one colour take the code nearest to the mean of their latents.

    A latent sees more of the picture than its patch, so by itself plain white gets a hundred codes, which say nothing to an eye
    and which a generator has to guess token by token. Trained towards one code for each colour, the encoder finds it alone.
    """
    indices = model.quantize.nearest(z_BERG)
    plain = colours_BRG >= 0
    if not plain.any():
        return indices
    _, group = colours_BRG[plain].unique(return_inverse=True)
    z_NE = z_BERG.detach().movedim(1, -1)[plain]
    sums = z_NE.new_zeros(int(group.max()) + 1, z_NE.shape[1]).index_add_(0, group, z_NE)
    shared = model.quantize.nearest(F.normalize(sums, dim=-1).T[None, :, :, None]).flatten()
    indices = indices.clone()
    indices[plain] = shared[group]
    return indices


class ReconstructionWeights(Protocol):
    """What a recipe says about the parts of `reconstruction_loss`."""

    @property
    def l1_weight(self) -> float: ...
    @property
    def mse_weight(self) -> float: ...
    @property
    def gradient_weight(self) -> float: ...
    @property
    def colour_weight(self) -> float: ...


def reconstruction_loss(predicted: Tensor, target: Tensor, recipe: ReconstructionWeights, patch: int) -> Tensor:
    """L1 and MSE on pixels, L1 on their differences (edges), and L1 and MSE on the mean colour of each patch.

    The pixel terms hold the last one too, but it is what a token can always carry, and early reconstructions without its weight
    were pale.
    """
    error = predicted - target
    gradient = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    colour = F.avg_pool2d(error, patch)
    return (
        recipe.l1_weight * error.abs().mean()
        + recipe.mse_weight * error.square().mean()
        + recipe.gradient_weight * gradient
        + recipe.colour_weight * (colour.abs().mean() + colour.square().mean())
    )


@torch.no_grad()
def evaluate_tokenizer(
    model: VQModel, images: np.ndarray, device: torch.device, batch_size: int = 16
) -> dict[str, float]:
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


def train_tokenizer(
    recipe: TokenizerRecipe, data: EmojiDataset, folder: Path, device: torch.device
) -> dict[str, float]:
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
    with whole_files(folder / "vqvae") as staged:
        trainer.model.save_pretrained(staged)
    run.plot(("loss", "reconstruction"), ("psnr",), ("codebook_use",))
    logger.info("tokenizer %s: %s (%s)", folder, figures, asdict(recipe.schedule))
    return figures


class _Trainer:
    """A tokenizer and all that its training changes.

    Attributes:
        recent: latents `[N, E]` of the last steps before there is a codebook, which will be fitted to them.
    """

    def __init__(self, recipe: TokenizerRecipe, data: EmojiDataset, folder: Path, device: torch.device):
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
        self.amp = torch.autocast(device.type, torch.bfloat16, enabled=fast_dtype(device) == torch.bfloat16)
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
