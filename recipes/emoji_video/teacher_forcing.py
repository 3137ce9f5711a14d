"""Passes of training over noisy blocks that follow a clean block each, at half of the arithmetic of a pass over both.

The keys and values of the clean blocks are computed once, without gradients, as they come from the cache in generation; Huang
et al. 2025, "Self Forcing" (arXiv:2506.08009), stop the gradients there, too. No pass has blocks that nothing depends on: the
last clean one and the first noisy one.

Shape suffixes: B clips, F frames, C latent channels, Y/X latent rows and columns, H heads, T tokens, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.causal_video_blocks import build_rotary_3d, plan_attention
from vargen.models.causal_video_cache import TextCache, visible_frames


class _Recorded:
    """Stores the keys and values of a layer, then puts them before others."""

    def __init__(self) -> None:
        self.pair: tuple[Tensor, Tensor] | None = None

    def write(self, k_BHTK: Tensor, v_BHTK: Tensor) -> tuple[Tensor, Tensor]:
        if self.pair is None:
            self.pair = k_BHTK, v_BHTK
            return self.pair
        return torch.cat([self.pair[0], k_BHTK], 2), torch.cat([self.pair[1], v_BHTK], 2)


class CleanContext:
    """The keys and values of clean blocks, for passes over the noisy blocks that follow each of them.

    Args:
        clean: latents `[B, F, C, Y, X]` of a video from its start; its last block is not used. text: its text cache.
    """

    def __init__(self, model: CausalVideoTransformer, clean: Tensor, text: TextCache):
        self.block = model.geometry.block_frames
        used = clean[:, : -self.block]
        frames = used.shape[1]
        seen = visible_frames(frames, self.block)
        own = torch.arange(frames) // self.block
        self.seen = torch.cat([seen, own[:, None] == own[None]], 1)
        self.layers = [_Recorded() for _ in model.blocks]
        with torch.no_grad():
            self._run(model, used, torch.zeros(used.shape[:2], device=used.device), text, seen, 0)

    def layer(self, number: int) -> _Recorded:
        return self.layers[number]

    def velocity(self, model: CausalVideoTransformer, noisy: Tensor, timestep: Tensor, text: TextCache) -> Tensor:
        """Predict the velocity `[B, F - block, C, Y, X]` of the noisy blocks after the first one; timestep `[B, F - block]`."""
        return self._run(model, noisy, timestep, text, self.seen, self.block)

    def _run(
        self, model: CausalVideoTransformer, x: Tensor, steps: Tensor, text: TextCache, seen: Tensor, start: int
    ) -> Tensor:
        frames, p = x.shape[1], model.geometry.patch
        rows, columns = (side // p for side in x.shape[3:])
        plan = plan_attention(seen, rows * columns)
        table = build_rotary_3d(model.head_dim, start, frames, rows, columns, x.device)
        cache: Any = self
        out = model.run_blocks(model.embed_patches(x), steps, text, table, plan, cache)
        return model.join_patches(out, frames, columns)
