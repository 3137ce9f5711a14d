"""Tree attention masks as bits of 64-bit words: 2 KB for 128 tokens, compared with 541 KB for a mask over 4,096 slots.

Shape suffixes: T tokens of the pass, E + T tokens after the cache pointer, W words.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 64  # bits of an int64


def packed(ancestors: Tensor) -> Tensor:
    """Pack bool `[..., T, E + T]` into int64 `[..., T, W]`: entry j is bit j % 64 of word j // 64. Bit 63 is the sign."""
    padded = torch.nn.functional.pad(ancestors, (0, -ancestors.shape[-1] % WORD)).unflatten(-1, (-1, WORD)).to(torch.int64)
    return (padded << torch.arange(WORD, device=padded.device)).sum(-1)  # bits do not overlap, so the sum equals bitwise or


def unpacked(words: Tensor, count: int) -> Tensor:
    """Unpack int64 `[..., T, W]` into bool `[..., T, count]`: the inverse of `packed`."""
    return ((words[..., None] >> torch.arange(WORD, device=words.device)) & 1).bool().flatten(-2)[..., :count]
