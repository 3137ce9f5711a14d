"""Training data of a next-token model: image tokens and caption features, each computed once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.models.condition import Condition
from vargen.models.llamagen import LlamaGenTransformer
from vargen.models.tokenizers.vq import VQModel
from vargen.pipelines.prompts import left_pad
from vargen.training.dataset import CaptionBank, CaptionedImages
from vargen.training.variants import AugmentedBatches, EncodedVariants
from vargen.weight_files import weights_digest

if TYPE_CHECKING:
    from vargen.training.next_token import NextTokenConfig

_SIDE = 16  # side of the token grid of a blank image
_WHITE = 0.98  # in [-1, 1]; a patch is blank if none of its values is lower


def hash_encoder(vqvae: VQModel) -> str:
    """Return a digest of everything that determines an encoder's tokens: its weights and codebook, but not the decoder."""
    return weights_digest(vqvae.encoder, vqvae.quant_conv, vqvae.quantize)


def hash_tokens(vqvae: VQModel) -> str:
    """Return an identifier of the tokens that a `BackgroundTokenizer` computes; it is also part of the names of token files."""
    code = vqvae.config.blank_code
    return f"{hash_encoder(vqvae)}-blank{'' if code is None else code}"


class BackgroundTokenizer:
    """Encodes images with a single code for all blank patches.

    An encoder with a global receptive field gives each white patch a code that depends on the rest of the image. The first row
    of tokens then identifies the image: a next-token model memorizes images by this row, and at inference, where generated
    rows identify no image, it goes astray. With one code for all blank patches the decoded images are nearly the same (26.7 dB
    instead of 26.9, with the packaged tokenizer), and only the caption determines the image.

    Attributes:
        code: the code of blank patches: the tokenizer's `blank_code`; without one, the most frequent code of a blank image.
            (With the packaged tokenizer, it decodes to white by itself.) Rounded weights may have another most frequent code,
            so a tokenizer whose weights are rounded after a generator was trained needs `blank_code`.
    """

    @torch.no_grad()
    def __init__(self, vqvae: VQModel):
        self.vqvae = vqvae
        if vqvae.config.blank_code is not None:
            self.code = vqvae.config.blank_code
            return
        side = _SIDE * vqvae.downsampling  # independent of the image size: all sizes share the code
        empty = vqvae.encode(torch.ones(1, 3, side, side, device=vqvae.device))
        self.code = int(empty.flatten().mode().values)

    @torch.no_grad()
    def __call__(self, pixels_BCYX: Tensor) -> Tensor:
        """Encode images in [-1, 1] as int64 `[B, N]`, in raster order."""
        lowest = -F.max_pool2d(-pixels_BCYX.float().amin(1, keepdim=True), self.vqvae.downsampling)
        tokens = self.vqvae.encode(pixels_BCYX).flatten(1)
        return tokens.masked_fill(lowest.flatten(1) >= _WHITE, self.code)


def validate_token_cache(run: Path, vqvae: VQModel, tokenizer: Path) -> None:
    """Raise ValueError if a generator's `run` stored tokens of an encoder or codebook other than `tokenizer`'s."""
    cached = list(run.glob("tokens-*.npy"))
    if cached and not any(hash_encoder(vqvae) in path.name for path in cached):
        raise ValueError(f"{run} was trained on the tokens of another tokenizer than {tokenizer}; give that one")


def validate_fit(model: LlamaGenTransformer, vqvae: VQModel, side: int) -> None:
    """Raise ValueError unless the tokens of square images of `side` pixels match the model's grid and vocabulary."""
    grid, vocabulary = model.config.grid_size, model.config.vocab_size
    if side != grid * vqvae.downsampling:
        raise ValueError(
            f"grid_size must be {side // vqvae.downsampling} for images of {side} pixels, got {grid}: "
            f"build the data set at {grid * vqvae.downsampling} pixels, or change grid_size"
        )
    if vocabulary != vqvae.config.codebook_size:
        raise ValueError(f"vocab_size must be the tokenizer's {vqvae.config.codebook_size} codes, got {vocabulary}")


class TokenStore(EncodedVariants):
    """Image tokens by variant, `[images, variants, N]`, stored plus 1: zero means not computed yet.

    Encoding in bfloat16 would change 45 % of the tokens, though to nearby ones: codes lie close together.
    """

    fast = False

    def __init__(self, folder: Path, images: np.ndarray, vqvae: VQModel, config: NextTokenConfig, device: torch.device):
        self.vqvae = vqvae.eval()
        self.tokenize = BackgroundTokenizer(vqvae)
        count = (images.shape[1] // vqvae.downsampling) ** 2
        dtype = np.uint16 if vqvae.config.codebook_size < 2**16 - 1 else np.uint32
        super().__init__(folder, "tokens", hash_tokens(vqvae), images, config, device, (count,), dtype)

    def encode(self, pixels_BCYX: Tensor) -> np.ndarray:
        return self.tokenize(pixels_BCYX).cpu().numpy() + 1

    def __call__(self, indices: Sequence[int], variants: Sequence[int]) -> Tensor:
        """Return int64 `[B, N]`."""
        return torch.from_numpy(self.load(indices, variants).astype(np.int64) - 1).to(self.device)


def pad_left(condition: Condition) -> Condition:
    """Convert features of a `CaptionBank` to the layout of `LlamaGenTransformer`: valid rows last."""
    assert condition.caption_embeds is not None and condition.caption_mask is not None
    embeds, valid = left_pad(condition.caption_embeds, condition.caption_mask)
    return Condition(caption_embeds=embeds, caption_mask=valid)


class CaptionBatches:
    """The batches of a run, as a function of (seed, step): tokens `[B, N]`, caption condition, and dropped captions `[B]`."""

    def __init__(self, data: CaptionedImages, store: TokenStore, bank: CaptionBank, config: NextTokenConfig):
        self.augmented, self.store, self.bank, self.count = (
            AugmentedBatches(data, store, config),
            store,
            bank,
            config.batch_size,
        )

    def __call__(self, step: int) -> tuple[Tensor, Condition, Tensor]:
        indices, variants, texts, dropped = self.augmented(step, self.count)
        return self.store(indices, variants), pad_left(self.bank(texts)), dropped
