"""Train a `BlockRouter` for the drafts of a pair of video models, from pairs of blocks that the pair itself generates.

Both models continue the same past, in trees of all routed videos. The router predicts how much this and
later blocks gain by the target's block instead of the draft: a ridge regression in closed form. The pairs of each video are
stored, so that a killed run continues. Equal prompts, seeds and weights give equal routers.

What a block is depends only on the sources of the blocks before it, so a tree of 2^(n - 1) histories contains the videos of
every policy at every setting, and those of an oracle. Histories of one length run as a batch.

Shape suffixes: H histories, F frames of a block, C channels, Y/X rows and columns.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from vargen.decoding.video.denoising import TIMESTEPS, make_block_noise, predict_clean, step_noise_level
from vargen.decoding.video.interfaces import BlockView
from vargen.device import preferred_dtype
from vargen.files import atomic_file, atomic_merge
from vargen.models.causal_video.decoding import RANKS, BlockRouter, describe_draft
from vargen.models.guidance import Condition
from vargen.models.tokenizers.video_vae import DecodeState
from vargen.pipelines.seeds import resolve_seeds
from vargen.pipelines.videos import drafter_digest
from vargen.scoring.frames import FrameScorer
from vargen.scoring.protocol import score_images
from vargen.training.loop import at_least
from vargen.weight_files import weights_digest

logger = logging.getLogger("vargen")
METRICS_FILE = "training.json"
_FOLDS = 4  # of the videos: what calibrates a share is predicted by a fit without the video


@dataclass(frozen=True)
class RouterConfig:
    """How to train a `BlockRouter`.

    Attributes:
        blocks: of each tree, which has 2^(blocks - 1) - 1 pairs.
        seeds: each of the first prompt of a round over all prompts; the next prompt has one more.
        exit_step: as in `VideoMethod`. ridge: penalty, per pair, of the squared weights of standardized statistics.
        every: interval of the frames of a block that are scored.
    """

    blocks: int = 6
    seeds: tuple[int, ...] = (0,)
    exit_step: int = 0
    ridge: float = 0.1
    every: int = 2

    def __post_init__(self) -> None:
        at_least(self, 2, "blocks")
        at_least(self, 1, "every")
        at_least(self, 0, "exit_step", "ridge")
        if not self.seeds or min(self.seeds) < 0:
            raise ValueError(f"seeds must be one or more numbers from 0 on, got {self.seeds!r}")


@dataclass(frozen=True)
class RouterPairs:
    """Pairs of a prompt and a seed: statistics of the drafts, float32 `[n, D]`, and `later_gains`, float32 `[n]`."""

    statistics: np.ndarray
    gains: np.ndarray


def generate_pairs(pipe: Any, prompt: str, seed: int, config: RouterConfig) -> RouterPairs:
    """Generate the tree of a prompt and return its pairs, from block 1 on."""
    model, condition = pipe.decoding_model(), pipe.encode_video_condition(prompt)
    noise_seed = int(resolve_seeds(torch.Generator().manual_seed(seed), 1).noise_seeds[0])
    tree = build_routing_tree(model, condition, noise_seed, config.blocks, config.exit_step or None)
    first = tree[0].target
    scores, _ = score_tree(pipe, tree, prompt, FrameScorer(pipe.resolve_frame_scorer().scorer, frames=1), config.every)
    gains = later_gains([score.target for score in scores], [score.draft for score in scores])
    found = [
        describe_draft(block.draft, block.previous, first.expand_as(block.draft), number)
        for number, block in enumerate(tree)
        if block.previous is not None
    ]
    return RouterPairs(torch.cat(found).cpu().numpy(), np.concatenate(gains).astype(np.float32))


def stored_pairs(pipe: Any, prompts: Sequence[str], folder: Path, config: RouterConfig) -> list[RouterPairs]:
    """Return the pairs of each seed and prompt, from the run in `folder` where they are stored."""
    networks = (pipe.transformer, None if config.exit_step else pipe.draft_transformer, pipe.vae)
    name = f"{weights_digest(*networks)}-{config.blocks}-{config.exit_step}-{config.every}"
    place = folder / "pairs"
    place.mkdir(parents=True, exist_ok=True)
    found = []
    videos = [(start + number, prompt) for start in config.seeds for number, prompt in enumerate(prompts)]
    for seed, prompt in tqdm(videos, desc="generating pairs", mininterval=5):
        path = place / f"{name}-{seed}.npz"
        stored = _load(path, prompt) if path.is_file() else None
        if stored is None:
            stored = generate_pairs(pipe, prompt, seed, config)
            with atomic_file(path) as temporary, open(temporary, "wb") as file:
                text = np.frombuffer(prompt.encode(), dtype=np.uint8)
                np.savez(file, statistics=stored.statistics, later_gains=stored.gains, prompt=text)
        found.append(stored)
    return found


def _load(path: Path, prompt: str) -> RouterPairs | None:
    """Return stored pairs; None if they are of another prompt or older than `later_gains`."""
    with np.load(path, allow_pickle=False) as file:
        same = file["prompt"].tobytes().decode() == prompt and "later_gains" in file
        return RouterPairs(file["statistics"], file["later_gains"]) if same else None


def fit_router(router: BlockRouter, pairs: Sequence[RouterPairs], ridge: float) -> dict[str, float]:
    """Fit a router in closed form, and calibrate its ranks on predictions for videos that the fit did not see.

    Returns:
        `correlation` of such predictions with the gains; `gain`, the mean gain; `deviation` of gains; numbers of `pairs` and
        `videos`.
    """
    if len(pairs) < 2:
        raise ValueError(f"prompts must be at least 2, got {len(pairs)}")
    predictions = []
    for fold in np.array_split(np.arange(len(pairs)), min(_FOLDS, len(pairs))):
        _solve(router, [*pairs[: fold[0]], *pairs[fold[-1] + 1 :]], ridge)
        predictions += [_predict(router, pairs[i].statistics) for i in fold]
    predicted, gains = np.concatenate(predictions), np.concatenate([each.gains for each in pairs])
    _solve(router, pairs, ridge)
    router.ranks.copy_(torch.from_numpy(np.quantile(predicted, np.linspace(0, 1, RANKS))))
    spread = float(predicted.std() * gains.std())
    correlation = float(((predicted - predicted.mean()) * (gains - gains.mean())).mean()) / spread if spread else 0.0
    return {
        "correlation": correlation,
        "gain": float(gains.mean()),
        "deviation": float(gains.std()),
        "pairs": float(len(gains)),
        "videos": float(len(pairs)),
    }


def _predict(router: BlockRouter, statistics: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return router.predict_gain(torch.from_numpy(statistics)).double().numpy()


def _solve(router: BlockRouter, pairs: Sequence[RouterPairs], ridge: float) -> None:
    statistics = np.concatenate([each.statistics for each in pairs]).astype(np.float64)
    gains = np.concatenate([each.gains for each in pairs]).astype(np.float64)
    mean, scale = statistics.mean(0), statistics.std(0) + 1e-6
    inputs = (statistics - mean) / scale
    weights = np.linalg.solve(
        inputs.T @ inputs + ridge * len(gains) * np.eye(inputs.shape[1]), inputs.T @ (gains - gains.mean())
    )
    with torch.no_grad():
        values: tuple[tuple[Tensor, np.ndarray], ...] = (
            (router.mean, mean), (router.scale, scale), (router.gain.weight, weights[None]),
            (router.gain.bias, gains.mean(keepdims=True)),
        )  # fmt: skip
        for tensor, value in values:
            tensor.copy_(torch.from_numpy(value))


def train_router(config: RouterConfig, pipe: Any, prompts: Sequence[str], folder: Path) -> dict[str, float]:
    """Generate pairs, resuming the run in `folder`; save the fitted router to `folder/router` and its metrics beside it.

    Args:
        pipe: a video pipeline with a decoder of previews, in float32, and a draft transformer unless `exit_step` is given.

    Returns:
        The metrics of `fit_router`.
    """
    model = pipe.decoding_model()
    for name in ("preview_decoder", *(() if config.exit_step else ("draft_transformer",))):
        if getattr(pipe, name) is None:
            raise ValueError(f"the model must have a {name}, which the training of a router needs")
    if config.exit_step >= len(model.levels):
        raise ValueError(f"exit_step must be below the {len(model.levels)} steps of the model, got {config.exit_step}")
    if len(prompts) < 2:
        raise ValueError(f"prompts must be at least 2, got {len(prompts)}")
    digest = drafter_digest(pipe, config.exit_step)
    router = BlockRouter(channels=model.block_shape[1], drafter=digest, exit_step=config.exit_step or None)
    metrics = fit_router(router, stored_pairs(pipe, prompts, folder, config), config.ridge)
    with atomic_merge(folder / "router") as staged:
        router.eval().save_pretrained(staged)
    with atomic_file(folder / METRICS_FILE) as temporary:
        temporary.write_text(json.dumps(metrics, indent=1) + "\n", "utf-8")
    logger.info("%s: %s", folder / "router", metrics)
    return metrics


# -- all videos that routing could make of a prompt and a seed -------------------------------------------------------------


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
