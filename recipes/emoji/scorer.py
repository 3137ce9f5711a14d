"""Train an `ImageTextModel` to tell which caption a picture of the emoji domain fits.

Text features are frozen and computed once, so every concept of the training split is a negative of every picture (a softmax
over all of them); sigmoid pairs (Zhai et al. 2023, SigLIP) add style, skin tone and colour. Half of the pictures pass the
image tokenizer with wrong codes in them, and many are blurred, so that a score judges shape rather than sharpness.

Shape suffixes: B pictures, Y/X pixels, P concepts, E embedding width.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.emoji.captions import STYLES
from recipes.emoji.config import ScorerConfig
from recipes.emoji.dataset import EmojiDataset, is_held_out_cell
from recipes.emoji.scorer_captions import (
    COLOURS,
    CaptionTable,
    all_captions,
    colours_of,
    full_captions,
    swap_color_words,
    without_style,
)
from vargen.device import preferred_dtype
from vargen.files import atomic_merge
from vargen.models.image_text import ImageTextModel, resized
from vargen.models.tokenizers.vq import VQModel
from vargen.training.dataset import to_pixels
from vargen.training.run import TrainingRun

logger = logging.getLogger("vargen")

_TAGGED = 0.15  # share of concept captions that are keywords or synonyms rather than the name


@dataclass
class Batch:
    """Pictures `[B, 3, Y, X]` in [-1, 1], their concepts `[B]` (-1: changed, belongs to none), captions `[P]` of the concepts,
    full captions `[B]`, and harder ones that do not fit, `[B, K]`."""

    pixels: Tensor
    concept: Tensor
    concept_texts: list[str]
    full_texts: list[str]
    wrong_texts: list[list[str]]


class Batches:
    """Of the training split without its held-out cells, by (seed, step) alone but for copies that the tokenizer made."""

    def __init__(self, data: EmojiDataset, recipe: ScorerConfig, vqvae: VQModel | None, device: torch.device):
        self.data, self.recipe, self.vqvae, self.device = data, recipe, vqvae, device
        records = data.records
        self.indices = np.array([i for i in data.indices("train") if not is_held_out_cell(records[i])])
        self.concepts = sorted({records[i]["concept"] for i in self.indices})
        self.number = {concept: n for n, concept in enumerate(self.concepts)}
        weights = np.array([records[i]["weight"] for i in self.indices], dtype=np.float64)
        self.cumulative = np.cumsum(weights / weights.sum())
        first = {records[i]["concept"]: records[i] for i in self.indices}
        self.texts = [without_style(first[concept]) for concept in self.concepts]
        groups = sorted({first[concept]["group"] for concept in self.concepts})
        self.group = torch.tensor([groups.index(first[concept]["group"]) for concept in self.concepts])
        self.tones: dict[tuple[str, str], list[int]] = {}
        for i in self.indices:
            self.tones.setdefault((records[i]["concept"], records[i]["style"]), []).append(int(i))
        self.copies: dict[int, np.ndarray] = {}

    def __call__(self, step: int) -> Batch:
        recipe, records = self.recipe, self.data.records
        draw = np.random.default_rng((recipe.seed, step))
        words = random.Random(recipe.seed * 1_000_003 + step)
        points = (np.arange(recipe.batch_size) + draw.random(recipe.batch_size)) / recipe.batch_size
        chosen = self.indices[np.searchsorted(self.cumulative, points, side="right").clip(max=len(self.indices) - 1)]
        self._tokenize(chosen[draw.permutation(len(chosen))[: recipe.tokenized_per_step]], draw)
        pictures, concept, full, wrong = [], [], [], []
        for i in chosen.tolist():
            record = records[i]
            picture = np.asarray(self.data.images[i])
            if i in self.copies and draw.random() < recipe.tokenized:
                picture = self.copies[i]
            text = words.choice(full_captions(record))
            others = self._wrong(record, i, words)
            number = self.number[record["concept"]]
            colours = colours_of(record)
            if colours and draw.random() < recipe.recoloured:
                one = words.choice(colours)
                other = words.choice([colour for colour in COLOURS if colour != one])
                order = [0, 1, 2]
                order[COLOURS.index(one)], order[COLOURS.index(other)] = COLOURS.index(other), COLOURS.index(one)
                picture, others, number = picture[..., order], [text, *others][: len(others)], -1
                text = swap_color_words(text, one, other)
            if self.data.can_flip(i) and draw.random() < 0.5:
                picture = picture[:, ::-1]
            pictures.append(picture)
            concept.append(number)
            full.append(text)
            wrong.append(others)
        size = recipe.sizes[step % len(recipe.sizes)]
        pixels = augmented(to_pixels(np.stack(pictures), self.device), size, draw)
        names = [own[0] if words.random() > _TAGGED or len(own) == 1 else words.choice(own[1:]) for own in self.texts]
        return Batch(pixels, torch.tensor(concept), names, full, wrong)

    def _wrong(self, record: dict[str, Any], i: int, words: random.Random) -> list[str]:
        """Two captions that nearly fit: another style, and another skin tone or another concept."""
        style = words.choice([each for each in STYLES if each != record["style"]])
        mates = [j for j in self.tones[record["concept"], record["style"]] if j != i]
        other = self.data.records[words.choice(mates) if mates else int(words.choice(self.indices))]
        return [words.choice(full_captions(record, style)), words.choice(full_captions(other))]

    @torch.no_grad()
    def _tokenize(self, chosen: np.ndarray, draw: np.random.Generator) -> None:
        """Copies of pictures through the tokenizer, a share of their tokens taken from elsewhere."""
        if self.vqvae is None or not len(chosen):
            return
        amp = torch.autocast(self.device.type, torch.bfloat16, enabled=preferred_dtype(self.device) == torch.bfloat16)
        with amp:
            tokens = self.vqvae.encode(to_pixels(self.data.images[chosen], self.device)).cpu().numpy()
            share = draw.random((len(chosen), 1, 1)) * self.recipe.wrong_codes
            others = draw.permutation(tokens.reshape(-1)).reshape(tokens.shape)
            mixed = torch.from_numpy(np.where(draw.random(tokens.shape) < share, others, tokens)).to(self.device)
            pixels = self.vqvae.decode(mixed).float().clamp(-1, 1)
        pictures = ((pixels + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        self.copies.update(zip(chosen.tolist(), pictures, strict=True))


def augmented(pixels_BCYX: Tensor, size: int, draw: np.random.Generator) -> Tensor:
    """Moved by up to a sixteenth, scaled by 0.8 to 1.1 on white, resized, at times blurred or noisy."""
    B = len(pixels_BCYX)
    zoom = torch.from_numpy(draw.uniform(0.8, 1.1, B)).float()
    shift = torch.from_numpy(draw.uniform(-1 / 8, 1 / 8, (B, 2))).float()
    theta = torch.zeros(B, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 1 / zoom
    theta[:, :, 2] = shift
    grid = F.affine_grid(theta, list(pixels_BCYX.shape), align_corners=False).to(pixels_BCYX.device)
    moved = F.grid_sample(pixels_BCYX - 1, grid, align_corners=False) + 1  # white is zero while it moves
    small = resized(moved, size)
    blurred = torch.arange(B) % 3 == 0
    sigma = float(draw.uniform(0.3, 1.5)) * size / 64
    small[blurred] = blur(small[blurred], sigma)
    noisy = torch.arange(B) % 4 == 1
    grain = torch.from_numpy(draw.standard_normal((int(noisy.sum()), *small.shape[1:]), dtype=np.float32)).to(small.device)
    small[noisy] += grain * float(draw.uniform(0, 0.15))
    return small


def blur(pixels_BCYX: Tensor, sigma: float) -> Tensor:
    """Gaussian blur with a standard deviation of `sigma` pixels."""
    reach = max(1, round(3 * sigma))
    at = torch.arange(-reach, reach + 1, dtype=torch.float32, device=pixels_BCYX.device)
    kernel = (-0.5 * (at / sigma) ** 2).exp()
    kernel = (kernel / kernel.sum()).expand(pixels_BCYX.shape[1], 1, 1, -1)
    padded = F.pad(pixels_BCYX, (reach,) * 4, mode="replicate")
    across = F.conv2d(padded, kernel, groups=len(kernel))
    return F.conv2d(across, kernel.transpose(2, 3), groups=len(kernel))


def losses(model: ImageTextModel, batch: Batch, table: CaptionTable, group: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The loss over concepts and the loss over pairs."""
    device = batch.pixels.device
    image = model.encode_image(batch.pixels)
    concepts = model.encode_text(table(batch.concept_texts).to(device))
    logits = model.concept_scale.exp().clamp(max=100) * image @ concepts.T
    known = (batch.concept >= 0).to(device)
    target = batch.concept.to(device)[known]
    mates = group.to(device)[None] == group.to(device)[target][:, None]  # of the same group: twice the weight
    mates[torch.arange(len(target)), target] = False
    of_concept = F.cross_entropy(logits[known] + 0.6931 * mates, target, label_smoothing=smoothing)
    texts = [*batch.full_texts, *(text for own in batch.wrong_texts for text in own)]
    captions = model.encode_text(table(texts).to(device))
    pairs = model.pair_scale.exp().clamp(max=100) * image @ captions.T + model.pair_bias
    fits = torch.tensor([[one == other for other in texts] for one in batch.full_texts], device=device)
    signs = fits.float() * 2 - 1
    of_pairs = -F.logsigmoid(signs * pairs).sum() / len(image)
    return of_concept, of_pairs


@torch.no_grad()
def embed_pictures(model: ImageTextModel, images: np.ndarray, size: int, batch_size: int = 64) -> Tensor:
    """Unit vectors float32 `[N, E]` of uint8 pictures `[N, Y, X, 3]`."""
    device = next(model.parameters()).device
    parts = [
        model.encode_image(resized(to_pixels(images[start : start + batch_size], device), size))
        for start in range(0, len(images), batch_size)
    ]
    return torch.cat(parts).cpu()


def ranked_first(image_NE: Tensor, own_NE: Tensor, others_PE: Tensor, allowed_NP: Tensor, among: int, seed: int = 0) -> float:
    """Share of pictures whose own caption scores above `among` - 1 random other captions."""
    draw = torch.Generator().manual_seed(seed)
    right = (image_NE * own_NE).sum(-1, keepdim=True)
    order = torch.rand(allowed_NP.shape, generator=draw).masked_fill(~allowed_NP, 2.0).argsort(1)[:, : among - 1]
    wrong = (image_NE @ others_PE.T).gather(1, order)
    return float((right > wrong.amax(1, keepdim=True)).float().mean())


@torch.no_grad()
def evaluate_scorer(model: ImageTextModel, data: EmojiDataset, table: CaptionTable, size: int) -> dict[str, float]:
    """Top-1 among 64 captions of pictures without skin tones: held-out concepts, held-out styles of known ones, training.

    Those that the data holds; and the share of pictures whose style is told.
    """
    model.eval()
    records = data.records
    plain = [i for i, record in enumerate(records) if not record["tones"]]
    known = [i for i in plain if records[i]["split"] == "train" and not is_held_out_cell(records[i])]
    parts = {
        "held_out_concepts": [i for i in plain if records[i]["split"] == "validation"],
        "held_out_styles": [i for i in plain if is_held_out_cell(records[i])],
        "training": known[:: max(1, len(known) // 150)],
    }
    figures = {}
    for name, chosen in parts.items():
        if not chosen:
            continue
        split = "validation" if name == "held_out_concepts" else "train"
        others = {records[i]["concept"]: records[i] for i in plain if records[i]["split"] == split}
        keys = sorted(others)
        texts = model.encode_text(table([without_style(others[key])[0] for key in keys])).cpu()
        image = embed_pictures(model, data.images[chosen], size)
        own = model.encode_text(table([without_style(records[i])[0] for i in chosen])).cpu()
        allowed = torch.tensor([[records[i]["concept"] != key for key in keys] for i in chosen])
        figures[name] = ranked_first(image, own, texts, allowed, 64)
        styles = [model.encode_text(table([full_captions(records[i], style)[0] for i in chosen])).cpu() for style in STYLES]
        fits = torch.stack([(image * text).sum(-1) for text in styles], 1).argmax(1)
        drawn = torch.tensor([STYLES.index(records[i]["style"]) for i in chosen])
        figures[f"{name}_style"] = float((fits == drawn).float().mean())
    model.train()
    return figures


def train_scorer(
    recipe: ScorerConfig,
    data: EmojiDataset,
    text_encoder_folder: Path,
    tokenizer_folder: Path | None,
    folder: Path,
    device: torch.device,
) -> dict[str, float]:
    """Train until `recipe.schedule.steps`, resuming what is in `folder`; weights land in `folder/scorer`.

    Args:
        text_encoder_folder: holds `text_encoder/` and `tokenizer/`. tokenizer_folder: a saved `VQModel`, None for no copies.

    Returns the figures of `evaluate_scorer`.
    """
    torch.manual_seed(recipe.seed)
    model = ImageTextModel(**recipe.model).to(device)
    with torch.no_grad():
        if model.text_projection.weight.shape[0] == model.text_projection.weight.shape[1]:
            model.text_projection.weight.copy_(torch.eye(len(model.text_projection.weight)))  # the sentence encoder's own space
        model.text_projection.bias.zero_()
    run = TrainingRun(folder, {"kind": "scorer", "model": dict(recipe.model), "seed": recipe.seed}, recipe.schedule.steps)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=recipe.schedule.learning_rate, betas=(0.9, 0.99),
    )  # fmt: skip
    start = 0
    if state := run.resume(device):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    table = CaptionTable(folder / "captions.npz", all_captions(data.records), text_encoder_folder, device)
    vqvae = None if tokenizer_folder is None else VQModel.from_pretrained(tokenizer_folder).to(device).eval()
    batches = Batches(data, recipe, vqvae, device)
    amp = torch.autocast(device.type, torch.bfloat16, enabled=preferred_dtype(device) == torch.bfloat16)
    model.train()
    for step in run.progress(start):
        for group in optimizer.param_groups:
            group["lr"] = recipe.schedule.learning_rate * recipe.schedule.factor(step)
        batch = batches(step)
        with amp:
            of_concept, of_pairs = losses(model, batch, table, batches.group, recipe.label_smoothing)
        optimizer.zero_grad(set_to_none=True)
        (of_concept + recipe.pair_weight * of_pairs).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done = step + 1
        if done % 10 == 0:
            run.log(done, concept_loss=of_concept.detach(), pair_loss=of_pairs.detach())
        if done % recipe.evaluate_every == 0 or done == recipe.schedule.steps:
            run.log(done, **evaluate_scorer(model, data, table, model.config.image_size))
        if done % recipe.checkpoint_every == 0 or done == recipe.schedule.steps:
            run.checkpoint(done, model=model.state_dict(), optimizer=optimizer.state_dict())
    figures = evaluate_scorer(model, data, table, model.config.image_size)
    with atomic_merge(folder / "scorer") as staged:
        model.eval().save_pretrained(staged)
    run.plot(("concept_loss", "pair_loss"), ("held_out_concepts", "held_out_styles", "training"))
    logger.info("scorer %s: %s", folder, figures)
    return figures
