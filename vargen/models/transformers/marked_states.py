"""States that also say which tokens are image tokens, for networks that treat these in another way than text.

States of a prompt have a last column for it. States without the column are those of image tokens alone, as in all passes after
the prompt, which then read no weight of text.

Shape suffixes: R rows, T tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MarkedEmbedding(nn.Module):
    """Embeddings float `[R, T, D + 1]` of ids `[R, T]`: those of text, behind them those of image tokens."""

    def __init__(self, text: int, image: int, width: int):
        super().__init__()
        self.text, self.image = nn.Embedding(text, width), nn.Embedding(image, width)
        self.num_embeddings = text + image

    @property
    def weight(self) -> Tensor:
        """Float `[text, D]`, whose dtype is that of the network."""
        return self.text.weight

    def forward(self, ids: Tensor) -> Tensor:
        is_image = (ids >= self.text.num_embeddings)[..., None]
        image = self.image((ids - self.text.num_embeddings).clamp(min=0))
        return join_marks(torch.where(is_image, image, self.text(ids.masked_fill(is_image[..., 0], 0))), is_image)

    def embed_image_tokens(self, ids: Tensor) -> Tensor:
        """Embeddings float `[R, T, D]` of ids that are all image tokens."""
        return self.image(ids - self.text.num_embeddings)


def split_marks(states: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """Return states float `[R, T, D]` and which are those of image tokens, bool `[R, T, 1]`; None: all are."""
    if states.shape[-1] == width:
        return states, None
    return states[..., :-1], states[..., -1:] > 0


def join_marks(states: Tensor, is_image: Tensor | None) -> Tensor:
    """Return states as `split_marks` takes them."""
    return states if is_image is None else torch.cat([states, is_image.to(states.dtype)], -1)
