"""Evaluate a `MultiScaleVQModel` on images, and save images in rows as a PNG."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from recipes.emoji_var.codebook import quantize_scales
from vargen.files import atomic_file
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.training.dataset import to_pixels


@torch.no_grad()
def evaluate_multi_scale(
    model: MultiScaleVQModel, images: np.ndarray, device: torch.device, batch_size: int = 32
) -> dict[str, float]:
    """Evaluate a tokenizer on uint8 images `[N, Y, X, 3]`.

    Returns:
        `psnr` (mean, dB) and, for each scale k: `psnr_k` of the reconstruction from scales 0 to k, `use_k` (fraction of the
            scale's codes in use), `entropy_k` (nats) of their use, and `explained_k` (fraction of the latents' variance that
            scales 0 to k explain).
    """
    model.eval()
    S, V = len(model.scales), model.config.codebook_size
    psnr: list[list[Tensor]] = [[] for _ in range(S)]
    used, error = torch.zeros(S, V, device=device), torch.zeros(S)
    latents = []
    for start in range(0, len(images), batch_size):
        pixels = to_pixels(images[start : start + batch_size], device)
        f = model.encode_latent(pixels).float()
        latents.append(f.cpu())
        quantized = quantize_scales(model, f)
        for k, f_hat in enumerate(quantized.sums):
            difference = (model.decode_latent(f_hat).float() - pixels) / 2
            psnr[k].append(-10 * difference.square().mean((1, 2, 3)).clamp_min(1e-10).log10())
            used[k] += torch.bincount(quantized.tokens[k].flatten(), minlength=V).float()
        error += quantized.errors(f).cpu() * (len(f) / len(images))
    variance = torch.cat(latents).var((0, 2, 3), unbiased=False).mean().item()
    probs = used / used.sum(1, keepdim=True)
    entropy = -(probs * probs.clamp_min(1e-12).log()).sum(1)
    metrics = {"psnr": torch.cat(psnr[-1]).mean().item()}
    for k in range(S):
        metrics[f"psnr_{k}"] = torch.cat(psnr[k]).mean().item()
        metrics[f"use_{k}"] = ((used[k] > 0).sum() / model.scale_codes[k]).item()
        metrics[f"entropy_{k}"] = entropy[k].item()
        metrics[f"explained_{k}"] = 1 - error[k].item() / max(variance, 1e-12)
    return metrics


@torch.no_grad()
def save_reconstructions(model: MultiScaleVQModel, images: np.ndarray, device: torch.device, path: Path) -> None:
    """Save a PNG with a column for each image: the original, its reconstruction, then those from the first scales only."""
    pixels = to_pixels(images, device)
    tokens = model.eval().encode(pixels)
    save_rows([pixels, *(model.decode(tokens[:count]) for count in (len(tokens), *range(1, len(tokens))))], path)


def save_rows(rows: list[Tensor], path: Path) -> None:
    """Save images `[N, 3, Y, X]` in [-1, 1] as a PNG, each tensor as one row."""
    sheet = torch.cat([torch.cat(list(row.float()), dim=-1) for row in rows], dim=-2).clamp(-1, 1)
    values = ((sheet + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    with atomic_file(path) as temporary:
        Image.fromarray(values).save(temporary, format="PNG")
