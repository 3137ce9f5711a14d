"""Token up-sampler: predicts high-resolution tokens from a low-resolution image and the rows accepted so far.

It follows MuLo-SD (2026, arXiv 2601.05149), whose up-sampler regresses latents with masked row-causal convolutions. This one
predicts probabilities, because exact methods need the distribution from which a draft was sampled. It uses the whole
low-resolution image, and of the high-resolution tokens only the rows above, so a row is drafted in one pass.

Shape suffixes: B images, V vocabulary, D width, r/c rows and columns of the low-resolution grid, R/C of the high one,
N = R C.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import Tensor, nn

from vargen.models.storage import ModelMixin, QuantizedStorageMixin, read_weight  # noqa: F401

_ABOVE = (3, 5)  # receptive field at the high resolution: rows above, columns


class _Residual(nn.Module):
    """x + second(silu(first(norm x))), initialized as the identity."""

    def __init__(self, norm: nn.Module, first: nn.Module, second: nn.Module):
        super().__init__()
        self.norm, self.first, self.second = norm, first, second
        for parameter in second.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(self.norm(x))))


def _mix_neighbors(dim: int) -> _Residual:
    return _Residual(nn.GroupNorm(8, dim), nn.Conv2d(dim, 2 * dim, 3, padding=1), nn.Conv2d(2 * dim, dim, 1))


def _mix_channels(dim: int) -> _Residual:
    return _Residual(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim))


class TokenUpsampler(QuantizedStorageMixin, ConfigMixin):
    """Predicts the logits of high-resolution tokens from the low-resolution tokens of an image.

    Args:
        low_grid, grid_size: tokens per side at the low and the high resolution; the second is a multiple of the first.
        dim: width, a multiple of 8.
        blocks: number of residual blocks at the low resolution, and of position-wise blocks at the high resolution.
        codes: digest of the tokens' codebook, which must equal that of a model; None if unknown.
    """

    unquantized_suffixes = ("embedding.weight",)
    layer_prefixes: ClassVar[dict[str, tuple[str, ...]]] = {"blocks": ("low.",)}

    @register_to_config
    def __init__(
        self,
        vocab_size: int = 16384,
        low_grid: int = 8,
        grid_size: int = 16,
        dim: int = 128,
        blocks: int = 3,
        weight_format: str | None = None,
        codes: str | None = None,
    ):
        super().__init__()
        if low_grid < 1 or grid_size % low_grid or grid_size == low_grid:
            raise ValueError(f"grid_size must be a multiple of low_grid, got {grid_size} and {low_grid}")
        if dim < 8 or dim % 8:
            raise ValueError(f"dim must be a multiple of 8, got {dim}")
        self.factor = grid_size // low_grid
        self.embedding = nn.Embedding(vocab_size, dim)
        self.place = nn.Parameter(torch.zeros(1, dim, low_grid, low_grid))
        self.low = nn.Sequential(*(_mix_neighbors(dim) for _ in range(blocks)))
        self.up = nn.Conv2d(dim, dim * self.factor**2, 1)
        self.above = nn.Conv2d(dim + 1, dim, _ABOVE, padding=(0, _ABOVE[1] // 2))
        self.high = nn.Sequential(*(_mix_channels(dim) for _ in range(blocks)))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab_size)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.output.weight, std=0.02)
        nn.init.zeros_(self.output.bias)

    def unquantized_dtype(self, name: str) -> torch.dtype:
        return torch.float16 if self.config.weight_format == "int6" and name == "embedding.weight" else torch.float32

    def features(self, low: Tensor) -> Tensor:
        """Compute features `[B, D, R, C]` from low-resolution tokens `[B, r, c]`, once per image."""
        x = self.low(self.embedding(low).movedim(-1, 1) + read_weight(self, "place"))
        return F.pixel_shuffle(self.up(x), self.factor)

    def forward(self, features: Tensor, tokens: Tensor, known: Tensor, position: Tensor | None = None) -> Tensor:
        """Logits `[B, S, V]` of tokens at positions, from the result of `features`.

        Args:
            tokens, known: int64 and bool `[B, N]`; tokens that are not known are ignored.
            position: int64 `[B, S]`; None: all N positions in raster order.
        """
        x = features.flatten(2).movedim(1, 2)
        if position is None:
            x = x + self._context_all(tokens, known, features.shape[-1])
        else:
            x = x.gather(1, position[..., None].expand(-1, -1, x.shape[-1]))
            x = x + self._context_at(tokens, known, features.shape[-1], position)
        return self.output(self.norm(self.high(x)))

    def _context_all(self, tokens: Tensor, known: Tensor, columns: int) -> Tensor:
        """Features `[B, N, D]` of the rows above each token."""
        seen = self._masked_embedding(tokens, known).movedim(-1, 1).unflatten(2, (-1, columns))
        return self.above(F.pad(seen[:, :, :-1], (0, 0, _ABOVE[0], 0))).flatten(2).movedim(1, 2)  # row i: i - 3 to i - 1

    def _context_at(self, tokens: Tensor, known: Tensor, columns: int, position: Tensor) -> Tensor:
        """The same at some positions, `[B, S, D]`.

        A pass drafts a few tokens, and a convolution of the whole grid would be most of its arithmetic. No state is kept
        between passes, because no other layer depends on high-resolution tokens."""
        rows, width = _ABOVE
        row, column = (position // columns)[..., None], (position % columns)[..., None]
        tap = torch.arange(rows * width, device=position.device)
        row, column = row - rows + tap // width, column - width // 2 + tap % width
        inside = (row >= 0) & (column >= 0) & (column < columns)
        at = torch.where(inside, row * columns + column, 0)
        near, there = (each.gather(1, at.flatten(1)).view_as(at) for each in (tokens, known))
        seen = self._masked_embedding(near, there & inside)
        weight = read_weight(self.above).permute(2, 3, 1, 0).flatten(0, 2)  # same order of taps and channels as in `seen`
        return seen.flatten(2) @ weight + read_weight(self.above, "bias")

    def _masked_embedding(self, tokens: Tensor, known: Tensor) -> Tensor:
        """Features `[..., D + 1]`: the embedding of a known token (else zero), and whether it is known."""
        known = known[..., None]
        return torch.cat([self.embedding(tokens) * known, known.to(self.embedding.weight.dtype)], dim=-1)
