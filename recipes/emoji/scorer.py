"""Train an `ImageTextModel` to score how well an image of the emoji domain matches a caption.

Text features are frozen and computed once, so every concept of the training split is a negative of every image (a softmax over
all of them); sigmoid pairs (Zhai et al. 2023, SigLIP) add style, skin tone and color. Half of the images are reconstructed by
the image tokenizer with wrong codes in them, and many are blurred, so that a score depends on shape rather than sharpness.

Shape suffixes: B images, Y/X pixels, P concepts, M captions, D text features, E embedding width.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from recipes.emoji.captions import (
    CHANNEL_COLORS,
    STYLES,
    all_captions,
    captions_without_style,
    extract_color_words,
    full_captions,
    swap_color_words,
)
from recipes.emoji.dataset import EmojiDataset
from recipes.emoji.scorer_evaluation import blur, evaluate_scorer
from vargen.device import preferred_dtype
from vargen.files import atomic_file
from vargen.models.image_text import ImageTextModel, embed_texts, resize_images
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.tokenizers.vq import VQModel
from vargen.training.augment import WeightedIndices
from vargen.training.config import Schedule, at_least, validate_fractions
from vargen.training.dataset import to_pixels
from vargen.training.run import Trainer, export, fit
from vargen.weight_files import weights_digest

_SYNONYMS = 0.15  # fraction of concept captions that are keywords or synonyms rather than the name


@dataclass(frozen=True)
class ScorerConfig:
    """How to train an `ImageTextModel` on images and captions. `model` contains the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    seed: int = 0
    batch_size: int = 64
    sizes: list[int] = field(default_factory=lambda: [64, 64, 96])  # pixels per side, in turn by step
    reconstruction_probability: float = 0.5  # of using an image's reconstruction by the tokenizer, once there is one
    encoded_per_step: int = 4  # reconstructions made in each step
    code_noise: float = 0.15  # maximum fraction of wrong tokens in a reconstruction
    recolor_probability: float = 0.3  # of changing the color of an image with a color in its name, in both
    label_smoothing: float = 0.05
    pair_weight: float = 1.0  # loss weight of (image, caption with style) pairs relative to concepts
    weight_decay: float = 0.1
    evaluate_every: int = 250
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "evaluate_every", "checkpoint_every")
        at_least(self, 0, "encoded_per_step", "pair_weight", "weight_decay")
        validate_fractions(self, "reconstruction_probability", "code_noise", "recolor_probability", "label_smoothing")
        if not self.sizes or any(size < 16 or size % 16 for size in self.sizes):
            raise ValueError(f"sizes must be multiples of 16, at least one, got {self.sizes}")


class CaptionTable:
    """Mean-pooled unit features float16 `[M, D]` of distinct captions, stored in a file.

    Args:
        path: of the file; written again if captions or encoder differ.
        texts: captions; duplicates are removed.
        encoder_folder: contains `text_encoder/` and `tokenizer/`.
    """

    def __init__(self, path: Path, texts: Iterable[str], encoder_folder: Path, device: torch.device):
        self.texts = sorted(set(texts))
        self.row = {text: number for number, text in enumerate(self.texts)}
        encoder = MiniLMTextEncoder.from_pretrained(encoder_folder / "text_encoder").to(device).eval()
        fingerprint = hashlib.sha256("\n".join([weights_digest(encoder), *self.texts]).encode()).hexdigest()
        if path.is_file():
            with np.load(path) as stored:
                if str(stored["made_of"]) == fingerprint:
                    self.features = torch.from_numpy(stored["features"])
                    return
        tokenizer = AutoTokenizer.from_pretrained(encoder_folder / "tokenizer")
        self.features = embed_texts(encoder, tokenizer, self.texts).half()
        with atomic_file(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, features=self.features.numpy(), made_of=np.array(fingerprint))

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return the features of captions, float32 `[len(texts), D]`."""
        return self.features[[self.row[text] for text in texts]].float()


@dataclass
class ScorerBatch:
    """Images and captions of a step.

    Attributes:
        pixels: `[B, 3, Y, X]` in [-1, 1]. concept: `[B]`, the concept of each image; -1 for recolored images.
        concept_texts: a caption of each concept, `[P]`. full_texts: of each image, `[B]`.
        wrong_texts: hard negatives of each image, `[B, K]`.
    """

    pixels: Tensor
    concept: Tensor
    concept_texts: list[str]
    full_texts: list[str]
    wrong_texts: list[list[str]]


class ScorerBatches:
    """Training images without the held-out styles, as a function of (seed, step) and of the reconstructions made so far."""

    def __init__(self, data: EmojiDataset, config: ScorerConfig, vqvae: VQModel | None, device: torch.device):
        self.data, self.config, self.vqvae, self.device = data, config, vqvae, device
        records = data.records
        self.indices = data.training_indices()
        self.concepts = sorted({records[i]["concept"] for i in self.indices})
        self.number = {concept: n for n, concept in enumerate(self.concepts)}
        weights = np.array([records[i]["weight"] for i in self.indices], dtype=np.float64)
        self.sample = WeightedIndices(self.indices, weights / weights.sum())
        first = {records[i]["concept"]: records[i] for i in self.indices}
        self.texts = [captions_without_style(first[concept]) for concept in self.concepts]
        groups = sorted({first[concept]["group"] for concept in self.concepts})
        self.group = torch.tensor([groups.index(first[concept]["group"]) for concept in self.concepts])
        self.tones: dict[tuple[str, str], list[int]] = {}
        for i in self.indices:
            self.tones.setdefault((records[i]["concept"], records[i]["style"]), []).append(int(i))
        self.reconstructions: dict[int, np.ndarray] = {}

    def __call__(self, step: int) -> ScorerBatch:
        config, records = self.config, self.data.records
        rng = np.random.default_rng((config.seed, step))
        words = random.Random(config.seed * 1_000_003 + step)
        indices = self.sample((np.arange(config.batch_size) + rng.random(config.batch_size)) / config.batch_size)
        self._reconstruct(indices[rng.permutation(len(indices))[: config.encoded_per_step]], rng)
        images, concept, full, wrong = [], [], [], []
        for i in indices.tolist():
            record = records[i]
            image = np.asarray(self.data.images[i])
            if i in self.reconstructions and rng.random() < config.reconstruction_probability:
                image = self.reconstructions[i]
            text = words.choice(full_captions(record))
            negatives = self._hard_negatives(record, i, words)
            number = self.number[record["concept"]]
            colors = extract_color_words(record)
            if colors and rng.random() < config.recolor_probability:
                old = words.choice(colors)
                new = words.choice([color for color in CHANNEL_COLORS if color != old])
                order, a, b = [0, 1, 2], CHANNEL_COLORS.index(old), CHANNEL_COLORS.index(new)
                order[a], order[b] = b, a
                image, negatives, number = image[..., order], [text, *negatives][: len(negatives)], -1
                text = swap_color_words(text, old, new)
            if self.data.can_flip(i) and rng.random() < 0.5:
                image = image[:, ::-1]
            images.append(image)
            concept.append(number)
            full.append(text)
            wrong.append(negatives)
        size = config.sizes[step % len(config.sizes)]
        pixels = augment(to_pixels(np.stack(images), self.device), size, rng)
        names = [texts[0] if words.random() > _SYNONYMS or len(texts) == 1 else words.choice(texts[1:]) for texts in self.texts]
        return ScorerBatch(pixels, torch.tensor(concept), names, full, wrong)

    def _hard_negatives(self, record: dict[str, Any], i: int, words: random.Random) -> list[str]:
        """Sample two captions that almost match: another style, and another skin tone or another concept."""
        style = words.choice([style for style in STYLES if style != record["style"]])
        mates = [j for j in self.tones[record["concept"], record["style"]] if j != i]
        other = self.data.records[words.choice(mates) if mates else int(words.choice(self.indices))]
        return [words.choice(full_captions(record, style)), words.choice(full_captions(other))]

    @torch.no_grad()
    def _reconstruct(self, indices: np.ndarray, rng: np.random.Generator) -> None:
        """Encode and decode images by the tokenizer, with some of their tokens replaced by others of the batch."""
        if self.vqvae is None or not len(indices):
            return
        amp = torch.autocast(self.device.type, torch.bfloat16, enabled=preferred_dtype(self.device) == torch.bfloat16)
        with amp:
            tokens = self.vqvae.encode(to_pixels(self.data.images[indices], self.device)).cpu().numpy()
            fraction = rng.random((len(indices), 1, 1)) * self.config.code_noise
            others = rng.permutation(tokens.reshape(-1)).reshape(tokens.shape)
            mixed = torch.from_numpy(np.where(rng.random(tokens.shape) < fraction, others, tokens)).to(self.device)
            pixels = self.vqvae.decode(mixed).float().clamp(-1, 1)
        images = ((pixels + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        self.reconstructions.update(zip(indices.tolist(), images, strict=True))


def augment(pixels_BCYX: Tensor, size: int, rng: np.random.Generator) -> Tensor:
    """Shift by up to a sixteenth, scale by 0.8 to 1.1 on white, resize, blur a third and add noise to a quarter."""
    B = len(pixels_BCYX)
    zoom = torch.from_numpy(rng.uniform(0.8, 1.1, B)).float()
    shift = torch.from_numpy(rng.uniform(-1 / 8, 1 / 8, (B, 2))).float()
    theta = torch.zeros(B, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 1 / zoom
    theta[:, :, 2] = shift
    grid = F.affine_grid(theta, list(pixels_BCYX.shape), align_corners=False).to(pixels_BCYX.device)
    moved = F.grid_sample(pixels_BCYX - 1, grid, align_corners=False) + 1  # pads with zeros, which are white here
    small = resize_images(moved, size)
    third = torch.arange(B) % 3 == 0
    small[third] = blur(small[third], float(rng.uniform(0.3, 1.5)) * size / 64)
    quarter = torch.arange(B) % 4 == 1
    grain = torch.from_numpy(rng.standard_normal((int(quarter.sum()), *small.shape[1:]), dtype=np.float32)).to(small.device)
    small[quarter] += grain * float(rng.uniform(0, 0.15))
    return small


def contrastive_losses(
    model: ImageTextModel, batch: ScorerBatch, table: CaptionTable, group: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the loss over concepts and the loss over pairs."""
    device = batch.pixels.device
    image = model.encode_image(batch.pixels)
    concepts = model.encode_text(table(batch.concept_texts).to(device))
    logits = model.concept_scale.exp().clamp(max=100) * image @ concepts.T
    known = (batch.concept >= 0).to(device)
    target = batch.concept.to(device)[known]
    mates = group.to(device)[None] == group.to(device)[target][:, None]  # of the same group: twice the weight
    mates[torch.arange(len(target)), target] = False
    concept_loss = F.cross_entropy(logits[known] + 0.6931 * mates, target, label_smoothing=smoothing)
    texts = [*batch.full_texts, *(text for negatives in batch.wrong_texts for text in negatives)]
    captions = model.encode_text(table(texts).to(device))
    pairs = model.pair_scale.exp().clamp(max=100) * image @ captions.T + model.pair_bias
    matches = torch.tensor([[one == other for other in texts] for one in batch.full_texts], device=device)
    signs = matches.float() * 2 - 1
    return concept_loss, -F.logsigmoid(signs * pairs).sum() / len(image)


class ScorerTrainer(Trainer):
    """Trains a scorer."""

    def __init__(
        self,
        config: ScorerConfig,
        data: EmojiDataset,
        text_encoder_folder: Path,
        tokenizer_folder: Path | None,
        folder: Path,
        device: torch.device,
    ):
        torch.manual_seed(config.seed)
        model = ImageTextModel(**config.model)
        with torch.no_grad():
            if model.text_projection.weight.shape[0] == model.text_projection.weight.shape[1]:
                model.text_projection.weight.copy_(torch.eye(len(model.text_projection.weight)))  # start as the text encoder
            model.text_projection.bias.zero_()
        super().__init__(config, model, folder, device, "scorer")
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        self.optimizers = [torch.optim.AdamW(groups, lr=config.schedule.learning_rate, betas=(0.9, 0.99))]
        self.data = data
        self.table = CaptionTable(folder / "captions.npz", all_captions(data.records), text_encoder_folder, device)
        vqvae = None if tokenizer_folder is None else VQModel.from_pretrained(tokenizer_folder).to(device).eval()
        self.batches = ScorerBatches(data, config, vqvae, device)

    def step(self, step: int) -> dict[str, Tensor]:
        batch = self.batches(step)
        with self.amp():
            concept_loss, pair_loss = contrastive_losses(
                self.model, batch, self.table, self.batches.group, self.config.label_smoothing
            )
        self.update(step, concept_loss + self.config.pair_weight * pair_loss)
        return {"concept_loss": concept_loss.detach(), "pair_loss": pair_loss.detach()}

    def evaluate(self) -> dict[str, float]:
        return evaluate_scorer(self.model, self.data, self.table, self.model.config.image_size)


def train_scorer(
    config: ScorerConfig,
    data: EmojiDataset,
    text_encoder_folder: Path,
    tokenizer_folder: Path | None,
    folder: Path,
    device: torch.device,
) -> dict[str, float]:
    """Train until `config.schedule.steps`, resuming the run in `folder`; saves the weights to `folder/scorer`.

    Args:
        text_encoder_folder: contains `text_encoder/` and `tokenizer/`.
        tokenizer_folder: a saved `VQModel`; None for no reconstructions.

    Returns:
        The metrics of `evaluate_scorer`.
    """
    trainer = ScorerTrainer(config, data, text_encoder_folder, tokenizer_folder, folder, device)
    fit(trainer)
    panels = ("concept_loss", "pair_loss"), ("held_out_concepts", "held_out_styles", "training")
    return export(trainer.run, trainer.model, "scorer", trainer.evaluate(), *panels)
