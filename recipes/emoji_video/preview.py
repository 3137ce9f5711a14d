"""Train a `PreviewDecoder` to show what latents hold."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.emoji.pixels import reconstruction_loss
from recipes.emoji_video.autoencoder import to_video
from recipes.emoji_video.batches import clip_latents, encoder_digest
from recipes.emoji_video.clips import VideoDataset
from recipes.emoji_video.config import PreviewConfig
from vargen.device import preferred_dtype
from vargen.files import atomic_merge
from vargen.models.component_files import check_network_files
from vargen.models.tokenizers.preview_decoder import PreviewDecoder
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.training.run import TrainingRun

logger = logging.getLogger("vargen")


@torch.no_grad()
def preview_psnr(model: PreviewDecoder, latents: np.ndarray, frames: np.ndarray, device: torch.device) -> float:
    """Mean PSNR in dB of previews of `[N, F, C, Y, X]` to uint8 frames `[N, F, Y', X', 3]`."""
    found: list[Tensor] = []
    for some, real in zip(latents, frames, strict=True):
        shown = model(torch.from_numpy(some[None].astype(np.float32)).to(device)).clamp(-1, 1)
        missed = ((shown - to_video(real[None], device)) / 2).square().mean((2, 3, 4))
        found.append(-10 * missed.clamp_min(1e-10).log10().flatten())
    return torch.cat(found).mean().item()


def train_video_preview(
    recipe: PreviewConfig, data: VideoDataset, vae_folder: Path, folder: Path, device: torch.device
) -> dict[str, float]:
    """Train until `recipe.schedule.steps`, resuming what is in `folder`; the model lands in `folder/preview`.

    Returns `psnr` of held-out clips.

    Raises:
        ValueError: if the saved autoencoder is damaged or does not fit the clips or the recipe; if the folder holds another
            run, or training diverges.
    """
    check_network_files(vae_folder, CausalVideoVAE)
    vae = CausalVideoVAE.from_pretrained(vae_folder).to(device).eval().requires_grad_(False)
    torch.manual_seed(recipe.seed)
    model = PreviewDecoder(**recipe.model).to(device)
    for name, own, other in (
        ("latent_channels", model.config.latent_channels, vae.config.latent_channels),
        ("stride", model.config.stride, vae.spatial_stride),
    ):
        if own != other:
            raise ValueError(f"{name} must be the autoencoder's, {other}, got {own}")
    made_of = {"kind": "video-preview", "model": dict(recipe.model), "seed": recipe.seed, "vae": encoder_digest(vae)}
    run = TrainingRun(folder, made_of, recipe.schedule.steps)
    state = run.resume(device)
    latents = clip_latents(folder, data, vae, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), recipe.schedule.learning_rate, (0.9, 0.99), weight_decay=recipe.weight_decay, fused=True
    )
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    train, held_out = data.indices("train"), data.indices("validation")
    for step in run.progress(state["step"] if state else 0):
        for group in optimizer.param_groups:
            group["lr"] = recipe.schedule.learning_rate * recipe.schedule.factor(step)
        draw = np.random.default_rng((recipe.seed, step))
        clips, times = draw.choice(train, recipe.batch_size), draw.integers(data.frames.shape[1], size=recipe.batch_size)
        z = torch.from_numpy(latents[clips, times].astype(np.float32)).to(device)
        real = to_video(np.stack([data.frames[c, t] for c, t in zip(clips, times, strict=True)])[:, None], device)[:, 0]
        noise = torch.randn(z.shape, generator=torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)).to(z)
        strength = torch.from_numpy(draw.random(len(z)).astype(np.float32)).to(z)[:, None, None, None]
        with torch.autocast(device.type, torch.bfloat16, enabled=preferred_dtype(device) == torch.bfloat16):
            shown = model((z + recipe.latent_noise * strength * noise)[:, None])[:, 0]
        loss = reconstruction_loss(shown.float(), real, recipe, vae.spatial_stride)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done = step + 1
        if done % 10 == 0:
            run.log(done, loss=loss.detach())
        if done % recipe.evaluate_every == 0 and done != recipe.schedule.steps:
            run.log(done, psnr=preview_psnr(model, latents[held_out], data.frames[held_out], device))
        if done % recipe.checkpoint_every == 0 or done == recipe.schedule.steps:
            run.checkpoint(done, model=model.state_dict(), optimizer=optimizer.state_dict())
    found = {"psnr": preview_psnr(model, latents[held_out], data.frames[held_out], device)}
    if not math.isfinite(found["psnr"]):
        raise ValueError(f"the run in {folder} has diverged: its pictures are not finite; lower the learning_rate")
    run.log(recipe.schedule.steps, **found)
    with atomic_merge(folder / "preview") as staged:
        model.eval().save_pretrained(staged)
    run.plot(("loss",), ("psnr",))
    logger.info("video-preview %s: %s", folder, found)
    return found
