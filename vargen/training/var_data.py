"""What a next-scale model is trained on: latents of pictures and features of captions, each computed once.

Shape suffixes: B pictures, C latent channels, R/G latent rows and columns, P caption rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from vargen.device import fast_dtype
from vargen.models.condition import Condition
from vargen.models.multi_scale_vq import MultiScaleVQModel
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.weights import weights_digest
from vargen.training.emoji import EmojiDataset, is_held_out_cell, sample_caption
from vargen.training.generator_data import shifted
from vargen.training.recolour import COLOURS, HUES, colour_of_hue, dominant_hue, may_change, recoloured_caption, turned
from vargen.training.tokenizer import to_pixels
from vargen.training.var_recipe import VARRecipe

_STYLE_WEIGHT = {"3d": 1.0, "flat": 1.0, "twemoji": 0.2, "noto": 0.2}
_SKIN_TONE_WEIGHT = 0.05
_HALVED_GROUPS = frozenset({"people & body", "flags"})
_SAYS_ITS_COLOUR = 0.1  # share of captions that name the picture's own dominant colour
_PART = 64  # pictures that are encoded at once
_TEXTS = 16  # that are encoded at once
_MOST_TEXTS = 60_000  # whose features are kept in memory: half a gigabyte


def looks(record: dict[str, Any]) -> float:
    """How often a record is seen in training, relative to others."""
    weight = _SKIN_TONE_WEIGHT if record["skin_tone"] else _STYLE_WEIGHT[record["style"]]
    return weight * (0.5 if record["group"] in _HALVED_GROUPS else 1.0)


def encoder_digest(vq: MultiScaleVQModel) -> str:
    """Changes with whatever decides about latents."""
    return weights_digest(vq.encoder, vq.quant_conv)


def check_latents(run: Path, vq: MultiScaleVQModel, tokenizer: Path) -> None:
    """Raise ValueError if a `run` kept latents, and they are of another encoder than that of `tokenizer`."""
    kept = [file.name for file in run.glob("latents-*.npy")]
    if kept and not any(name.startswith(f"latents-{encoder_digest(vq)}-") for name in kept):
        raise ValueError(f"{run} was trained on the latents of another tokenizer than {tokenizer}; give that one")


class LatentStore:
    """Encoder latents of pictures in variants, made when first asked for and kept on disk: float16 `[N, variants, C, R, G]`.

    Variant 0 is the picture itself; then come copies shifted by a fixed list of offsets, then one in each of `COLOURS`. The
    file is mapped and full of holes: what was never asked for takes no space. Its name says which encoder made it. Latents
    are written in order, so one with nothing in its last channel is not there yet, however the run was killed.
    """

    def __init__(self, folder: Path, images: np.ndarray, vq: MultiScaleVQModel, recipe: VARRecipe, device: torch.device):
        self.images, self.vq, self.device = images, vq, device
        limit = recipe.shift_pixels
        drawn = np.random.default_rng(recipe.seed).integers(-limit, limit + 1, (recipe.shift_variants, 2))
        self.offsets = [(0, 0), *map(tuple, drawn.tolist())]
        side, width = vq.scales[-1], vq.config.codebook_embed_dim
        shape = (len(images), len(self.offsets) + len(COLOURS), width, side, side)
        made_of = f"{encoder_digest(vq)}-{recipe.seed}-{limit}-{recipe.shift_variants}"
        path = folder / f"latents-{made_of}.npy"
        folder.mkdir(parents=True, exist_ok=True)
        mode = "r+" if path.is_file() and path.stat().st_size > 2 * np.prod(shape) else "w+"
        self.kept = np.lib.format.open_memmap(path, mode=mode, dtype=np.float16, shape=None if mode == "r+" else shape)
        self.hues: dict[int, float | None] = {}

    def hue(self, i: int) -> float | None:
        """The dominant hue of picture i in degrees, if it has one."""
        if i not in self.hues:
            self.hues[i] = dominant_hue(np.asarray(self.images[i]))
        return self.hues[i]

    def picture(self, i: int, variant: int) -> np.ndarray:
        """uint8 `[Y, X, 3]`.

        Raises:
            ValueError: for a colour of a picture without a dominant one.
        """
        picture = np.asarray(self.images[i])
        if variant < len(self.offsets):
            return shifted(picture[None], *self.offsets[variant])[0]
        hue = self.hue(i)
        if hue is None:
            raise ValueError(f"picture {i} has no dominant colour that could become another")
        return turned(picture, HUES[COLOURS[variant - len(self.offsets)]] - hue)

    @torch.no_grad()
    def __call__(self, indices: Sequence[int], variants: Sequence[int]) -> Tensor:
        """float32 `[B, C, R, G]`."""
        pairs = list(zip(indices, variants, strict=True))
        wanted = [pair for pair in dict.fromkeys(pairs) if not self.kept[pair][-1].any()]
        amp = torch.autocast(self.device.type, torch.bfloat16, enabled=fast_dtype(self.device) == torch.bfloat16)
        for start in range(0, len(wanted), _PART):
            part = wanted[start : start + _PART]
            with amp:
                latents = self.vq.latent(to_pixels(np.stack([self.picture(*pair) for pair in part]), self.device))
            for pair, latent in zip(part, latents.float().cpu().numpy(), strict=True):
                self.kept[pair] = latent
        rows = np.stack([self.kept[pair] for pair in pairs])
        return torch.from_numpy(rows.astype(np.float32)).to(self.device)


class CaptionBank:
    """Caption features, computed once per text: `Condition` of texts, padded to a fixed number of rows.

    Args:
        encoder_folder: holds `text_encoder/` and `tokenizer/`. rows: P; longer captions are cut.
    """

    def __init__(self, encoder_folder: Path, rows: int, device: torch.device):
        self.encoder = MiniLMTextEncoder.from_pretrained(encoder_folder / "text_encoder").to(device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(encoder_folder / "tokenizer")
        self.rows, self.device = rows, device
        self.kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Condition:
        wanted = [text for text in dict.fromkeys(texts) if text not in self.kept]
        if len(self.kept) + len(wanted) > _MOST_TEXTS:
            self.kept.clear()
            wanted = list(dict.fromkeys(texts))
        for start in range(0, len(wanted), _TEXTS):
            part = wanted[start : start + _TEXTS]
            # Always of one shape: else a text's features would depend, in their last bits, on which ones it came with, and
            # a resumed run would not be the unbroken one.
            full = part + [part[0]] * (_TEXTS - len(part))
            options = {"padding": "max_length", "truncation": True, "max_length": self.rows, "return_tensors": "pt"}
            encoded = self.tokenizer(full, **options).to(self.device)
            with torch.autocast(self.device.type, enabled=False):  # whoever asks first, features are the same
                found = self.encoder(encoded.input_ids, encoded.attention_mask)
            for text, rows, count in zip(part, found, encoded.attention_mask.sum(1).tolist(), strict=False):
                self.kept[text] = rows[:count].half()
        width = self.kept[texts[0]].shape[1]
        embeds = torch.zeros(len(texts), self.rows, width, device=self.device)
        mask = torch.zeros(len(texts), self.rows, dtype=torch.bool, device=self.device)
        for i, text in enumerate(texts):
            rows = self.kept[text]
            embeds[i, : len(rows)], mask[i, : len(rows)] = rows.float(), True
        return Condition(caption_embeds=embeds, caption_mask=mask)


@dataclass(frozen=True)
class Batch:
    """`latents [B, C, R, G]` and the `condition` of their captions, of which some are dropped; and their `texts`."""

    latents: Tensor
    condition: Condition
    texts: list[str]


class Batches:
    """Of the training split without its held-out cells, by (seed, step) alone."""

    def __init__(self, data: EmojiDataset, store: LatentStore, bank: CaptionBank, recipe: VARRecipe):
        self.records, self.store, self.bank, self.recipe = data.records, store, bank, recipe
        self.indices = np.array([i for i in data.indices("train") if not is_held_out_cell(data.records[i])], dtype=np.int64)
        weights = np.array([looks(data.records[i]) for i in self.indices])
        self.cumulative = np.cumsum(weights / weights.sum())

    def __call__(self, step: int, count: int, stream: int = 0) -> Batch:
        """
        Args:
            stream: numbers the batches of a step.
        """
        draw = np.random.default_rng((self.recipe.seed, step, stream))
        words = random.Random(f"{self.recipe.seed} {step} {stream}")
        # Stratified: one draw from each of `count` equal parts of the data, so that a batch is never all flags.
        points = (np.arange(count) + draw.random(count)) / count
        chosen = self.indices[np.searchsorted(self.cumulative, points, side="right").clip(max=len(self.indices) - 1)].tolist()
        texts, variants = zip(*[self._variant(i, words) for i in chosen], strict=True)
        condition = self.bank(texts)
        assert condition.caption_mask is not None
        keep = torch.from_numpy(draw.random(count) >= self.recipe.caption_dropout).to(condition.caption_mask.device)
        condition = Condition(caption_embeds=condition.caption_embeds, caption_mask=condition.caption_mask & keep[:, None])
        return Batch(self.store(chosen, variants), condition, list(texts))

    def _variant(self, i: int, words: random.Random) -> tuple[str, int]:
        """A caption of picture i and the variant that fits it."""
        record, text = self.records[i], sample_caption(self.records[i], words)
        variant, chance = words.randrange(len(self.store.offsets)), words.random()
        if chance >= self.recipe.recoloured + _SAYS_ITS_COLOUR or not may_change(record):
            return text, variant
        hue = self.store.hue(i)
        if hue is None:
            return text, variant
        own = colour_of_hue(hue)
        if chance >= self.recipe.recoloured:
            return recoloured_caption(text, own, own) or text, variant
        new = words.choice([colour for colour in COLOURS if colour != own])
        changed = recoloured_caption(text, own, new)
        return (changed, len(self.store.offsets) + COLOURS.index(new)) if changed else (text, variant)
