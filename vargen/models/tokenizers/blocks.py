"""Encoders and decoders of image tokenizers: the convolutional one of VQGAN, and a small one of convolutions and a transformer.

LlamaGen and VAR publish VQGAN's network (Esser et al. 2021) under different parameter names: `VQParameterNames`.

The hybrid is designed for 128-pixel images on a CPU: nearly all of its multiplications are in 3x3 convolutions and matrix
products of wide rows. Normalization is per pixel over channels, so no statistic depends on the rest of the image. Statistics of
group norm do, so white borders would change the features of the subject.

Shape suffixes: B batch, C channels, Y/X pixel rows and columns, R/G grid rows and columns, N = R*G.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from diffusers.models.downsampling import Downsample2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

NORM_GROUPS = 32
_NORM_GROUPS_ELSE = 24  # of widths that 32 does not divide, in Infinity's tokenizers
HEAD_WIDTH = 32  # of the attention heads of a hybrid


@dataclass(frozen=True)
class VQParameterNames:
    """Names of the network's modules in official checkpoints.

    Attributes:
        down, up: levels of the encoder and of the decoder.
        blocks: residual blocks of a level.
        middle: block, attention and block at the lowest resolution.
        fused: whether queries, keys and values share one convolution `qkv`, instead of three.
        finest_first: whether the decoder's level 0 is the finest, which runs last, instead of the level that runs first.
        attention: whether there is any.
    """

    down: str
    up: str
    blocks: str
    middle: tuple[str, str, str]
    fused: bool = False
    finest_first: bool = False
    attention: bool = True


def group_norm(channels: int) -> nn.GroupNorm:
    """Group norm of a feature map `[B, C, Y, X]` with `NORM_GROUPS` groups, if these divide it."""
    groups = _NORM_GROUPS_ELSE if channels % NORM_GROUPS else NORM_GROUPS
    return nn.GroupNorm(groups, channels, eps=1e-6, affine=True)


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
            self.q, self.k, self.v = (nn.Conv2d(channels, channels, 1) for _ in range(3))
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        B, C, Y, X = x_BCYX.shape
        h = self.norm(x_BCYX)
        maps = self.qkv(h).chunk(3, dim=1) if self.fused else (self.q(h), self.k(h), self.v(h))
        q, k, v = (part.flatten(2).transpose(1, 2).unsqueeze(1) for part in maps)
        attended = F.scaled_dot_product_attention(q, k, v)  # [B, 1, Y*X, C], scale 1/sqrt(C)
        return x_BCYX + self.proj_out(attended.squeeze(1).transpose(1, 2).reshape(B, C, Y, X))


class VQLevel(nn.Module):
    """Blocks of one resolution. At the lowest resolution, attention follows each residual block, if there is any."""

    def __init__(self, in_channels: int, out_channels: int, blocks: int, attention: bool, naming: VQParameterNames):
        super().__init__()
        widths = [in_channels] + [out_channels] * blocks
        self.naming = naming
        self.add_module(naming.blocks, nn.ModuleList(ResnetBlock(a, b) for a, b in pairwise(widths)))
        self.attn = nn.ModuleList(
            AttnBlock(out_channels, naming.fused) for _ in range(blocks if attention and naming.attention else 0)
        )

    def forward(self, x_BCYX: Tensor) -> Tensor:
        for i, block in enumerate(getattr(self, self.naming.blocks)):
            x_BCYX = block(x_BCYX)
            if len(self.attn):
                x_BCYX = self.attn[i](x_BCYX)
        return x_BCYX


def make_mid_block(channels: int, naming: VQParameterNames) -> nn.ModuleDict:
    """Two residual blocks with attention between them, under their official names; they are run in this order."""
    first, between, last = naming.middle
    parts: dict[str, nn.Module] = {first: ResnetBlock(channels, channels)}
    if naming.attention:
        parts[between] = AttnBlock(channels, naming.fused)
    return nn.ModuleDict({**parts, last: ResnetBlock(channels, channels)})


class VQEncoder(nn.Module):
    """Encodes pixels `[B, 3, Y, X]` to features `[B, z_channels, Y/2^k, X/2^k]`, k = levels - 1."""

    def __init__(
        self, in_channels: int, ch: int, widths: Sequence[int], blocks: int, z_channels: int, naming: VQParameterNames
    ):
        super().__init__()
        self.naming = naming
        self.conv_in = nn.Conv2d(in_channels, ch, 3, padding=1)
        levels = nn.ModuleList()
        for i, (before, width) in enumerate(pairwise([ch, *widths])):
            last = i == len(widths) - 1
            level = VQLevel(before, width, blocks, attention=last, naming=naming)
            if not last:
                level.downsample = Downsample2D(width, use_conv=True, padding=0, name="op")
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
    """Mirror of the encoder, with one more residual block per level, and attention in levels by number, the coarsest first."""

    def __init__(
        self, out_channels: int, widths: Sequence[int], blocks: int, z_channels: int, naming: VQParameterNames,
        attention: Container[int] = (0,),
    ):  # fmt: skip
        super().__init__()
        self.naming = naming
        widths = widths[::-1]
        self.conv_in = nn.Conv2d(z_channels, widths[0], 3, padding=1)
        self.mid = make_mid_block(widths[0], naming)
        levels = []
        for i, width in enumerate(widths):
            level = VQLevel(widths[max(i - 1, 0)], width, blocks + 1, attention=i in attention, naming=naming)
            if i != len(widths) - 1:
                level.upsample = Upsample2D(width, use_conv=True)
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


# -- the hybrid ----------------------------------------------------------------------------------------------------------


def space_to_depth(x_BCYX: Tensor, side: int) -> Tensor:
    """Fold patches of `side` x `side` positions into channels: `[B, C*side*side, Y/side, X/side]`, channels-last."""
    cells = x_BCYX.permute(0, 2, 3, 1).unflatten(1, (-1, side)).unflatten(3, (-1, side)).transpose(2, 3)
    return cells.flatten(3).permute(0, 3, 1, 2)


def depth_to_space(x_BCYX: Tensor, side: int) -> Tensor:
    """The inverse of `space_to_depth`."""
    cells = x_BCYX.permute(0, 2, 3, 1).unflatten(3, (side, side, -1)).transpose(2, 3)
    return cells.flatten(3, 4).flatten(1, 2).permute(0, 3, 1, 2)


class ChannelLayerNorm(nn.Module):
    """Layer norm over the channels of each pixel of `[B, C, Y, X]`; the result is channels-last, for fast convolutions."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x_BCYX: Tensor) -> Tensor:
        channels_last = x_BCYX.permute(0, 2, 3, 1)
        return F.layer_norm(channels_last, self.weight.shape, self.weight, self.bias, 1e-6).permute(0, 3, 1, 2)


class ConvBlock(nn.Module):
    """x + conv(silu(conv(norm(x)))), initialized as the identity. One norm, as it costs two thirds of a convolution."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = ChannelLayerNorm(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        return x_BCYX + self.conv2(F.silu(self.conv1(self.norm(x_BCYX))))


class PatchMerge(nn.Module):
    """Merges four neighbors into one position by a matrix product, which is faster than a strided convolution."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv = nn.Conv2d(4 * in_channels, out_channels, 1)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        return self.conv(space_to_depth(x_BCYX, 2))


class PatchExpand(nn.Module):
    """Expands one position to four neighbors."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 4 * out_channels, 1)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        return depth_to_space(self.conv(x_BCYX), 2)


class ViTBlock(nn.Module):
    """Attention over all positions, then an MLP of four times the width; both are initialized as the identity."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        for last in (self.proj, self.fc2):
            nn.init.zeros_(last.weight)

    def forward(self, x_BNC: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x_BNC)).unflatten(-1, (3, -1, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        # Explicit, because on a CPU fused attention over a few dozen positions is four times slower in the backward pass.
        attended = ((q * HEAD_WIDTH**-0.5) @ k.transpose(-1, -2)).softmax(-1) @ v
        x_BNC = x_BNC + self.proj(attended.transpose(1, 2).flatten(2))
        return x_BNC + self.fc2(F.gelu(self.fc1(self.norm2(x_BNC))))


class ViTTrunk(nn.Module):
    """Transformer blocks over a grid of fixed size, with learned position embeddings."""

    def __init__(self, width: int, side: int, blocks: int):
        super().__init__()
        self.position = nn.Parameter(0.02 * torch.randn(1, side * side, width))
        self.blocks = nn.ModuleList(ViTBlock(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x_BCRG: Tensor) -> Tensor:
        h = x_BCRG.flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            h = block(h)
        return self.norm(h).transpose(1, 2).unflatten(2, x_BCRG.shape[2:])


class HybridEncoder(nn.Module):
    """Encodes pixels `[B, 3, Y, X]` to features float32 `[B, E, R, G]`."""

    def __init__(self, patch: int, widths: tuple[int, ...], side: int, blocks: int, transformer_blocks: int, latent: int):
        super().__init__()
        self.patch = patch
        self.conv_in = nn.Conv2d(3 * patch * patch, widths[0], 3, padding=1)
        self.levels = nn.ModuleList(nn.Sequential(*(ConvBlock(width) for _ in range(blocks))) for width in widths[:-1])
        self.down = nn.ModuleList(PatchMerge(a, b) for a, b in pairwise(widths))
        self.trunk = ViTTrunk(widths[-1], side, transformer_blocks)
        self.out = nn.Conv2d(widths[-1], latent, 1)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        h = self.conv_in(space_to_depth(x_BCYX, self.patch))
        for level, down in zip(self.levels, self.down, strict=True):
            h = down(level(h))
        return self.out(self.trunk(h)).float()


class NormalizedEncoder(HybridEncoder):
    """Encodes to latents with root mean square 1 at each position, so that the commitment loss cannot shrink them."""

    def forward(self, x_BCYX: Tensor) -> Tensor:
        z = super().forward(x_BCYX)
        return z * (z.square().mean(1, keepdim=True) + 1e-6).rsqrt()


class HybridDecoder(nn.Module):
    """Mirror of the encoder."""

    def __init__(self, patch: int, widths: tuple[int, ...], side: int, blocks: int, transformer_blocks: int, latent: int):
        super().__init__()
        self.patch = patch
        widths = tuple(reversed(widths))
        self.conv_in = nn.Conv2d(latent, widths[0], 3, padding=1)
        self.trunk = ViTTrunk(widths[0], side, transformer_blocks)
        self.up = nn.ModuleList(PatchExpand(a, b) for a, b in pairwise(widths))
        self.levels = nn.ModuleList(nn.Sequential(*(ConvBlock(width) for _ in range(blocks))) for width in widths[1:])
        self.norm_out = ChannelLayerNorm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], 3 * patch * patch, 3, padding=1)

    def forward(self, z_BERG: Tensor) -> Tensor:
        return self.enlarge(self.trunk(self.conv_in(z_BERG)))

    def enlarge(self, h: Tensor) -> Tensor:
        """Decode the features of the coarsest level to pixels."""
        for up, level in zip(self.up, self.levels, strict=True):
            h = level(up(h))
        return depth_to_space(self.conv_out(F.silu(self.norm_out(h))), self.patch)
