"""Training data of a next-token model: image tokens and caption features, each computed once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vargen.models.condition import Condition
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.tokenizers.vq import VQModel
from vargen.pipelines.prompts import left_pad
from vargen.training.blanks import BlankAware, codes_digest, tokens_digest
from vargen.training.caption_bank import CaptionBank
from vargen.training.config import NextTokenConfig
from vargen.training.dataset import CaptionedImages
from vargen.training.variants import Looks, VariantStore


def check_tokens(run: Path, vqvae: VQModel, tokenizer: Path) -> None:
    """Raise ValueError if a generator's `run` stored tokens of an encoder or codebook other than `tokenizer`'s."""
    kept = list(run.glob("tokens-*.npy"))
    if kept and not any(codes_digest(vqvae) in path.name for path in kept):
        raise ValueError(f"{run} was trained on the tokens of another tokenizer than {tokenizer}; give that one")


def check_fit(model: LlamaGenTransformer, vqvae: VQModel, side: int) -> None:
    """Raise ValueError unless the tokens of square images of `side` pixels match the model's grid and vocabulary."""
    grid, vocabulary = model.config.grid_size, model.config.vocab_size
    if side != grid * vqvae.downsampling:
        raise ValueError(
            f"pictures of {side} pixels have {side // vqvae.downsampling} tokens a side with this tokenizer, and the recipe's "
            f"grid_size is {grid}: build the data set at {grid * vqvae.downsampling} pixels, or change grid_size"
        )
    if vocabulary != vqvae.config.codebook_size:
        raise ValueError(f"vocab_size must be the tokenizer's {vqvae.config.codebook_size} codes, got {vocabulary}")


class TokenStore(VariantStore):
    """Image tokens by variant, `[images, variants, N]`, stored plus 1: zero means not computed yet.

    Encoding in bfloat16 would change 45 % of the tokens, though to nearby ones: codes lie close together.
    """

    fast = False

    def __init__(self, folder: Path, images: np.ndarray, vqvae: VQModel, recipe: NextTokenConfig, device: torch.device):
        self.vqvae = vqvae.eval()
        self.tokens_of = BlankAware(vqvae)
        count = (images.shape[1] // vqvae.downsampling) ** 2
        dtype = np.uint16 if vqvae.config.codebook_size < 2**16 - 1 else np.uint32
        super().__init__(folder, "tokens", tokens_digest(vqvae), images, recipe, device, (count,), dtype)

    def encode(self, pixels_BCYX: Tensor) -> np.ndarray:
        return self.tokens_of(pixels_BCYX).cpu().numpy() + 1

    def __call__(self, indices: Sequence[int], variants: Sequence[int]) -> Tensor:
        """Return int64 `[B, N]`."""
        return torch.from_numpy(self.rows(indices, variants).astype(np.int64) - 1).to(self.device)


def left_padded(condition: Condition) -> Condition:
    """Convert features of a `CaptionBank` to the layout of `LlamaGenTransformer`: valid rows last."""
    assert condition.caption_embeds is not None and condition.caption_mask is not None
    embeds, valid = left_pad(condition.caption_embeds, condition.caption_mask)
    return Condition(caption_embeds=embeds, caption_mask=valid)


class Batches:
    """The batches of a run, as a function of (seed, step): tokens `[B, N]`, caption condition, and dropped captions `[B]`."""

    def __init__(self, data: CaptionedImages, store: TokenStore, bank: CaptionBank, recipe: NextTokenConfig):
        self.looks, self.store, self.bank, self.count = Looks(data, store, recipe), store, bank, recipe.batch_size

    def __call__(self, step: int) -> tuple[Tensor, Condition, Tensor]:
        chosen, variants, texts, dropped = self.looks(step, self.count)
        return self.store(chosen, variants), left_padded(self.bank(texts)), dropped
