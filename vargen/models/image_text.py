"""A small image-text model that scores how well an image matches a caption, with a frozen text encoder.

It is trained contrastively as in CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023), with a convolutional image tower,
which learns more from few images than a transformer. The text tower is a linear map of mean-pooled features of a sentence
encoder that is not part of the model, so features of captions can be computed once.

Shape suffixes: B images, C channels, Y/X pixel rows and columns, D pooled width, E embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor, nn

from vargen.compat import tokenized
from vargen.models.storage import QuantizedStorageMixin, validate_weight_format

PATCH = 4  # side of the pixel patches that the first layer folds into channels
_LONGEST = 32  # maximum tokens of a caption


class ImageTowerBlock(nn.Module):
    """Residual block: norm, GELU and 3x3 convolution, twice."""

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, channels), nn.GroupNorm(groups, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.conv2.weight)  # initialized as the identity

    def forward(self, x_BCYX: Tensor) -> Tensor:
        h = self.conv1(F.gelu(self.norm1(x_BCYX)))
        return x_BCYX + self.conv2(F.gelu(self.norm2(h)))


class ImageTextModel(QuantizedStorageMixin, ConfigMixin):
    """Maps images and captions to unit vectors in a common embedding space.

    Args:
        widths: channels per stage; each stage halves the resolution of the one before.
        blocks: residual blocks per stage.
        text_dim: width of the pooled text features.
        embed_dim: dimension E of the common space.
        image_size: width and height in pixels at which images are scored; any multiple of 16 works.
        groups: number of groups of the group norms; must divide every width.
        weight_format: storage format of `save_pretrained`; see `QuantizedStorageMixin`.
    """

    @register_to_config
    def __init__(
        self,
        widths: Sequence[int] = (96, 160, 288),
        blocks: Sequence[int] = (2, 2, 1),
        text_dim: int = 384,
        embed_dim: int = 384,
        image_size: int = 96,
        groups: int = 16,
        weight_format: str | None = None,
    ):
        super().__init__()
        validate_weight_format(weight_format)
        stages: list[nn.Module] = [nn.PixelUnshuffle(PATCH), nn.Conv2d(3 * PATCH**2, widths[0], 3, padding=1)]
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            if stage:
                stages.append(nn.Conv2d(widths[stage - 1], width, 3, stride=2, padding=1))
            stages.append(nn.Sequential(*(ImageTowerBlock(width, groups) for _ in range(count))))
        self.stages = nn.Sequential(*stages)
        self.norm_out = nn.GroupNorm(groups, widths[-1])
        self.image_projection = nn.Linear(widths[-1], embed_dim)
        self.text_projection = nn.Linear(text_dim, embed_dim)
        self.concept_scale = nn.Parameter(torch.tensor(14.0).log())  # scale of the softmax over concepts
        self.pair_scale = nn.Parameter(torch.tensor(10.0).log())  # scale of the sigmoid over pairs, initialized as in SigLIP
        self.pair_bias = nn.Parameter(torch.tensor(-10.0))

    def pool_features(self, pixels_BCYX: Tensor) -> Tensor:
        """Compute features `[B, D]` of float images `[B, 3, Y, X]` in [-1, 1], where Y and X are multiples of 16."""
        return F.gelu(self.norm_out(self.stages(pixels_BCYX))).mean((2, 3))

    def encode_image(self, pixels_BCYX: Tensor) -> Tensor:
        """Embed images as unit vectors, float32 `[B, E]`."""
        return F.normalize(self.image_projection(self.pool_features(pixels_BCYX)).float(), dim=-1)

    def encode_text(self, features_BD: Tensor) -> Tensor:
        """Embed mean-pooled unit text features `[B, text_dim]` as unit vectors, float32 `[B, E]`."""
        return F.normalize(self.text_projection(features_BD).float(), dim=-1)


def resize_images(pixels_BCYX: Tensor, size: int) -> Tensor:
    """Resize images to `size` x `size` pixels."""
    if pixels_BCYX.shape[-1] == size == pixels_BCYX.shape[-2]:
        return pixels_BCYX
    return F.interpolate(pixels_BCYX, (size, size), mode="bilinear", antialias=True, align_corners=False)


@torch.no_grad()
def embed_texts(encoder: nn.Module, tokenizer: Any, texts: Sequence[str], batch_size: int = 256) -> Tensor:
    """Mean-pooled unit text features, float32 `[len(texts), D]` on the CPU, pooled as in the sentence encoder's training."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # similar lengths together, to save padding
    found: list[Tensor] = [torch.empty(0)] * len(texts)
    device = next(encoder.parameters()).device
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        part = [texts[i] for i in rows]
        options = {"padding": True, "truncation": True, "max_length": _LONGEST, "return_tensors": "pt"}
        encoded = tokenized(tokenizer, part, **options).to(device)
        states = encoder(input_ids=encoded.input_ids, attention_mask=encoded.attention_mask)
        mask = encoded.attention_mask[..., None].float()
        mean = F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1).cpu()
        for i, vector in zip(rows, mean, strict=True):
            found[i] = vector
    return torch.stack(found)
