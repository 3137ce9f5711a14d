"""Image tokens with a single code for all blank patches.

An encoder with a global receptive field gives each white patch a code that depends on the rest of the image. The first row of
tokens then identifies the image: a next-token model memorizes images by this row, and at inference, where generated rows
identify no image, it goes astray. With one code for all blank patches the decoded images are nearly the same (26.7 dB instead
of 26.9, with the packaged tokenizer), and only the caption determines the image.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.models.tokenizers.vq import VQModel
from vargen.weight_files import weights_digest

_SIDE = 16  # side of the token grid of a blank image
_WHITE = 0.98  # in [-1, 1]; a patch is blank if none of its values is lower


def codes_digest(vqvae: VQModel) -> str:
    """Return a digest of everything that determines an encoder's tokens: its weights and codebook, but not the decoder."""
    return weights_digest(vqvae.encoder, vqvae.quant_conv, vqvae.quantize)


def tokens_digest(vqvae: VQModel) -> str:
    """Return an identifier of the tokens that `BlankAware` computes; it is also part of the names of token files."""
    return f"{codes_digest(vqvae)}-blank"


class BlankAware:
    """Encodes images with a uniform white background.

    Attributes:
        code: the code of blank patches: the most frequent one of a blank image. (With the packaged tokenizer, it decodes to
            white by itself.)
    """

    @torch.no_grad()
    def __init__(self, vqvae: VQModel):
        self.vqvae = vqvae
        side = _SIDE * vqvae.downsampling  # independent of the image size: all sizes share the code
        empty = vqvae.encode(torch.ones(1, 3, side, side, device=vqvae.device))
        self.code = int(empty.flatten().mode().values)

    @torch.no_grad()
    def __call__(self, pixels_BCYX: Tensor) -> Tensor:
        """Encode images in [-1, 1] as int64 `[B, N]`, in raster order."""
        lowest = -F.max_pool2d(-pixels_BCYX.float().amin(1, keepdim=True), self.vqvae.downsampling)
        tokens = self.vqvae.encode(pixels_BCYX).flatten(1)
        return tokens.masked_fill(lowest.flatten(1) >= _WHITE, self.code)
