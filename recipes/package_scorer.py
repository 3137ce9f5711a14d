"""A finished scorer run as a packaged scorer: float16 weights, fixed captions, and a card that says what it can tell."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.emoji.dataset import EmojiDataset, is_held_out_cell
from recipes.emoji.scorer import evaluate_scorer
from recipes.emoji.scorer_captions import CaptionTable, all_captions, without_style
from recipes.package import without_traces
from vargen.files import whole_files
from vargen.models.image_text import ImageTextModel
from vargen.models.vq import VQModel
from vargen.scoring.packaged import FILE, PackagedScorer

FIXED = 256  # captions that a picture's score is measured against
_SAMPLE = 256  # pictures that damages are tried on
_LARGEST = 8 * 2**20  # bytes of a packaged scorer


def package_scorer(run: Path, parts: Path, data: EmojiDataset, output: Path, note: str = "") -> dict[str, Any]:
    """Write the scorer of a finished run to `output`, which it replaces; returns the figures of the weights as packaged.

    Args:
        run: its folder, with `scorer/`. parts: a packaged model that holds `text_encoder/`, `tokenizer/` and `vqvae/`.
        note: how it was trained, for the card.

    Raises:
        FileNotFoundError: if the run is not finished.
        ValueError: if the files would be larger than a packaged scorer may be.
    """
    if not (run / "scorer" / "config.json").is_file():
        raise FileNotFoundError(f"run {str(run)!r} must hold scorer/, which `vargen train scorer` writes when it is finished")
    model = ImageTextModel.from_pretrained(run / "scorer", use_safetensors=True).half()
    with whole_files(output) as folder:
        model.save_pretrained(folder)
        without_traces(folder)
        captions = fixed_captions(data)
        (folder / FILE).write_text(json.dumps({"text_encoder": parts.name, "captions": captions}, indent=0) + "\n", "utf-8")
        figures = measured(folder, run, parts, data)
        last = json.loads((run / "log.jsonl").read_text("utf-8").splitlines()[-1])
        (folder / "README.md").write_text(card(model, figures, last, note), "utf-8")
        (folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        if size > _LARGEST:
            raise ValueError(f"a packaged scorer must be of at most {_LARGEST} bytes, and this one takes {size}")
    return figures


def fixed_captions(data: EmojiDataset) -> list[str]:
    """Captions of `FIXED` concepts of the training split, spread evenly, without styles."""
    concepts = {record["concept"]: record for record in data.records if record["split"] == "train" and not record["tones"]}
    keys = sorted(concepts)
    return [without_style(concepts[keys[len(keys) * i // FIXED]])[0] for i in range(min(FIXED, len(keys)))]


def measured(folder: Path, run: Path, parts: Path, data: EmojiDataset) -> dict[str, Any]:
    """What the packaged weights tell: captions among 64, and by how much damage and foreign captions lower a score."""
    table = CaptionTable(run / "captions.npz", all_captions(data.records), parts, torch.device("cpu"))
    model = ImageTextModel.from_pretrained(folder, use_safetensors=True)
    told = evaluate_scorer(model, data, table, model.config.image_size)
    records = data.records
    known = [i for i, r in enumerate(records) if r["split"] == "train" and not r["tones"] and not is_held_out_cell(r)]
    chosen = known[:: max(1, len(known) // _SAMPLE)][:_SAMPLE]
    pictures = torch.from_numpy(data.images[chosen]).permute(0, 3, 1, 2).float() / 255
    prompts = [without_style(records[i])[0] for i in chosen]
    scorer = PackagedScorer(folder, parts)
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


def card(model: ImageTextModel, figures: dict[str, Any], last: dict[str, Any], note: str) -> str:
    """The model card; `last` is the last line of the run's log."""
    told, falls = figures["top_1_of_64"], figures["falls"]
    names = {"held_out_concepts": "concepts held out", "held_out_styles": "styles held out, of concepts it knows"}
    names["training"] = "training pictures"
    shares = "\n".join(
        f"| {called} | {100 * told[name]:.0f} % | {100 * told[name + '_style']:.0f} % |"
        for name, called in names.items()
        if name in told
    )
    fallen = "\n".join(f"| {name} | {each['mean']:+.1f} | {100 * each['share']:.0f} % |" for name, each in falls.items())
    parameters = sum(p.numel() for p in model.parameters())
    return f"""---
license: apache-2.0
library_name: vargen
---
# emoji-scorer: how well does a picture fit its prompt

An image tower of {parameters / 1e6:.1f} M parameters beside the packaged text encoder, for emoji-like pictures. Contrastive
training on the training split, with augmentations, hard negatives of the same group, and copies that went through the packaged
tokenizer, so that it judges shape rather than sharpness: it hardly minds blur.

    vargen score pictures/ --scorers emoji-scorer
    vargen generate "a red apple" --best-of 8

A score is the log odds that picture and prompt belong together, less the mean of those of {FIXED} fixed captions (`{FILE}`).

## What it tells

Real pictures, the right caption among 64, and the style among four:

| pictures | caption | style |
|---|---|---|
{shares}

By how much a score falls, and in which share of {figures["pictures"]} training pictures, whose mean score is
{figures["mean_score"]:.1f}:

| change | mean fall | falls in |
|---|---|---|
{fallen}

The swapped caption is that of another concept of the same group.

## Training

{last['step']:.0f} steps in {last['seconds'] / 3600:.1f} hours. {note}
`vargen train scorer`, then `vargen train package-scorer`. Data and licences: `DATA_CARD.md` beside this folder.
"""
