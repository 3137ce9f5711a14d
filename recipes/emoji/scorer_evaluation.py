"""What a packaged scorer can tell, and the captions that its scores are measured against."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.emoji.dataset import EmojiDataset, is_held_out_cell
from recipes.emoji.scorer import evaluate_scorer
from recipes.emoji.scorer_captions import CaptionTable, all_captions, without_style
from vargen.models.image_text import ImageTextModel
from vargen.models.tokenizers.vq import VQModel
from vargen.scoring.image_text import ImageTextScorer

FIXED = 256  # captions that a picture's score is measured against
_SAMPLE = 256  # pictures that damages are tried on


def fixed_captions(data: EmojiDataset) -> list[str]:
    """Captions of `FIXED` concepts of the training split, spread evenly, without styles."""
    concepts = {record["concept"]: record for record in data.records if record["split"] == "train" and not record["tones"]}
    keys = sorted(concepts)
    return [without_style(concepts[keys[len(keys) * i // FIXED]])[0] for i in range(min(FIXED, len(keys)))]


def measure_packaged(folder: Path, run: Path, parts: Path, data: EmojiDataset) -> dict[str, Any]:
    """What the packaged weights tell: captions among 64, and by how much damage and foreign captions lower a score."""
    table = CaptionTable(run / "captions.npz", all_captions(data.records), parts, torch.device("cpu"))
    model = ImageTextModel.from_pretrained(folder, use_safetensors=True)
    told = evaluate_scorer(model, data, table, model.config.image_size)
    records = data.records
    known = [i for i, r in enumerate(records) if r["split"] == "train" and not r["tones"] and not is_held_out_cell(r)]
    chosen = known[:: max(1, len(known) // _SAMPLE)][:_SAMPLE]
    pictures = torch.from_numpy(data.images[chosen]).permute(0, 3, 1, 2).float() / 255
    prompts = [without_style(records[i])[0] for i in chosen]
    scorer = ImageTextScorer(folder, parts)
    whole = scorer.score(pictures, prompts)
    vqvae = VQModel.from_pretrained(parts / "vqvae").float().eval()
    falls = {"swapped caption": whole - scorer.score(pictures, foreign_captions(data, chosen))}
    for name, damaged in damages(pictures, vqvae).items():
        falls[name] = whole - scorer.score(damaged, prompts)
    fallen = {name: {"mean": float(fall.mean()), "share": float((fall > 0).float().mean())} for name, fall in falls.items()}
    return {"top_1_of_64": told, "mean_score": float(whole.mean()), "falls": fallen, "pictures": len(chosen)}


def foreign_captions(data: EmojiDataset, chosen: list[int]) -> list[str]:
    """For each picture the caption of another concept of its group, of the next one among those chosen."""
    records, found = data.records, []
    for place, i in enumerate(chosen):
        rest = [*chosen[place + 1 :], *chosen[:place]]
        others = [j for j in rest if records[j]["concept"] != records[i]["concept"]]
        alike = [j for j in others if records[j]["group"] == records[i]["group"]]
        found.append(without_style(records[(alike or others)[0]])[0])
    return found


@torch.no_grad()
def damages(pictures: Tensor, vqvae: VQModel) -> dict[str, Tensor]:
    """Pictures `[N, 3, Y, X]` in [0, 1], damaged in several ways; through the tokenizer is how a perfect model would draw."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(pictures.shape, generator=draw)
    found = {f"noise {sigma:g}": (pictures + sigma * noise).clamp(0, 1) for sigma in (0.1, 0.2, 0.4)}
    found |= {f"blur {sigma:g} px": blurred(pictures, sigma) for sigma in (1, 2, 4)}
    codes = [vqvae.decode(vqvae.encode(part * 2 - 1)) for part in pictures.split(32)]
    return {**found, "through the tokenizer": (torch.cat(codes).clamp(-1, 1) + 1) / 2}


def blurred(pictures: Tensor, sigma: float) -> Tensor:
    """By a Gaussian of so many pixels, white beyond the edge."""
    reach = int(np.ceil(3 * sigma))
    places = torch.arange(-reach, reach + 1, dtype=torch.float32)
    kernel = torch.exp(-places.square() / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).expand(3, 1, -1)
    padded = F.pad(copy.copy(pictures), (reach,) * 4, value=1.0)
    across = F.conv2d(padded, kernel[:, :, None], groups=3)
    return F.conv2d(across, kernel[..., None], groups=3)
