"""The convolutional encoder and decoder of VQGAN (Esser et al. 2021), shared by LlamaGen's and VAR's image tokenizers.

The two publish the same network under different parameter names; `VQParameterNames` is that difference.

Shape suffixes: B batch, C channels, Y/X pixel rows and columns, R/G grid rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

NORM_GROUPS = 32


@dataclass(frozen=True)
class VQParameterNames:
    """Names of the network's modules in official checkpoints.

    Attributes:
        down, up: levels of the encoder and of the decoder.
        blocks: residual blocks of a level.
        middle: block, attention and block at the lowest resolution.
        fused: whether queries, keys and values share one convolution `qkv`, instead of three.
        finest_first: whether the decoder's level 0 is the finest, which runs last, instead of the level that runs first.
    """

    down: str
    up: str
    blocks: str
    middle: tuple[str, str, str]
    fused: bool = False
    finest_first: bool = False


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(NORM_GROUPS, channels, eps=1e-6, affine=True)


class ResnetBlock(nn.Module):
    """Residual block: norm, swish and 3x3 conv, twice, with a 1x1 conv on the shortcut if the width changes."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.norm1 = group_norm(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = group_norm(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        if in_channels != out_channels:
            self.nin_shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x_BCYX)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.nin_shortcut(x_BCYX) if hasattr(self, "nin_shortcut") else x_BCYX)


class AttnBlock(nn.Module):
    """Single-head self-attention over all positions of the feature map, with 1x1 convolutions."""

    def __init__(self, channels: int, fused: bool = False):
        super().__init__()
        self.norm = group_norm(channels)
        self.fused = fused
        if fused:
            self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        else:
            self.q = nn.Conv2d(channels, channels, 1)
            self.k = nn.Conv2d(channels, channels, 1)
            self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        B, C, Y, X = x_BCYX.shape
        h = self.norm(x_BCYX)
        maps = self.qkv(h).chunk(3, dim=1) if self.fused else (self.q(h), self.k(h), self.v(h))
        q, k, v = (part.flatten(2).transpose(1, 2).unsqueeze(1) for part in maps)
        attended = F.scaled_dot_product_attention(q, k, v)  # [B, 1, Y*X, C], scale 1/sqrt(C)
        return x_BCYX + self.proj_out(attended.squeeze(1).transpose(1, 2).reshape(B, C, Y, X))


class Downsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        return self.conv(F.pad(x_BCYX, (0, 1, 0, 1)))  # asymmetric padding, as in training


class Upsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        return self.conv(F.interpolate(x_BCYX, scale_factor=2.0, mode="nearest"))


class VQLevel(nn.Module):
    """Blocks of one resolution. At the lowest resolution, attention follows each residual block."""

    def __init__(self, in_channels: int, out_channels: int, blocks: int, attention: bool, naming: VQParameterNames):
        super().__init__()
        widths = [in_channels] + [out_channels] * blocks
        self.naming = naming
        self.add_module(naming.blocks, nn.ModuleList(ResnetBlock(a, b) for a, b in pairwise(widths)))
        self.attn = nn.ModuleList(AttnBlock(out_channels, naming.fused) for _ in range(blocks if attention else 0))

    def forward(self, x_BCYX: Tensor) -> Tensor:
        for i, block in enumerate(getattr(self, self.naming.blocks)):
            x_BCYX = block(x_BCYX)
            if len(self.attn):
                x_BCYX = self.attn[i](x_BCYX)
        return x_BCYX


def make_mid_block(channels: int, naming: VQParameterNames) -> nn.ModuleDict:
    parts = (ResnetBlock(channels, channels), AttnBlock(channels, naming.fused), ResnetBlock(channels, channels))
    return nn.ModuleDict(dict(zip(naming.middle, parts, strict=True)))


class VQEncoder(nn.Module):
    """Encodes pixels `[B, 3, Y, X]` to features `[B, z_channels, Y/2^k, X/2^k]`, k = levels - 1."""

    def __init__(
        self,
        in_channels: int,
        ch: int,
        ch_mult: tuple[int, ...],
        num_res_blocks: int,
        z_channels: int,
        naming: VQParameterNames,
    ):
        super().__init__()
        self.naming = naming
        self.conv_in = nn.Conv2d(in_channels, ch, 3, padding=1)
        widths = [ch] + [ch * m for m in ch_mult]
        last = len(ch_mult) - 1
        levels = nn.ModuleList()
        for i in range(len(ch_mult)):
            level = VQLevel(widths[i], widths[i + 1], num_res_blocks, attention=i == last, naming=naming)
            if i != last:
                level.downsample = Downsample(widths[i + 1])
            levels.append(level)
        self.add_module(naming.down, levels)
        self.mid = make_mid_block(widths[-1], naming)
        self.norm_out = group_norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], z_channels, 3, padding=1)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        h = self.conv_in(x_BCYX)
        for level in getattr(self, self.naming.down):
            h = level(h)
            if hasattr(level, "downsample"):
                h = level.downsample(h)
        for block in self.mid.values():
            h = block(h)
        return self.conv_out(F.silu(self.norm_out(h)))


class VQDecoder(nn.Module):
    """Mirror of the encoder, with one more residual block per level."""

    def __init__(
        self,
        out_channels: int,
        ch: int,
        ch_mult: tuple[int, ...],
        num_res_blocks: int,
        z_channels: int,
        naming: VQParameterNames,
    ):
        super().__init__()
        self.naming = naming
        widths = [ch * m for m in reversed(ch_mult)]
        self.conv_in = nn.Conv2d(z_channels, widths[0], 3, padding=1)
        self.mid = make_mid_block(widths[0], naming)
        levels = []
        for i, width in enumerate(widths):
            level = VQLevel(widths[max(i - 1, 0)], width, num_res_blocks + 1, attention=i == 0, naming=naming)
            if i != len(widths) - 1:
                level.upsample = Upsample(width)
            levels.append(level)
        self.add_module(naming.up, nn.ModuleList(reversed(levels) if naming.finest_first else levels))
        self.norm_out = group_norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], out_channels, 3, padding=1)

    def forward(self, z_BCRG: Tensor) -> Tensor:
        h = self.conv_in(z_BCRG)
        for block in self.mid.values():
            h = block(h)
        levels = getattr(self, self.naming.up)
        for level in reversed(levels) if self.naming.finest_first else levels:
            h = level(h)
            if hasattr(level, "upsample"):
                h = level.upsample(h)
        return self.conv_out(F.silu(self.norm_out(h)))
