"""A port of the causal video transformer for tests: one function over a state dict with original names, for one video.

It follows the description of Wan2.1 (arXiv:2503.20314) and of causal generation with a cache (arXiv:2506.08009) step by step,
in float64 and with complex rotary factors, and shares no code with `vargen.models.causal_video`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import conv3d, gelu, layer_norm, linear, pad, silu

State = dict[str, Tensor]
Frames = dict[int, tuple[Tensor, Tensor]]  # by frame: keys and values [N, H, K]


@dataclass
class PortCache:
    """Keys and values of clean frames, by layer and frame.

    Attributes:
        window: frames that a block attends to, with its own and the sinks; None for all. sinks: first frames that remain.
    """

    window: int | None = None
    sinks: int = 0
    layers: dict[int, Frames] = field(default_factory=dict)

    def visible(self, layer: int, first: int, count: int) -> Frames:
        """The frames before `first` to which a block of `count` frames attends."""
        frames = self.layers.setdefault(layer, {})
        if self.window is None:
            return frames
        oldest = first + count - (self.window - self.sinks)
        return {n: pair for n, pair in frames.items() if n < self.sinks or n >= oldest}


def sinusoid(t: float, width: int) -> Tensor:
    rates = torch.tensor([10000.0 ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    return torch.cat([torch.cos(t * rates), torch.sin(t * rates)])


@cache
def rotary(frames: range, rows: int, columns: int, head_dim: int) -> Tensor:
    """Complex factors [F * rows * columns, 1, K / 2]: first pairs turn with time, the next with rows, the last with columns."""
    side = 2 * (head_dim // 6)
    rates = [torch.tensor([10000.0 ** (-i / w) for i in range(0, w, 2)]) for w in (head_dim - 2 * side, side, side)]
    factors = [
        torch.cat([place * rate.double() for place, rate in zip((f, y, x), rates, strict=True)])
        for f in frames
        for y in range(rows)
        for x in range(columns)
    ]
    return torch.polar(torch.ones(1, dtype=torch.float64), torch.stack(factors))[:, None]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Over tokens, for each head: [T, H, K] and [S, H, K] to [T, H * K]."""
    heads = [
        ((q[:, h] @ k[:, h].T) / math.sqrt(q.shape[-1])).softmax(-1) @ v[:, h] for h in range(q.shape[1])
    ]  # fmt: skip
    return torch.cat(heads, -1)


def port(state: State, heads: int, latents: Tensor, t: float, text: Tensor, kept: PortCache, start: int, store: bool) -> Tensor:
    """The velocity `[F, C, Y, X]` of a block.

    Args:
        latents: `[F, C, Y, X]`. t: timestep. text: features `[P, C']`, to be padded to 512 rows.
        start: number of the block's first frame. store: whether to keep the block's keys and values, as after a clean pass.
    """
    w = {name: value.double() for name, value in state.items()}
    dim, head_dim = w["patch_embedding.bias"].shape[0], w["patch_embedding.bias"].shape[0] // heads

    def dense(x: Tensor, name: str) -> Tensor:
        return linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]

    def split(x: Tensor) -> Tensor:
        return x.reshape(len(x), heads, head_dim)

    def turn(x: Tensor, factors: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:2], head_dim // 2, 2).contiguous())
        return torch.view_as_real(pairs * factors).reshape(x.shape)

    count, p = len(latents), w["patch_embedding.weight"].shape[-1]
    grid = conv3d(
        latents.double().transpose(0, 1)[None], w["patch_embedding.weight"], w["patch_embedding.bias"], stride=(1, p, p)
    )[0]
    rows, columns = grid.shape[2:]
    x = grid.permute(1, 2, 3, 0).reshape(-1, dim)
    step = dense(silu(dense(sinusoid(t, w["time_embedding.0.weight"].shape[1]), "time_embedding.0")), "time_embedding.2")
    six = dense(silu(step), "time_projection.1").reshape(6, dim)
    rows_of_text = pad(text.double(), (0, 0, 0, 512 - len(text)))
    context = dense(gelu(dense(rows_of_text, "text_embedding.0"), approximate="tanh"), "text_embedding.2")
    factors = rotary(range(start, start + count), rows, columns, head_dim)
    for layer in range(sum(name.endswith("norm3.weight") for name in w)):
        name = f"blocks.{layer}"
        shift1, scale1, gate1, shift2, scale2, gate2 = w[f"{name}.modulation"][0] + six
        y = layer_norm(x, (dim,), eps=1e-6) * (1 + scale1) + shift1
        q, k = (split(rms(dense(y, f"{name}.self_attn.{n}"), f"{name}.self_attn.norm_{n}")) for n in "qk")
        q, k, v = turn(q, factors), turn(k, factors), split(dense(y, f"{name}.self_attn.v"))
        earlier = kept.visible(layer, start, count)
        keys, values = (torch.cat([*(pair[i] for pair in earlier.values()), own]) for i, own in enumerate((k, v)))
        x = x + dense(attention(q, keys, values), f"{name}.self_attn.o") * gate1
        if store:
            for n, pair in enumerate(zip(k.chunk(count), v.chunk(count), strict=True)):
                kept.layers[layer][start + n] = pair
        y = layer_norm(x, (dim,), w[f"{name}.norm3.weight"], w[f"{name}.norm3.bias"], 1e-6)
        q = split(rms(dense(y, f"{name}.cross_attn.q"), f"{name}.cross_attn.norm_q"))
        k = split(rms(dense(context, f"{name}.cross_attn.k"), f"{name}.cross_attn.norm_k"))
        x = x + dense(attention(q, k, split(dense(context, f"{name}.cross_attn.v"))), f"{name}.cross_attn.o")
        y = layer_norm(x, (dim,), eps=1e-6) * (1 + scale2) + shift2
        x = x + dense(gelu(dense(y, f"{name}.ffn.0"), approximate="tanh"), f"{name}.ffn.2") * gate2
    shift, scale = w["head.modulation"][0] + step
    out = dense(layer_norm(x, (dim,), eps=1e-6) * (1 + scale) + shift, "head.head")
    channels = latents.shape[1]
    cells = out.reshape(count, rows, columns, p, p, channels)
    return torch.einsum("fyxabc->fcyaxb", cells).reshape(latents.shape)
