"""Draw with a video model while it is trained: clips to look at, and contexts with the model's own mistakes.

Shape suffixes: B clips, F frames, C latent channels, Y/X latent rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vargen.decoding.video.denoising import TIMESTEPS, add_noise, predict_clean
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.causal_video_cache import TextCache


def make_block_noise(seed: int, block: int, step: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """Noise of one step of one block, float32, by (seed, block, step) alone."""
    generator = torch.Generator().manual_seed((seed * 100_003 + block) * 101 + step)
    return torch.randn(tuple(shape), generator=generator).to(device)


@torch.no_grad()
def draw_latents(
    model: CausalVideoTransformer,
    text: TextCache,
    blocks: int,
    levels: Sequence[float],
    seed: int = 0,
    *,
    euler: bool = False,
    null: TextCache | None = None,
    guidance: float = 1.0,
    first: Tensor | None = None,
) -> Tensor:
    """Clean latents `[B, F, C, Y, X]` of `blocks` blocks.

    Args:
        text: of B captions. levels: noise levels of the steps, from 1 down, without 0.
        euler: follow the velocity from level to level; else go to the clean latents and back to the next level with fresh
        noise. null: of no caption, for guidance: u + guidance (c - u).
        first: clean latents `[B, F, C, Y, X]` of a first block that is given.
    """
    geometry, B = model.geometry, len(text.keys[0])
    device = text.keys[0].device
    guided = null is not None and guidance != 1
    both = text.join(null) if guided and null is not None else text
    copies = 2 if guided else 1
    cache = model.new_cache(copies * B, blocks * geometry.block_frames, dtype=text.keys[0].dtype, device=device)

    def velocity(x: Tensor, level: float) -> Tensor:
        steps = torch.full((copies * B,), level * TIMESTEPS, device=device)
        found = model(x.repeat(copies, 1, 1, 1, 1), steps, both, cache).float()
        if not guided:
            return found
        conditional, unconditional = found.chunk(2)
        return unconditional + guidance * (conditional - unconditional)

    done = []
    for block in range(blocks):
        cache.begin()
        shape = geometry.latent_shape(B)
        x = make_block_noise(seed, block, 0, shape, device) if block or first is None else first
        for step, level in enumerate(levels if block or first is None else ()):
            v = velocity(x, level)
            following = levels[step + 1] if step + 1 < len(levels) else 0.0
            if euler:
                x = x + (following - level) * v
            else:
                x = predict_clean(x, v, level)
                if following:
                    x = add_noise(x, make_block_noise(seed, block, step + 1, shape, device), following)
        done.append(x)
        if block + 1 < blocks:
            velocity(x, 0.0)
            cache.commit()
    return torch.cat(done, 1)
