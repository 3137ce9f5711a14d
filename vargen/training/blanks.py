"""Tokens of pictures, with one code for whatever is blank.

An encoder that looks at the whole picture gives each white patch a code that depends on all else. To a next-token model the
first row is then the name of a picture: it learns to recite by that name, and drawn rows, which name none, lead it astray. One
code for all blank patches decodes alike (26.7 dB instead of 26.9, by the packaged tokenizer) and leaves the caption to decide.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vargen.models.vq import VQModel

_WHITE = 0.98  # of [-1, 1]; a patch is blank if no value of it lies below


class BlankAware:
    """Encodes pictures of an even white ground.

    Args:
        side: of the pictures, pixels.

    Attributes:
        code: of blank patches: among those that an empty picture has, the one that alone decodes to the purest white.
    """

    @torch.no_grad()
    def __init__(self, vqvae: VQModel, side: int):
        self.vqvae = vqvae
        white = torch.ones(1, 3, side, side, device=vqvae.device)
        tokens = vqvae.encode(white)
        codes = tokens.unique()
        errors = [float((vqvae.decode(torch.full_like(tokens, code)) - white).square().mean()) for code in codes.tolist()]
        self.code = int(codes[errors.index(min(errors))])

    @torch.no_grad()
    def __call__(self, pixels_BCYX: Tensor) -> Tensor:
        """int64 `[B, N]`, in raster order, of pictures in [-1, 1]."""
        lowest = -F.max_pool2d(-pixels_BCYX.float().amin(1, keepdim=True), self.vqvae.downsampling)
        tokens = self.vqvae.encode(pixels_BCYX).flatten(1)
        return tokens.masked_fill(lowest.flatten(1) >= _WHITE, self.code)
