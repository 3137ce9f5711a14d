"""What a generator is trained on: tokens of pictures, made once and kept, and captions as the pipeline encodes them."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from vargen.files import whole_file
from vargen.models.condition import Condition
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.vq import VQModel
from vargen.models.weights import read_arrays, weights_digest
from vargen.pipelines.captions import align_left_padded
from vargen.training.emoji import EmojiDataset, sample_caption
from vargen.training.recipe import GeneratorRecipe
from vargen.training.tokenizer import to_pixels

logger = logging.getLogger("vargen")


def shifted(pictures: np.ndarray, dy: int, dx: int) -> np.ndarray:
    """uint8 pictures `[B, Y, X, 3]` moved by (dy, dx) pixels, white coming in."""
    moved = np.full_like(pictures, 255)
    Y, X = pictures.shape[1:3]
    moved[:, max(dy, 0) : Y + min(dy, 0), max(dx, 0) : X + min(dx, 0)] = pictures[
        :, max(-dy, 0) : Y + min(-dy, 0), max(-dx, 0) : X + min(-dx, 0)
    ]
    return moved


def codes_digest(vqvae: VQModel) -> str:
    """Changes with whatever decides about tokens: encoder and codebook. The decoder has no say in them."""
    return weights_digest(vqvae.encoder, vqvae.quant_conv, vqvae.quantize)


def check_tokens(run: Path, vqvae: VQModel, tokenizer: Path) -> None:
    """Raise ValueError if a generator's `run` kept tokens, and they are of another encoder or codebook than `tokenizer`'s."""
    path = run / "tokens.npz"
    if path.is_file() and codes_digest(vqvae) not in str(read_arrays(path, "made_of")["made_of"]):
        raise ValueError(f"{run} was trained on the tokens of another tokenizer than {tokenizer}; give that one")


def check_fit(model: LlamaGenTransformer, vqvae: VQModel, side: int) -> None:
    """Raise ValueError unless the tokens of square pictures of `side` pixels are those that the model draws."""
    grid, vocabulary = model.config.grid_size, model.config.vocab_size
    if side != grid * vqvae.downsampling:
        raise ValueError(
            f"pictures of {side} pixels have {side // vqvae.downsampling} tokens a side with this tokenizer, and the recipe's "
            f"grid_size is {grid}: build the data set at {grid * vqvae.downsampling} pixels, or change grid_size"
        )
    if vocabulary != vqvae.config.codebook_size:
        raise ValueError(f"vocab_size must be the tokenizer's {vqvae.config.codebook_size} codes, got {vocabulary}")


class TokenStore:
    """Tokens of pictures, computed when first asked for and kept on disk: `[pictures, variants, N]`.

    The file says which encoder and codebook they were made with; those of others are not taken. Variant 0 is a picture itself,
    the others are copies shifted by a fixed list of offsets. A short run on a CPU never pays for the pictures that it does not
    see; a long one has all tokens after its first passes over the data.
    """

    def __init__(self, path: Path, images: np.ndarray, vqvae: VQModel, recipe: GeneratorRecipe, device: torch.device):
        self.path, self.images, self.vqvae, self.device = path, images, vqvae.eval(), device
        shape = (len(images), 1 + recipe.shift_variants, (images.shape[1] // vqvae.downsampling) ** 2)
        limit = recipe.shift_pixels
        shifts = np.random.default_rng(recipe.seed).integers(-limit, limit + 1, (recipe.shift_variants, 2))
        self.offsets = [(0, 0), *map(tuple, shifts.tolist())]
        self.variants = shape[1]
        self.made_of = f"tokenizer {codes_digest(vqvae)}, tokens {shape}, offsets {self.offsets}"
        self.tokens = np.full(shape, -1, dtype=np.int32)
        if path.is_file():
            kept = read_arrays(path, "made_of", "tokens")
            if str(kept["made_of"]) == self.made_of:
                self.tokens = kept["tokens"]
            else:
                logger.warning("%s: made of %s; now %s: tokenising again", path, kept["made_of"], self.made_of)

    @torch.no_grad()
    def __call__(self, indices: np.ndarray, variants: np.ndarray) -> Tensor:
        """int64 `[B, N]` of pictures `indices [B]` at `variants [B]`."""
        missing = self.tokens[indices, variants, 0] < 0
        wanted = list(zip(indices[missing].tolist(), variants[missing].tolist(), strict=True))
        for start in range(0, len(wanted), 32):
            part = wanted[start : start + 32]
            drawn = self.vqvae.encode(self.pictures(*zip(*part, strict=True))).flatten(1).cpu().numpy()
            for (i, v), row in zip(part, drawn, strict=True):
                self.tokens[i, v] = row
        return torch.from_numpy(self.tokens[indices, variants].astype(np.int64))

    def pictures(self, indices: Iterable[int], variants: Iterable[int]) -> Tensor:
        """Float pixels `[B, 3, Y, X]` in [-1, 1] of pictures at their variants."""
        moved = [shifted(self.images[i : i + 1], *self.offsets[v]) for i, v in zip(indices, variants, strict=True)]
        return to_pixels(np.concatenate(moved), self.device)

    def save(self) -> None:
        with whole_file(self.path) as temporary, open(temporary, "wb") as file:
            np.savez(file, tokens=self.tokens, made_of=np.array(self.made_of))


class CaptionFeatures:
    """Caption features as the pipeline makes them: `Condition` of texts."""

    def __init__(self, encoder_folder: Path, rows: int, device: torch.device):
        self.encoder = MiniLMTextEncoder.from_pretrained(encoder_folder / "text_encoder").to(device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(encoder_folder / "tokenizer")
        self.rows, self.device = rows, device

    @torch.no_grad()
    def __call__(self, texts: list[str]) -> Condition:
        # Padding rows are masked and carry no position, so padding to the batch's longest is as good as to all rows.
        encoded = self.tokenizer(texts, padding=True, truncation=True, max_length=self.rows, return_tensors="pt")
        mask = encoded.attention_mask.to(self.device)
        embeds, valid = align_left_padded(self.encoder(encoded.input_ids.to(self.device), mask), mask.bool())
        return Condition(caption_embeds=embeds, caption_mask=valid)


class Batches:
    """Of the training split, by (seed, step) alone: tokens `[B, N]`, texts, captions to drop `[B]`, pixels `[B, 3, Y, X]`."""

    def __init__(self, data: EmojiDataset, store: TokenStore, recipe: GeneratorRecipe):
        self.records, self.store, self.recipe = data.records, store, recipe
        self.indices = data.indices("train")
        weights = np.array([data.records[i]["weight"] for i in self.indices], dtype=np.float64)
        self.cumulative = np.cumsum(weights / weights.sum())

    def _choose(self, count: int, draw: np.random.Generator) -> np.ndarray:
        # Stratified: one draw from each of `count` equal parts of the data, so that a batch is never all flags.
        points = (np.arange(count) + draw.random(count)) / count
        return self.indices[np.searchsorted(self.cumulative, points, side="right").clip(max=len(self.indices) - 1)]

    def captions(self, step: int, part: int = 32) -> Iterator[tuple[list[str], Tensor]]:
        """`plan_captions` texts and their pictures `[part, 3, Y, X]`, in parts of like length: padding costs like words."""
        recipe = self.recipe
        if not recipe.plan_captions:
            return
        chosen = self._choose(recipe.plan_captions, np.random.default_rng((recipe.seed, step, 1)))
        words = random.Random(recipe.seed * 1_000_003 - step - 1)
        texts = [sample_caption(self.records[i], words) for i in chosen]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for start in range(0, len(order), part):
            rows = order[start : start + part]
            yield [texts[i] for i in rows], self.store.pictures(chosen[rows], [0] * len(rows))

    def __call__(self, step: int) -> tuple[Tensor, list[str], Tensor, Tensor]:
        recipe = self.recipe
        draw = np.random.default_rng((recipe.seed, step))
        chosen = self._choose(recipe.batch_size, draw)
        variants = draw.integers(0, self.store.variants, len(chosen))
        rows = self.store(chosen, variants)
        words = random.Random(recipe.seed * 1_000_003 + step)
        texts = [sample_caption(self.records[i], words) for i in chosen]
        dropped = torch.from_numpy(draw.random(len(chosen)) < recipe.caption_dropout)
        return rows, texts, dropped, self.store.pictures(chosen, variants)
