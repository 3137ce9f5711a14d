"""Tokens of pictures, with one code for whatever is blank.

An encoder that looks at the whole picture gives each white patch a code that depends on all else. To a next-token model the
first row is then the name of a picture: it learns to recite by that name, and drawn rows, which name none, lead it astray. One
code for all blank patches decodes alike (26.7 dB instead of 26.9, by the packaged tokenizer) and leaves the caption to decide.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.models.tokenizers.vq import VQModel
from vargen.weight_files import weights_digest

_SIDE = 16  # tokens of an empty picture
_WHITE = 0.98  # of [-1, 1]; a patch is blank if no value of it lies below


def codes_digest(vqvae: VQModel) -> str:
    """Changes with whatever decides about an encoder's tokens: its weights and codebook. The decoder has no say in them."""
    return weights_digest(vqvae.encoder, vqvae.quant_conv, vqvae.quantize)


def tokens_digest(vqvae: VQModel) -> str:
    """Names the tokens that `BlankAware` makes, also in the names of files that keep them."""
    return f"{codes_digest(vqvae)}-blank"


class BlankAware:
    """Encodes pictures of an even white ground.

    Attributes:
        code: of blank patches: the commonest of an empty picture. (Of the packaged tokenizer's, alone, it decodes to white.)
    """

    @torch.no_grad()
    def __init__(self, vqvae: VQModel):
        self.vqvae = vqvae
        side = _SIDE * vqvae.downsampling  # whatever that of the pictures: all sizes share the code
        empty = vqvae.encode(torch.ones(1, 3, side, side, device=vqvae.device))
        self.code = int(empty.flatten().mode().values)

    @torch.no_grad()
    def __call__(self, pixels_BCYX: Tensor) -> Tensor:
        """int64 `[B, N]`, in raster order, of pictures in [-1, 1]."""
        lowest = -F.max_pool2d(-pixels_BCYX.float().amin(1, keepdim=True), self.vqvae.downsampling)
        tokens = self.vqvae.encode(pixels_BCYX).flatten(1)
        return tokens.masked_fill(lowest.flatten(1) >= _WHITE, self.code)
