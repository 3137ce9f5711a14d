"""The decoder of VQGAN image tokenizers, written out."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor


def official_pixels(network: Any, codes: Tensor) -> Tensor:
    """Pixels of codes `[B, R, G]` by the formulas of the official decoder, from the weights by their official names."""
    weights = network.state_dict()

    def conv(x: Tensor, name: str, padding: int = 1) -> Tensor:
        return F.conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=padding)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.group_norm(x, 32, weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-6)

    def block(x: Tensor, name: str) -> Tensor:
        h = conv(F.silu(norm(x, f"{name}.norm1")), f"{name}.conv1")
        h = conv(F.silu(norm(h, f"{name}.norm2")), f"{name}.conv2")
        return h + (conv(x, f"{name}.nin_shortcut", 0) if f"{name}.nin_shortcut.weight" in weights else x)

    def attend(x: Tensor, name: str) -> Tensor:
        q, k, v = (conv(norm(x, f"{name}.norm"), f"{name}.{each}", 0).flatten(2) for each in "qkv")
        scores = (q.transpose(1, 2) @ k / math.sqrt(x.shape[1])).softmax(-1)
        return x + conv((v @ scores.transpose(1, 2)).view(x.shape), f"{name}.proj_out", 0)

    x = conv(weights["quantize.embedding.weight"][codes].permute(0, 3, 1, 2), "post_quant_conv", 0)
    x = conv(x, "decoder.conv_in")
    x = block(attend(block(x, "decoder.mid.block_1"), "decoder.mid.attn_1"), "decoder.mid.block_2")
    for level in (1, 0):
        for number in range(2):
            x = block(x, f"decoder.up.{level}.block.{number}")
            if f"decoder.up.{level}.attn.{number}.q.weight" in weights:
                x = attend(x, f"decoder.up.{level}.attn.{number}")
        if level:
            x = conv(F.interpolate(x, scale_factor=2.0, mode="nearest"), f"decoder.up.{level}.upsample.conv")
    return conv(F.silu(norm(x, "decoder.norm_out")), "decoder.conv_out")
