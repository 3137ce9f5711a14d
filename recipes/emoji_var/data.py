"""What a next-scale model is trained on: latents of pictures and features of captions, each computed once.

Shape suffixes: B pictures, C latent channels, R/G latent rows and columns, P caption rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.emoji.dataset import EmojiDataset
from recipes.emoji_var.config import NextScaleConfig
from vargen.models.condition import Condition
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.training.caption_bank import CaptionBank
from vargen.training.variants import Looks, VariantStore
from vargen.weight_files import weights_digest


def encoder_digest(vq: MultiScaleVQModel) -> str:
    """Changes with whatever decides about latents."""
    return weights_digest(vq.encoder, vq.quant_conv)


def check_latents(run: Path, vq: MultiScaleVQModel, tokenizer: Path) -> None:
    """Raise ValueError if a `run` kept latents, and they are of another encoder than that of `tokenizer`."""
    kept = [file.name for file in run.glob("latents-*.npy")]
    if kept and not any(name.startswith(f"latents-{encoder_digest(vq)}-") for name in kept):
        raise ValueError(f"{run} was trained on the latents of another tokenizer than {tokenizer}; give that one")


class LatentStore(VariantStore):
    """Encoder latents of pictures in variants, kept as float16 `[N, variants, C, R, G]`."""

    def __init__(self, folder: Path, images: np.ndarray, vq: MultiScaleVQModel, recipe: NextScaleConfig, device: torch.device):
        self.vq = vq
        side, width = vq.scales[-1], vq.config.codebook_embed_dim
        made_of = encoder_digest(vq)
        super().__init__(folder, "latents", made_of, images, recipe, device, (width, side, side), np.float16)

    def encode(self, pixels_BCYX: Tensor) -> np.ndarray:
        return self.vq.latent(pixels_BCYX).float().cpu().numpy()

    def __call__(self, indices: Sequence[int], variants: Sequence[int]) -> Tensor:
        """float32 `[B, C, R, G]`."""
        return torch.from_numpy(self.rows(indices, variants).astype(np.float32)).to(self.device)


@dataclass(frozen=True)
class Batch:
    """`latents [B, C, R, G]` and the `condition` of their captions, of which some are dropped; and their `texts`."""

    latents: Tensor
    condition: Condition
    texts: list[str]


class Batches:
    """Latents and captions of a step, by (seed, step) alone; see `Looks`."""

    def __init__(self, data: EmojiDataset, store: LatentStore, bank: CaptionBank, recipe: NextScaleConfig):
        self.looks, self.store, self.bank = Looks(data, store, recipe), store, bank

    def __call__(self, step: int, count: int, stream: int = 0) -> Batch:
        """
        Args:
            stream: numbers the batches of a step.
        """
        chosen, variants, texts, dropped = self.looks(step, count, stream)
        condition = self.bank(texts)
        assert condition.caption_mask is not None
        keep = ~dropped.to(condition.caption_mask.device)
        condition = Condition(caption_embeds=condition.caption_embeds, caption_mask=condition.caption_mask & keep[:, None])
        return Batch(self.store(chosen, variants), condition, texts)
