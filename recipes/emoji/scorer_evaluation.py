"""Evaluate a scorer: accuracy among captions, and how much corruptions of an image lower its score."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.emoji.captions import STYLES, captions_without_style, full_captions
from recipes.emoji.dataset import EmojiDataset, is_held_out_style
from vargen.models.image_text import ImageTextModel, resize_images
from vargen.models.tokenizers.vq import VQModel
from vargen.scoring.image_text import ImageTextScorer
from vargen.training.dataset import to_pixels

if TYPE_CHECKING:
    from recipes.emoji.scorer import CaptionTable

NUM_REFERENCE_CAPTIONS = 256  # captions that an image's score is relative to
_IMAGES = 256  # that are corrupted


@torch.no_grad()
def embed_images(model: ImageTextModel, images: np.ndarray, size: int, batch_size: int = 64) -> Tensor:
    """Return unit vectors float32 `[N, E]` of uint8 images `[N, Y, X, 3]`."""
    device = next(model.parameters()).device
    parts = [
        model.encode_image(resize_images(to_pixels(images[start : start + batch_size], device), size))
        for start in range(0, len(images), batch_size)
    ]
    return torch.cat(parts).cpu()


def top1_accuracy(
    image_NE: Tensor, caption_NE: Tensor, others_PE: Tensor, allowed_NP: Tensor, num_candidates: int, seed: int = 0
) -> float:
    """Return the fraction of images whose own caption scores above `num_candidates` - 1 random other captions."""
    generator = torch.Generator().manual_seed(seed)
    right = (image_NE * caption_NE).sum(-1, keepdim=True)
    order = torch.rand(allowed_NP.shape, generator=generator).masked_fill(~allowed_NP, 2.0).argsort(1)
    wrong = (image_NE @ others_PE.T).gather(1, order[:, : num_candidates - 1])
    return float((right > wrong.amax(1, keepdim=True)).float().mean())


@torch.no_grad()
def evaluate_scorer(model: ImageTextModel, data: EmojiDataset, table: CaptionTable, size: int) -> dict[str, float]:
    """Return the top-1 accuracy among 64 captions, and among styles, of images without skin tones.

    Groups, as far as the data has them: `held_out_concepts`, `held_out_styles` of known concepts, and `training`. The accuracy
    among styles has the suffix `_style`.
    """
    model.eval()
    records = data.records
    plain = [i for i, record in enumerate(records) if not record["tones"]]
    known = [i for i in plain if records[i]["split"] == "train" and not is_held_out_style(records[i])]
    groups = {
        "held_out_concepts": [i for i in plain if records[i]["split"] == "validation"],
        "held_out_styles": [i for i in plain if is_held_out_style(records[i])],
        "training": known[:: max(1, len(known) // 150)],
    }
    metrics = {}
    for name, members in groups.items():
        if not members:
            continue
        split = "validation" if name == "held_out_concepts" else "train"
        others = {records[i]["concept"]: records[i] for i in plain if records[i]["split"] == split}
        keys = sorted(others)
        texts = model.encode_text(table([captions_without_style(others[key])[0] for key in keys])).cpu()
        image = embed_images(model, data.images[members], size)
        right = model.encode_text(table([captions_without_style(records[i])[0] for i in members])).cpu()
        allowed = torch.tensor([[records[i]["concept"] != key for key in keys] for i in members])
        metrics[name] = top1_accuracy(image, right, texts, allowed, 64)
        styles = [model.encode_text(table([full_captions(records[i], style)[0] for i in members])).cpu() for style in STYLES]
        best = torch.stack([(image * text).sum(-1) for text in styles], 1).argmax(1)
        expected = torch.tensor([STYLES.index(records[i]["style"]) for i in members])
        metrics[f"{name}_style"] = float((best == expected).float().mean())
    return metrics


def select_reference_captions(data: EmojiDataset) -> list[str]:
    """Return captions of `NUM_REFERENCE_CAPTIONS` concepts of the training split, evenly spaced, without styles."""
    concepts = {record["concept"]: record for record in data.records if record["split"] == "train" and not record["tones"]}
    keys, count = sorted(concepts), NUM_REFERENCE_CAPTIONS
    return [captions_without_style(concepts[keys[len(keys) * i // count]])[0] for i in range(min(count, len(keys)))]


def measure_packaged(folder: Path, table: CaptionTable, parts: Path, data: EmojiDataset) -> dict[str, Any]:
    """Evaluate packaged weights: accuracy among 64 captions, and how much corruptions and mismatched captions lower a score.

    Args:
        table: features of the captions. parts: a packaged model with `text_encoder/`, `tokenizer/` and `vqvae/`.
    """
    model = ImageTextModel.from_pretrained(folder, use_safetensors=True)
    accuracy = evaluate_scorer(model, data, table, model.config.image_size)
    records = data.records
    known = [i for i, r in enumerate(records) if r["split"] == "train" and not r["tones"] and not is_held_out_style(r)]
    members = known[:: max(1, len(known) // _IMAGES)][:_IMAGES]
    images = torch.from_numpy(data.images[members]).permute(0, 3, 1, 2).float() / 255
    prompts = [captions_without_style(records[i])[0] for i in members]
    scorer = ImageTextScorer(folder, parts)
    scores = scorer.score(images, prompts)
    vqvae = VQModel.from_pretrained(parts / "vqvae").float().eval()
    drops = {"swapped caption": scores - scorer.score(images, mismatched_captions(data, members))}
    for name, corrupted in corruptions(images, vqvae).items():
        drops[name] = scores - scorer.score(corrupted, prompts)
    score_drops = {
        name: {"mean": float(drop.mean()), "share": float((drop > 0).float().mean())} for name, drop in drops.items()
    }
    return {"top_1_of_64": accuracy, "mean_score": float(scores.mean()), "score_drops": score_drops, "images": len(members)}


def mismatched_captions(data: EmojiDataset, members: list[int]) -> list[str]:
    """Return for each image the caption of the next image of another concept, in the same group if possible."""
    records, texts = data.records, []
    for place, i in enumerate(members):
        rest = [*members[place + 1 :], *members[:place]]
        others = [j for j in rest if records[j]["concept"] != records[i]["concept"]]
        same_group = [j for j in others if records[j]["group"] == records[i]["group"]]
        texts.append(captions_without_style(records[(same_group or others)[0]])[0])
    return texts


@torch.no_grad()
def corruptions(images: Tensor, vqvae: VQModel) -> dict[str, Tensor]:
    """Return corrupted copies of images `[N, 3, Y, X]` in [0, 1], by the name of the corruption.

    "through the tokenizer" is the best that a generator on its tokens could do.
    """
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    copies = {f"noise {sigma:g}": (images + sigma * noise).clamp(0, 1) for sigma in (0.1, 0.2, 0.4)}
    copies |= {f"blur {sigma:g} px": blur(images, sigma, padding=1.0) for sigma in (1, 2, 4)}
    decoded = [vqvae.decode(vqvae.encode(part * 2 - 1)) for part in images.split(32)]
    return {**copies, "through the tokenizer": (torch.cat(decoded).clamp(-1, 1) + 1) / 2}


def blur(pixels_BCYX: Tensor, sigma: float, padding: float | None = None) -> Tensor:
    """Blur by a Gaussian with a standard deviation of `sigma` pixels.

    Args:
        padding: the value around the images; by default their border is repeated.
    """
    reach = max(1, round(3 * sigma))
    at = torch.arange(-reach, reach + 1, dtype=torch.float32, device=pixels_BCYX.device)
    kernel = (-0.5 * (at / sigma) ** 2).exp()
    kernel = (kernel / kernel.sum()).expand(pixels_BCYX.shape[1], 1, 1, -1)
    mode = "replicate" if padding is None else "constant"
    padded = F.pad(pixels_BCYX, (reach,) * 4, mode=mode, value=padding)
    across = F.conv2d(padded, kernel, groups=len(kernel))
    return F.conv2d(across, kernel.transpose(2, 3), groups=len(kernel))
