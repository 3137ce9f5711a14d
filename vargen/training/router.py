"""Train a `BlockRouter` for the drafts of a pair of video models, from pairs of blocks that the pair itself generates.

Both models continue the same past, in trees of all routed videos (see `routing_tree`). The router predicts how much this and
later blocks gain by the target's block instead of the draft: a ridge regression in closed form. The pairs of each video are
stored, so that a killed run continues. Equal prompts, seeds and weights give equal routers.
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

from vargen.files import atomic_file, atomic_merge
from vargen.models.causal_video.decoding import RANKS, BlockRouter, describe_draft
from vargen.pipelines.seeds import resolve_seeds
from vargen.pipelines.videos import drafter_digest
from vargen.scoring.frames import FrameScorer
from vargen.training.config import at_least
from vargen.training.routing_tree import build_routing_tree, later_gains, score_tree
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
