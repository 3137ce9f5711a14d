"""A model that follows a video: it draws some blocks, and sees the clean latents of all, whoever drew them.

Shape suffixes: F latent frames of a block, C channels, Y/X rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vargen.decoding.block_protocols import BlockModel
from vargen.decoding.commits import Commit
from vargen.decoding.flow import noised
from vargen.decoding.noise import gaussian

OnPass = Callable[[], None]  # after every pass; what it raises ends the run


def block_noise(seed: int, block: int, step: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Noise float32 `[1, *shape]` of a step of a block: the same for every model, and whatever was drawn before.

    Args:
        step: 0 for what a block starts from, k for what is added before its step k.
    """
    seeds = torch.tensor([seed], dtype=torch.int64, device=device)
    count = int(torch.Size(shape).numel())
    return gaussian(seeds, block, count, step).reshape(1, *shape)


def next_noisy(model: BlockModel, noisy: Tensor, clean: Tensor, step: int, noise: Callable[[int], Tensor]) -> Tensor:
    """What step `step + 1` is fed, after `step` went from `noisy` to the estimate `clean`: the estimate with fresh noise, or,
    for a model that follows its velocity, the point on the line between the two."""
    level, following = model.levels[step], model.levels[step + 1]
    if model.fresh_noise:
        return noised(clean, noise(step + 1), following)
    return clean + (following / level) * (noisy - clean)


class Follower:
    """A model in one video.

    Args:
        commit: when it sees finished blocks. frames: latent frames that the video may have.
        fused: blocks that wait share the pass of the next block's first step, if the cache has room for all.
        on_pass: called after every pass.

    Attributes:
        passes: made so far, clean passes included. fed: blocks that they fed, which is what they cost on a busy machine.
        waiting: finished blocks that it has not seen.
    """

    def __init__(
        self,
        model: BlockModel,
        condition: Any,
        commit: Commit,
        frames: int,
        fused: bool = False,
        on_pass: OnPass = lambda: None,
    ):
        self.model, self.condition, self.commit, self.fused, self.on_pass = model, condition, commit, fused, on_pass
        self._most = commit.frames(model, frames)
        self.state = model.start(condition, self._most)
        self.waiting: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._carried: list[Tensor] = []
        self._ready = False
        self.passes = self.fed = 0

    def see(self, latents: Tensor, last: bool = False) -> None:
        """A block `[1, F, C, Y, X]` is finished. `last`: the video ends with it, so no pass is made for it."""
        self.waiting.append(latents)
        if self.commit.renews():
            self._kept = self.commit.kept([*self._kept, latents])
            self.waiting = []
        elif self.commit.due(len(self.waiting), last):
            self.catch_up()

    def switch(self, condition: Any) -> None:
        """Go on with another prompt: what waits was made under the old one, and is seen under it."""
        self.catch_up()
        self.condition = condition
        self.model.switch(self.state, condition)

    def catch_up(self, leave: int = 0) -> None:
        """See what waits, but for the last `leave` blocks, in as few passes as the cache has room for."""
        block = self.model.block_shape[0]
        while len(self.waiting) > leave:
            room, count = self.model.room(self.state), 1
            if self.waiting[0].shape[1] == block:  # others, such as a given picture, go alone: blocks are aligned
                count = max(1, min(len(self.waiting) - leave, room // block))
            self._forward(self.waiting[:count])
            del self.waiting[:count]

    def prepare(self) -> None:
        """Make the passes that `draw` would begin with: see finished blocks."""
        if not self._ready:
            self._carried, self._ready = self._before(), True

    def draw(self, noise: Callable[[int], Tensor], first: int = 0, draft: Tensor | None = None) -> Tensor:
        """Denoise the block behind the finished ones: its latents float32 `[1, F, C, Y, X]`.

        Args:
            noise: by step; see `block_noise`.
            first: the step to begin with. draft: what is noised to its level then; None starts from noise.
        """
        model = self.model
        self.prepare()
        clean, self._carried, self._ready = self._carried, [], False
        x = noise(0) if draft is None else noised(draft, noise(first), model.levels[first])
        for step in range(first, len(model.levels)):
            estimate = self._forward(clean, x, model.levels[step])
            assert estimate is not None
            if clean:
                self.waiting, clean = [], []
            x = estimate if step + 1 == len(model.levels) else next_noisy(model, x, estimate, step, noise)
        return x

    def _before(self) -> list[Tensor]:
        """See finished blocks, but for those that the first step is to carry, which are returned."""
        if self.commit.renews():
            self.state, self.waiting = None, list(self._kept)  # freed before the new one is made
            self.state = self.model.start(self.condition, self._most)
        block = self.model.block_shape[0]
        while self.fused and self.waiting and self.waiting[0].shape[1] == block:
            fit = max(1, self.model.room(self.state) // block)
            if len(self.waiting) < fit:
                return list(self.waiting)
            self.catch_up(leave=max(0, len(self.waiting) - fit))
        self.catch_up()
        return []

    def _forward(self, clean: list[Tensor], noisy: Tensor | None = None, level: float = 0.0) -> Tensor | None:
        estimate = self.model.forward(self.state, clean, noisy, level)
        self.passes += 1
        self.fed += len(clean) + (noisy is not None)
        self.on_pass()
        return estimate
