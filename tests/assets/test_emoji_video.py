"""The packaged model of video as users get it: its size, its card, that things move, and that routing has a use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vargen.decoding import list_methods
from vargen.evaluation.video import DRAFTS
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.loading import open_pipeline
from vargen.scoring.frames import FrameScorer
from vargen.scoring.image_text import ImageTextScorer

THINGS = ["winking face", "beating heart", "man running", "butterfly", "face with rolling eyes", "woman juggling"]


@pytest.fixture(scope="module")
def pipe() -> VisualPipeline:
    return open_pipeline("emoji-video", torch_dtype=torch.float32)


@pytest.fixture(scope="module")
def scorer() -> ImageTextScorer:
    return ImageTextScorer()


@pytest.fixture(scope="module")
def videos(pipe: Any) -> list[torch.Tensor]:
    """The target's, of every thing."""
    return [frames_of(pipe, prompt, "target", seed) for seed, prompt in enumerate(THINGS)]


def frames_of(pipe: Any, prompt: str, method: Any, seed: int = 0, blocks: int = 3) -> torch.Tensor:
    """float32 `[F, 3, Y, X]`."""
    options = {"num_blocks": blocks, "generator": torch.Generator().manual_seed(seed)}
    stream = pipe.stream(prompt, image=False, accelerator=method, **options)
    return torch.cat([block.frames for block in stream])


def test_things_move_and_show_what_was_asked_for(pipe: Any, scorer: ImageTextScorer, videos: list[torch.Tensor]) -> None:
    for prompt, frames in zip(THINGS, videos, strict=True):
        assert frames.diff(dim=0).abs().mean() > 0.005, f"{prompt} stands still"
    texts = [pipe.scorer_prompt(prompt) for prompt in THINGS]
    assert texts[0] == "winking face, 3d style"
    shown = scorer.embed_images(torch.stack(videos)[:, ::3].flatten(0, 1)).unflatten(0, (len(THINGS), -1)).mean(1)
    nearest = (shown @ scorer.embed_captions(texts).T).argmax(1)
    assert (nearest == torch.arange(len(THINGS))).float().mean() >= 5 / 6


def test_the_target_is_better_than_the_drafter_and_the_scorer_sees_it(
    pipe: Any, scorer: ImageTextScorer, videos: list[torch.Tensor]
) -> None:
    def score(prompt: str, frames: torch.Tensor) -> float:
        return float(scorer.score(frames[::3], [pipe.scorer_prompt(prompt)] * len(frames[::3])).mean())

    drafts = [frames_of(pipe, prompt, DRAFTS, seed) for seed, prompt in enumerate(THINGS)]
    assert sum(score(prompt, videos[k]) > score(prompt, drafts[k]) for k, prompt in enumerate(THINGS)) >= 4


@pytest.mark.parametrize("method", [preset.name for preset in list_methods("video") if not preset.policy.needs_router])
def test_every_method_makes_a_video(pipe: Any, method: str) -> None:
    result = pipe("beating heart", accelerator=method, num_blocks=2, generator=torch.Generator().manual_seed(2))
    assert len(result.frames[0]) == 8 and result.frames[0][0].size == (64, 64)
    assert [row.number for row in result.stats.blocks] == [0, 1]


def test_a_draft_is_verified_by_one_frame_and_a_scorer_of_ones_own_by_as_many_as_it_says(
    pipe: Any, scorer: ImageTextScorer
) -> None:
    assert pipe.resolve_frame_scorer().frames == 1 and pipe.resolve_frame_scorer(scorer).frames == 1
    whole = FrameScorer(scorer)
    assert pipe.resolve_frame_scorer(whole) is whole and whole.frames is None


@pytest.mark.parametrize("thing", ["a strawberry", "a red apple", "a hamburger"])
def test_a_start_image_moves_as_the_prompt_says(pipe: Any, thing: str) -> None:
    """What slides in is out of the frame at first, then in the middle."""
    image = pipe.named_image_pipe("emoji")(f"{thing}, 3d style", generator=torch.Generator().manual_seed(1)).images[0]

    def inked(prompt: str) -> torch.Tensor:
        """Mean darkness of each frame after those of the start image, relative to the start image's."""
        options = {"image": image, "accelerator": "target", "num_blocks": 4, "generator": torch.Generator().manual_seed(1)}
        darkness = (1 - torch.cat([block.frames for block in pipe.stream(prompt, **options)])).mean((1, 2, 3))
        return darkness[pipe.setting("image_frames") :] / darkness[0]

    sliding = inked(f"{thing} sliding in from the left")
    assert sliding[0] < 0.5 and sliding[-4:].min() > 0.3
