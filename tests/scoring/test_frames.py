"""Scores of frames: a jump into a block costs its first frame, motion within it costs nothing."""

from types import SimpleNamespace

import pytest
import torch
from rejects import rejects

from vargen.scoring.frames import FrameScorer, jump
from vargen.scoring.protocol import FunctionScorer, NonFiniteScoreError


def moving(start: float, step: float, frames: int = 4) -> torch.Tensor:
    return (start + step * torch.arange(frames).float())[:, None, None, None].expand(-1, 3, 4, 4)


def test_a_step_into_a_block_counts_as_far_as_it_exceeds_those_within() -> None:
    assert jump(moving(0.2, 0.1), moving(0.1, 0)[0]) == 0
    assert jump(moving(0.5, 0.1), moving(0.1, 0)[0]) == pytest.approx(0.3)
    assert jump(moving(0.5, 0.1), None) == 0 and jump(moving(0.5, 0, 1), moving(0.1, 0)[0]) == pytest.approx(0.4)


def test_frames_are_scored_with_the_prompt_and_the_first_pays_for_the_jump() -> None:
    seen = []

    def score(images, prompts):
        seen.append(list(prompts))
        return images.mean((1, 2, 3))

    view = SimpleNamespace(frames=moving(0.5, 0.1), previous=moving(0.1, 0)[0])
    found = FrameScorer(score, step_weight=10).bind("a cat")(view)
    assert torch.allclose(found, torch.tensor([0.5 - 3.0, 0.6, 0.7, 0.8])) and seen == [["a cat"] * 4]
    assert torch.allclose(FrameScorer(score, 0).bind("a cat")(view), torch.tensor([0.5, 0.6, 0.7, 0.8]))
    lower = FunctionScorer(score, higher_is_better=False)
    assert torch.allclose(FrameScorer(lower, 0).bind("a")(view), -torch.tensor([0.5, 0.6, 0.7, 0.8]))


@pytest.mark.parametrize(("frames", "found"), [(1, [0.8]), (2, [0.6, 0.8]), (3, [0.5, 0.6, 0.8]), (9, [0.5, 0.6, 0.7, 0.8])])
def test_fewer_frames_are_spread_and_end_with_the_last(frames: int, found: list[float]) -> None:
    view = SimpleNamespace(frames=moving(0.5, 0.1), previous=moving(0.1, 0)[0])
    scores = FrameScorer(lambda images, prompts: images.mean((1, 2, 3)), 10, frames).bind("a cat")(view)
    wanted = torch.tensor(found)
    wanted[0] -= 3.0
    assert torch.allclose(scores, wanted)


@pytest.mark.parametrize("frames", [0, -1, 1.5, True])
def test_frames_are_counted(frames: object) -> None:
    with pytest.raises(ValueError, match="frames must be a whole number of at least 1"):
        FrameScorer(lambda images, prompts: [], frames=frames)  # type: ignore[arg-type]


def test_what_is_no_score_is_an_error() -> None:
    view = SimpleNamespace(frames=moving(0.5, 0.1), previous=None)
    with pytest.raises(NonFiniteScoreError):
        FrameScorer(lambda images, prompts: [float("nan")] * 4).bind("a")(view)
    rejects(lambda: FrameScorer(lambda images, prompts: [], -1), "step_weight")
    rejects(lambda: FrameScorer(3), "scorer", TypeError)
