"""Train an image tokenizer on your images: a `VQModel` or, with `--scales`, a `MultiScaleVQModel`.

    python recipes/train_tokenizer.py --data my-images --output runs/tokenizer
    python recipes/train_tokenizer.py --data my-images --output runs/scales --scales 1,2,3,4,6,8

The codebook follows the encoder by exponential moving averages (van den Oord et al. 2017, appendix A.1). It starts from k-means
on real latents, and unused codes are moved to latents far from all codes, so that it stays in use.

Shape suffixes: B images, N latents, E width of a code, V codes, R/G latent rows and columns, Y/X pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.tokenizers.vq import VQModel
from vargen.training.dataset import CaptionedImages, load_captioned_images, take_evenly, to_pixels
from vargen.training.loop import Schedule, Trainer, at_least, export, fit

_RECENT = 16  # batches of latents that the codebook is fitted to
_EVALUATED = 128  # validation images
_UNUSED = 0.03  # a code with a lower average count is unused


@dataclass(frozen=True)
class TokenizerConfig:
    """How to train a tokenizer. `model` contains the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    batch_size: int = 16
    autoencoder_steps: int = 200  # without quantization, before the codebook is fitted by k-means
    commitment_weight: float = 0.25
    codebook_decay: float = 0.98
    revive_every: int = 50  # steps between replacements of unused codes
    weight_decay: float = 0.01
    evaluate_every: int = 250
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "revive_every", "evaluate_every", "checkpoint_every", "autoencoder_steps")
        if self.schedule.steps <= self.autoencoder_steps:
            raise ValueError(f"steps must be more than the {self.autoencoder_steps} without quantization")


class Codebook:
    """Codes and the moving averages that they are computed from: `sums [V, E]`, `counts [V]`.

    Args:
        weight_VE: the codes; changed in place. unit: whether codes and latents have unit norm, as those of a `VQModel` do.
    """

    def __init__(self, weight_VE: Tensor, decay: float, unit: bool):
        self.weight, self.decay, self.unit = weight_VE.requires_grad_(False), decay, unit
        self.sums, self.counts = weight_VE.detach().clone(), torch.ones(len(weight_VE), device=weight_VE.device)

    def centroids(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return the codes of cells with these sums `[V, E]` and counts `[V]` of latents."""
        return F.normalize(sums, dim=-1) if self.unit else sums / counts[:, None].clamp_min(1e-12)

    @torch.no_grad()
    def fit(self, z_NE: Tensor, generator: torch.Generator, rounds: int = 8) -> None:
        """Set the codes to k-means centroids of the latents."""
        V, device = len(self.weight), z_NE.device
        z_NE = z_NE[torch.randperm(len(z_NE), generator=generator)[:65536].to(device)]
        # Flat background gives thousands of equal latents: jitter separates their codes, which would tie otherwise.
        picks = torch.randint(len(z_NE), (V,), generator=generator).to(device)
        jitter = 1e-3 * torch.randn(V, z_NE.shape[1], generator=generator).to(device)
        codes = self.centroids(z_NE[picks] + jitter, torch.ones(V, device=device))
        for _ in range(rounds):
            nearest = torch.cat([torch.cdist(part, codes).argmin(-1) for part in z_NE.split(8192)])
            counts = torch.bincount(nearest, minlength=V)
            sums = torch.zeros_like(codes).index_add_(0, nearest, z_NE)
            spare = z_NE[torch.randint(len(z_NE), (V,), generator=generator).to(device)]
            codes = self.centroids(torch.where(counts[:, None] > 0, sums, spare), counts.clamp_min(1))
        self.weight.copy_(codes)
        self.sums.copy_(codes)
        self.counts.fill_(1.0)

    @torch.no_grad()
    def update(self, z_NE: Tensor, tokens_N: Tensor) -> None:
        """Move the codes toward the latents that were quantized to them."""
        counts = torch.bincount(tokens_N, minlength=len(self.weight)).float()
        sums = torch.zeros_like(self.sums).index_add_(0, tokens_N, z_NE)
        self.counts.lerp_(counts, 1 - self.decay)
        self.sums.lerp_(sums, 1 - self.decay)
        self.weight.copy_(self.centroids(self.sums, self.counts))

    @torch.no_grad()
    def revive(self, z_NE: Tensor, generator: torch.Generator) -> int:
        """Move unused codes to latents far from all codes; returns their number."""
        unused = (self.counts < _UNUSED).nonzero()[:, 0]
        if len(unused):
            distance = torch.cat([torch.cdist(part, self.weight).amin(-1) for part in z_NE.split(8192)])
            picks = torch.multinomial(distance.clamp_min(1e-6).cpu(), min(len(unused), len(z_NE)), generator=generator)
            unused, latents = unused[: len(picks)], z_NE[picks.to(z_NE.device)]
            self.weight[unused], self.sums[unused], self.counts[unused] = latents, latents * 0.1, 0.1
        return len(unused)


def quantize_scales(model: MultiScaleVQModel, f_BERG: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Quantize a latent scale by scale (Tian et al. 2024, algorithm 1); only phi gets gradients.

    Returns:
        For each scale: tokens `[N]`; the vectors `[N, E]` that they were looked up for, divided by the gain; the sum of all
            scales up to it, `[B, E, R, G]`.
    """
    quantize, rest = model.quantize, f_BERG.detach()
    tokens, vectors, sums = [], [], []
    f_hat: Tensor | float = 0.0
    for k in range(len(model.scales)):
        with torch.no_grad():
            z = quantize.downsample(rest, k)
            found = quantize.find_nearest(z, k)
        added = quantize.lookup(found, k)
        rest, f_hat = rest - added.detach(), f_hat + added
        tokens.append(found.flatten())
        vectors.append(z.movedim(1, -1).flatten(0, 2) / quantize.gain(k))
        sums.append(f_hat)
    return tokens, vectors, sums


class TokenizerTrainer(Trainer):
    """Trains an image tokenizer on whole images.

    Attributes:
        recent: latents of the last steps before there is a codebook, which is then fitted to them.
    """

    def __init__(self, config: TokenizerConfig, model: Any, data: CaptionedImages, folder: Path, device: torch.device):
        self.multi_scale = isinstance(model, MultiScaleVQModel)
        if self.multi_scale and data.images.shape[1] != model.image_size:
            raise ValueError(f"images must have the {model.image_size} pixels of the scales, got {data.images.shape[1]}")
        super().__init__(config, model, folder, device, "tokenizer")
        weight = model.quantize.embedding.weight
        self.codebook = Codebook(weight, config.codebook_decay, unit=not self.multi_scale)
        trained = [p for p in model.parameters() if p is not weight]
        rate, decay = config.schedule.learning_rate, config.weight_decay
        self.optimizers = [torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=decay)]
        self.images, self.training = data.images, data.indices("train")
        self.validation = data.images[take_evenly(data.indices("validation").tolist(), _EVALUATED)]
        self.recent: list[Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        codebook = {"sums": self.codebook.sums, "counts": self.codebook.counts, "recent": self.recent}
        return {**super().state_dict(), **codebook}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.codebook.sums.copy_(state["sums"])
        self.codebook.counts.copy_(state["counts"])
        self.recent = state["recent"]

    def step(self, step: int) -> dict[str, Any]:
        config, model = self.config, self.model
        rng = np.random.default_rng((config.seed, step))
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        batch = self.images[self.training[rng.integers(0, len(self.training), config.batch_size)]]
        pixels = to_pixels(np.where(rng.random((len(batch), 1, 1, 1)) < 0.5, batch[:, :, ::-1], batch), self.device)
        with self.amp():
            z_BERG = (model.encode_latent if self.multi_scale else model.encode_latents)(pixels)
        z_BERG = z_BERG.float()
        if step < config.autoencoder_steps:
            self.recent = [*self.recent[1 - _RECENT :], z_BERG.detach()]
            codes, more, metrics = z_BERG, z_BERG.new_zeros(()), dict[str, Any]()
        else:
            if self.recent:
                self.fit_codebook(torch.cat([*self.recent, z_BERG.detach()]), generator)
                self.recent = []
            codes, more, metrics = self.quantize(z_BERG, step, generator)
        with self.amp():
            decoded = (model.decode_unclamped if self.multi_scale else model.decode_latents)(z_BERG + codes - z_BERG.detach())
        error = decoded.float() - pixels
        edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
        color = F.avg_pool2d(error, model.downsampling)  # without its own weight, early reconstructions are pale
        loss = error.abs().mean() + 2 * error.square().mean() + 0.5 * edges + 2 * (color.abs().mean() + color.square().mean())
        self.update(step, loss + more)
        return {"loss": (loss + more).detach(), "reconstruction": loss.detach(), **metrics}

    @torch.no_grad()
    def fit_codebook(self, latents_BERG: Tensor, generator: torch.Generator) -> None:
        """Fit the codes to latents; the scales of a multi-scale tokenizer share them, each divided by its own gain."""
        quantize, vectors, rest = self.model.quantize, [], latents_BERG
        if not self.multi_scale:
            vectors, rest = [rest.movedim(1, -1).flatten(0, 2)], rest
        for k in range(len(self.model.scales) if self.multi_scale else 0):
            z = quantize.downsample(rest, k)
            quantize.gains[k] = z.square().mean().sqrt()
            rest = rest - quantize.upsample(z, k)
            each = z.movedim(1, -1).flatten(0, 2) / quantize.gain(k)
            vectors.append(each[torch.randint(len(each), (16384,), generator=generator).to(each.device)])
        self.codebook.fit(torch.cat(vectors), generator)

    def quantize(self, z_BERG: Tensor, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return codes `[B, E, R, G]`, the loss on latents, and metrics; the codebook follows the latents."""
        config, quantize = self.config, self.model.quantize
        if self.multi_scale:
            tokens, vectors, sums = quantize_scales(self.model, z_BERG)
            commitment = torch.stack([F.mse_loss(z_BERG, f_hat.detach()) for f_hat in sums]).mean()
            phi = torch.stack([F.mse_loss(f_hat, z_BERG.detach()) for f_hat in sums]).mean()  # its gradient is for phi
            codes, more = sums[-1], config.commitment_weight * commitment + phi
            for k, each in enumerate(vectors):
                quantize.gains[k].mul_(each.square().mean().sqrt() ** (1 - config.codebook_decay))
        else:
            found = quantize.find_nearest(z_BERG)
            tokens, vectors = [found.flatten()], [z_BERG.detach().movedim(1, -1).flatten(0, 2)]
            codes = quantize.lookup(found).detach()
            commitment = (z_BERG - codes).square().sum(1).mean()
            more = config.commitment_weight * commitment
        self.codebook.update(torch.cat(vectors), torch.cat(tokens))
        metrics: dict[str, Any] = {"commitment": commitment.detach()}
        # The decoder could not adapt to late replacements: none while the learning rate decays.
        if (step + 1) % config.revive_every == 0 and config.schedule.factor(step) >= 1:
            metrics["revived"] = self.codebook.revive(torch.cat(vectors), generator)
        return codes, more, metrics

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return `psnr` on validation images (mean, dB) and `codebook_use`, the fraction of codes that their tokens are."""
        self.model.eval()
        psnr, used = [], set[int]()
        for start in range(0, len(self.validation), self.config.batch_size):
            pixels = to_pixels(self.validation[start : start + self.config.batch_size], self.device)
            tokens = self.model.encode(pixels)
            error = (self.model.decode(tokens).float().clamp(-1, 1) - pixels) / 2
            psnr.append(-10 * error.square().mean((1, 2, 3)).clamp_min(1e-10).log10())
            used |= set(torch.cat([each.flatten() for each in tokens]).tolist())
        return {"psnr": float(torch.cat(psnr).mean()), "codebook_use": len(used) / len(self.codebook.weight)}


def train_tokenizer(
    data: CaptionedImages, folder: Path, config: TokenizerConfig, device: torch.device, multi_scale: bool = False
) -> dict[str, float]:
    """Train until `config.schedule.steps`, resuming the run in `folder`; saves the tokenizer to `folder/vqvae`."""
    torch.manual_seed(config.seed)
    model = (MultiScaleVQModel if multi_scale else VQModel)(**config.model)
    trainer = TokenizerTrainer(config, model, data, folder, device)
    fit(trainer)
    if not multi_scale:  # all white patches get one code, so that they say nothing about the rest of the image
        white = torch.ones(1, 3, *data.images.shape[1:3], device=device)
        model.register_to_config(blank_code=int(model.eval().encode(white).flatten().mode().values))
    return export(trainer.run, model, "vqvae", trainer.evaluate())


def main(
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder of images.npy and captions.jsonl.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The run. An unfinished one is resumed.")],
    scales: Annotated[str, typer.Option(metavar="S,S,...", help="Train a multi-scale tokenizer with these sides.")] = "",
    codes: Annotated[int, typer.Option(metavar="N", help="Size of the codebook.")] = 4096,
    width: Annotated[int, typer.Option(metavar="N", help="Channels of the first level.")] = 32,
    steps: Annotated[int, typer.Option(metavar="N", help="Training steps.")] = 6000,
    learning_rate: Annotated[float, typer.Option(metavar="R", help="After the warm-up.")] = 1.2e-3,
    device: Annotated[str, typer.Option(metavar="NAME", help="Such as cpu or cuda.")] = "cpu",
) -> None:
    """Train an image tokenizer on your images."""
    model: dict[str, Any] = {"codebook_size": codes, "ch": width}
    if scales:
        sides = tuple(int(side) for side in scales.split(","))
        model |= {"architecture": "hybrid", "ch_mult": (1, 2, 3), "num_res_blocks": 1, "codebook_embed_dim": 16}
        model |= {"scales": sides, "scale_gains": True}
    else:
        levels = (1, 1, 2, 4)
        model |= {"encoder_ch_mult": levels, "decoder_ch_mult": levels, "num_res_blocks": 1, "z_channels": 4 * width}
    config = TokenizerConfig(model, Schedule(steps, learning_rate))
    print(train_tokenizer(load_captioned_images(data), output, config, torch.device(device), bool(scales)))


if __name__ == "__main__":
    typer.run(main)
