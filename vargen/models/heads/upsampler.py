"""An up-sampler of tokens: what a low-resolution picture and the rows drawn so far make likely at a higher resolution.

After MuLo-SD (2026, arXiv 2601.05149), whose up-sampler regresses latents with masked row-causal convolutions. This one gives
probabilities, because exact methods need to know what a draft was drawn from. The whole low-resolution picture is seen; of the
tokens at the high resolution only rows above, so that a row is drafted at once.

Shape suffixes: B pictures, V vocabulary, D width, r/c rows and columns of the low-resolution grid, R/C of the high one,
N = R C.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vargen.compat import ensure_torchvision

ensure_torchvision()

from diffusers.configuration_utils import ConfigMixin, register_to_config

from vargen.models.weight_storage import ModelMixin, QuantizedStorageMixin, check_format  # noqa: F401

_ABOVE = (3, 5)  # rows above and columns that are seen of the high resolution


class _Residual(nn.Module):
    """x + conv(silu(conv(norm x))), the identity as built."""

    def __init__(self, dim: int, kernel: int):
        super().__init__()
        self.norm = nn.GroupNorm(8, dim)
        self.first = nn.Conv2d(dim, 2 * dim, kernel, padding=kernel // 2)
        self.second = nn.Conv2d(2 * dim, dim, 1)
        for parameter in self.second.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(self.norm(x))))


class _Place(nn.Module):
    """x + mlp(norm x) at every place by itself, the identity as built."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.first, self.second = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        for parameter in self.second.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(self.norm(x))))


class TokenUpsampler(QuantizedStorageMixin, ConfigMixin):
    """Tokens of one picture at a low resolution to logits of its tokens at a higher one.

    Args:
        vocab_size: V, of both.
        low_grid, grid_size: tokens a side at the low and the high resolution; the second is a multiple of the first.
        dim: width, a multiple of 8.
        blocks: residual blocks at the low resolution, and places' blocks at the high one.
        weight_format: how `save_pretrained` stores the weights; see `QuantizedStorageMixin`.
        codes: digest of the codebook that the tokens are of, which a model's must equal; None if it is not known.

    Raises:
        ValueError: for grids that do not divide each other, or a width that is no multiple of 8.
    """

    kept = ("embedding.weight",)

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
        check_format(weight_format)
        if low_grid < 1 or grid_size % low_grid or grid_size == low_grid:
            raise ValueError(f"grid_size must be a multiple of low_grid, got {grid_size} and {low_grid}")
        if dim < 8 or dim % 8:
            raise ValueError(f"dim must be a multiple of 8, got {dim}")
        self.factor = grid_size // low_grid
        self.embedding = nn.Embedding(vocab_size, dim)
        self.place = nn.Parameter(torch.zeros(1, dim, low_grid, low_grid))
        self.low = nn.Sequential(*(_Residual(dim, 3) for _ in range(blocks)))
        self.up = nn.Conv2d(dim, dim * self.factor**2, 1)
        rows, columns = _ABOVE
        self.above = nn.Conv2d(dim + 1, dim, (rows, columns), padding=(0, columns // 2))
        self.high = nn.Sequential(*(_Place(dim) for _ in range(blocks)))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab_size)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.output.weight, std=0.02)
        nn.init.zeros_(self.output.bias)

    def features(self, low: Tensor) -> Tensor:
        """`[B, D, R, C]` of low-resolution tokens `[B, r, c]`, once for a picture."""
        x = self.low(self.embedding(low).movedim(-1, 1) + self.place)
        return F.pixel_shuffle(self.up(x), self.factor)

    def forward(self, features: Tensor, tokens: Tensor, known: Tensor, position: Tensor | None = None) -> Tensor:
        """Logits `[B, S, V]` of tokens at positions.

        Args:
            features: of `features`.
            tokens: int64 `[B, N]`, of which some are known.
            known: bool `[B, N]`; others are not looked at.
            position: int64 `[B, S]`; None: all N in raster order.
        """
        x = features.flatten(2).movedim(1, 2)
        if position is None:
            x = x + self._above_all(tokens, known, features.shape[-1])
        else:
            x = x.gather(1, position[..., None].expand(-1, -1, x.shape[-1]))
            x = x + self._above_some(tokens, known, features.shape[-1], position)
        return self.output(self.norm(self.high(x)))

    def _above_all(self, tokens: Tensor, known: Tensor, columns: int) -> Tensor:
        """`[B, N, D]` of what is seen above each token."""
        seen = self._seen(tokens, known).movedim(-1, 1).unflatten(2, (-1, columns))
        return self.above(F.pad(seen[:, :, :-1], (0, 0, _ABOVE[0], 0))).flatten(2).movedim(1, 2)  # row i: i - 3 to i - 1

    def _above_some(self, tokens: Tensor, known: Tensor, columns: int, position: Tensor) -> Tensor:
        """The same `[B, S, D]` at positions: a pass drafts a few tokens, and the convolution of a grid would be most of its
        arithmetic. Nothing has to be kept from pass to pass, because no other layer looks at tokens of the high resolution."""
        rows, width = _ABOVE
        row, column = (position // columns)[..., None], (position % columns)[..., None]
        tap = torch.arange(rows * width, device=position.device)
        row, column = row - rows + tap // width, column - width // 2 + tap % width
        inside = (row >= 0) & (column >= 0) & (column < columns)
        at = torch.where(inside, row * columns + column, 0)
        near, there = (each.gather(1, at.flatten(1)).view_as(at) for each in (tokens, known))
        seen = self._seen(near, there & inside)
        weight = self.above.weight.permute(2, 3, 1, 0).flatten(0, 2)  # as the taps and their channels lie in `seen`
        return seen.flatten(2) @ weight + self.above.bias

    def _seen(self, tokens: Tensor, known: Tensor) -> Tensor:
        """`[..., D + 1]`: a known token's embedding, and whether it is known."""
        known = known[..., None]
        return torch.cat([self.embedding(tokens) * known, known.to(self.embedding.weight.dtype)], dim=-1)
