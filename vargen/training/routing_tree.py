"""All videos that routing could make of a prompt and a seed: a tree of blocks, each by the target or by its draft.

What a block is depends only on the sources of the blocks before it, so a tree of 2^(n - 1) histories contains the videos of
every policy at every setting, and those of an oracle. Histories of one length run as a batch.

Shape suffixes: H histories, F frames of a block, C channels, Y/X rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vargen.decoding.video.denoising import TIMESTEPS, make_block_noise, predict_clean, step_noise_level
from vargen.decoding.video.interfaces import BlockView
from vargen.device import preferred_dtype
from vargen.models.guidance import Condition
from vargen.models.tokenizers.video_vae import DecodeState
from vargen.scoring.frames import FrameScorer
from vargen.scoring.protocol import score_images

TARGET, DRAFT = 0, 1  # sources of a block


@dataclass(frozen=True)
class TreeBlock:
    """One block of a video after every history: row h has the sources of the bits of h, the last block in the lowest bit.

    Attributes:
        target, draft: finished latents `[H, F, C, Y, X]` of the two.
        previous: the last block of each history; None for block 0.
    """

    target: Tensor
    draft: Tensor
    previous: Tensor | None


class _Histories:
    """One network and its cache, a row for each history."""

    def __init__(self, model: Any, condition: Condition, frames: int):
        self.model, self.network = model, model.transformer
        self.text = self.network.text_cache(condition.caption_embeds, condition.caption_mask)
        self.cache = self.network.new_cache(1, frames)

    def branch(self, blocks_HFCYX: Tensor, parents: Sequence[int]) -> None:
        """Continue each row with the blocks of its children."""
        self.cache = self.cache.select_rows(parents)
        self._forward(blocks_HFCYX, 0.0)
        self.cache.commit()

    def _forward(self, x_HFCYX: Tensor, level: float) -> Tensor:
        self.cache.begin_block()
        text = self.text.select_rows([0] * len(x_HFCYX))
        return self.network(x_HFCYX, torch.full((len(x_HFCYX),), level * TIMESTEPS), text, self.cache).float()

    def estimates(self, seed: int, block: int) -> Tensor:
        """Return the clean estimate after each step of the next block, `[steps, H, F, C, Y, X]`."""
        model, rows = self.model, self.cache.keys.shape[1]

        def noise(step: int) -> Tensor:
            return make_block_noise(seed, block, step, model.block_shape, model.device).expand(rows, -1, -1, -1, -1)

        x, found = noise(0), []
        for step, level in enumerate(model.levels):
            found.append(predict_clean(x, self._forward(x, level), level))
            if step + 1 < len(model.levels):
                x = step_noise_level(model, x, found[-1], step, noise)
        return torch.stack(found)


@torch.no_grad()
def build_routing_tree(
    model: Any, condition: Condition, seed: int, blocks: int, exit_step: int | None = None
) -> list[TreeBlock]:
    """Generate all videos of `blocks` blocks whose block 0 is the target's.

    Args:
        model: a `CausalVideoBlockModel` without guidance and window.
        seed: of the noise, as in `decode_video`.
        exit_step: the draft is the target's own estimate after this many steps; None: that of the draft model.

    Returns:
        One entry for each block; that of block n has 2^(n - 1) histories, and that of block 0 one.
    """
    frames = blocks * model.block_shape[0]
    target = _Histories(model, condition, frames)
    drafter = _Histories(model.draft_model, condition, frames) if exit_step is None else None
    found: list[TreeBlock] = []
    previous: Tensor | None = None
    for block in range(blocks):
        own = target.estimates(seed, block)
        drafted = own[:exit_step] if drafter is None else drafter.estimates(seed, block)
        found.append(TreeBlock(own[-1], drafted[-1], previous))
        if block + 1 == blocks:
            break
        rows = range(len(own[-1]))
        if block == 0:
            previous, parents = own[-1], list(rows)
        else:
            previous = torch.stack([own[-1], drafted[-1]], 1).flatten(0, 1)
            parents = [row for row in rows for _ in range(2)]
        for histories in (target, drafter):
            if histories is not None:
                histories.branch(previous, parents)
    return found


@dataclass(frozen=True)
class BlockScores:
    """Scores of the blocks of a `TreeBlock`, float64 `[H]` each.

    Attributes:
        target, draft: mean over the frames of a block. routing: of the draft, as a method that scores drafts sees it.
    """

    target: np.ndarray
    draft: np.ndarray
    routing: np.ndarray


def later_gains(target: Sequence[np.ndarray], draft: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return what a video gains by the target's block instead of the draft, with later blocks of random sources.

    Args:
        target, draft: scores `[H]` of the blocks of a tree, by block.

    Returns:
        From block 1 on, the gain in the sum of the scores of this block and of those after it, `[H]`.
    """
    found: list[np.ndarray] = []
    later_target = later_draft = np.zeros(1)  # mean sums of the scores of later blocks
    for own, drafted in list(zip(target, draft, strict=True))[:0:-1]:
        with_target, with_draft = own + later_target, drafted + later_draft
        found.insert(0, with_target - with_draft)
        mean = (with_target + with_draft) / 2
        later_target, later_draft = mean[0::2], mean[1::2]
    return found


@torch.no_grad()
def score_tree(
    pipe: Any, tree: Sequence[TreeBlock], prompt: str, scorer: FrameScorer, every: int = 1
) -> tuple[list[BlockScores], float]:
    """Decode and score all blocks of a tree, in bfloat16 where that is fast.

    Args:
        pipe: the video pipeline that made it, with a decoder of previews. scorer: scores drafts for routing. every: interval of
            the frames whose scores make up the score of a block, its last one included.

    Returns:
        The scores of each block, and the routing score of block 0.
    """
    device = pipe.transformer.device
    with torch.autocast(device.type, torch.bfloat16, enabled=preferred_dtype(device) == torch.bfloat16):
        return _score_blocks(pipe, tree, pipe.scorer_prompt(prompt), scorer, every)


def _score_blocks(
    pipe: Any, tree: Sequence[TreeBlock], text: str, scorer: FrameScorer, every: int
) -> tuple[list[BlockScores], float]:
    bound = scorer.bind(text)
    state, found, first = None, [], 0.0
    for number, block in enumerate(tree):
        both = torch.cat([block.target, block.draft])
        pixels, after = pipe.vae.decode_block(both, _select(state, [*range(len(block.target))] * 2))
        frames = (pixels / 2 + 0.5).clamp(0, 1)
        frames = frames[:, every - 1 :: every]
        flat = frames.flatten(0, 1)
        scores = score_images(scorer.scorer, flat, [text] * len(flat)).double().unflatten(0, frames.shape[:2]).mean(1)
        own, drafted = scores.chunk(2)
        shown = (pipe.preview_decoder(block.draft) / 2 + 0.5).clamp(0, 1)
        before = None if block.previous is None else (pipe.preview_decoder(block.previous) / 2 + 0.5).clamp(0, 1)[:, -1]
        count = len(block.target)
        if number == 0:
            frames_0 = (pipe.preview_decoder(block.target) / 2 + 0.5).clamp(0, 1)[0]
            first = float(bound(BlockView(0, block.target[0], frames_0, None)).min())
        views = [BlockView(number, block.draft[i], shown[i], None if before is None else before[i]) for i in range(count)]
        routing = np.array([float(bound(view).min()) for view in views])
        found.append(BlockScores(own.numpy(), drafted.numpy(), routing))
        rows = [0] if number == 0 else [part * count + row for row in range(count) for part in (TARGET, DRAFT)]
        state = _select(after, rows)
    return found, first


def _select(state: DecodeState | None, rows: Sequence[int]) -> DecodeState | None:
    if state is None:
        return None
    return DecodeState(state.frames, tuple(part[list(rows)] for part in state.parts))
