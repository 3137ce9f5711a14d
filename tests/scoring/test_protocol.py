"""A scorer gives one finite number per picture, or an error that names it: whoever wrote it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from rejects import rejects

from vargen.scoring import BatchedScorer, NonFiniteScoreError, Scorer, open_scorer, score_images, to_scorer
from vargen.scoring.frames import FrameScorer, jump
from vargen.scoring.protocol import FunctionScorer, to_pil, to_tensor
from vargen.specs import parse_spec, split_specs


class Brightness(BatchedScorer):
    """Mean pixel; remembers its batches."""

    def __init__(self, batch_size: int = 2, spoil: Callable[[torch.Tensor], Any] = lambda scores: scores):
        super().__init__("brightness", batch_size=batch_size)
        self.batches: list[int] = []
        self.spoil = spoil

    def score_batch(self, images: Any, prompts: Sequence[str]) -> Any:
        self.batches.append(len(prompts))
        return self.spoil(to_tensor(images).mean((1, 2, 3)))


def greys(*levels: int) -> list[Image.Image]:
    return [Image.new("RGB", (8, 8), (level,) * 3) for level in levels]


def test_both_forms_of_images_score_alike_in_any_batch() -> None:
    images, prompts = greys(0, 51, 102, 153, 255), list("abcde")
    tensor = to_tensor(images)
    expected = torch.tensor([0, 0.2, 0.4, 0.6, 1.0])
    for size in (1, 2, 5, 9):
        scorer = Brightness(size)
        assert torch.allclose(scorer.score(images, prompts), expected)
        assert torch.allclose(scorer.score(tensor, prompts), expected)
        assert max(scorer.batches) <= size
    assert [image.getpixel((0, 0)) for image in to_pil(tensor)] == [(v,) * 3 for v in (0, 51, 102, 153, 255)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_no_number_is_an_error_that_names_scorer_and_image(bad: float) -> None:
    def spoil(scores: torch.Tensor) -> torch.Tensor:
        return torch.where(scores > 0.5, bad, scores)

    with pytest.raises(NonFiniteScoreError, match=r"brightness.*image 1 of 2"):
        Brightness(2, spoil).score(greys(0, 255), ["a", "b"])
    rejects(lambda: score_images(lambda images, prompts: [bad], greys(0), ["a"], name="mine"), "mine", NonFiniteScoreError)


@pytest.mark.parametrize("wrong", [lambda s: s[:1], lambda s: s.mean(), lambda s: "three", lambda s: s[:, None, None]])
def test_a_result_of_another_shape_is_an_error(wrong: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="one for each image"):
        Brightness(4, wrong).score(greys(0, 1, 2), list("abc"))


@pytest.mark.parametrize(
    ("images", "prompts", "error"),
    [
        ([], [], ValueError),
        (greys(1), ["a", "b"], ValueError),
        (greys(1), "a", TypeError),
        ("picture.png", ["a"], TypeError),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), ["a"], ValueError),
        (torch.zeros(3, 8, 8), ["a"], ValueError),
        (torch.full((1, 3, 8, 8), float("nan")), ["a"], ValueError),
    ],
)
def test_bad_input_is_refused(images: Any, prompts: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Brightness().score(images, prompts)


def test_any_callable_is_a_scorer_and_nothing_else() -> None:
    wrapped = to_scorer(lambda images, prompts: [len(prompt) for prompt in prompts], "length")
    assert isinstance(wrapped, Scorer) and wrapped.name == "length" and wrapped.higher_is_better
    assert wrapped.score(greys(1, 2), ["a", "abc"]).tolist() == [1.0, 3.0]
    assert to_scorer(scorer := Brightness()) is scorer
    for wrong in (Brightness, "clip", None):
        with pytest.raises(TypeError, match="scorer must be"):
            to_scorer(wrong)


def test_specs_with_options_are_read() -> None:
    assert split_specs("a,b:x=1,y=2,c,d:z=/p=q") == ["a", "b:x=1,y=2", "c", "d:z=/p=q"]
    assert split_specs(["clip:model=B", "emoji-scorer"]) == ["clip:model=B", "emoji-scorer"]
    assert parse_spec("clip:model=ViT-B-32,weights=/a/b.pt") == ("clip", {"model": "ViT-B-32", "weights": "/a/b.pt"})
    for wrong in ("clip:model", "clip:=3", "clip:a=1,a=2"):
        with pytest.raises(ValueError, match="key=value"):
            parse_spec(wrong)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("clip:weight=x", "has no option 'weight'"),
        ("clip:model=ViT-B-33", "ViT-B-32"),
        ("nothing-like-it", "unknown scorer"),
        ("no_such_module:score", "could not be imported"),
        ("..:x", "must be module:name"),
        ("os:system", "your own module"),
        ("subprocess:Popen", "your own module"),
    ],
)
def test_unknown_names_and_options_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_scorer(spec)


@pytest.mark.parametrize("spec", ["clip:weights=missing.pt", "image-reward:weights=missing.pt", "image-reward"])
def test_missing_weights_are_one_error_that_says_how_to_get_them(spec: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"weights.*(give weights=FILE)"):
        open_scorer(spec)


@pytest.mark.parametrize("name", ["one", "Thing", "number", "missing"])
def test_what_is_no_scorer_is_never_called(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"parts_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(
        "called = []\n"
        "def one(command): called.append(command)\n"
        "class Thing:\n    def __init__(self): called.append(self)\n"
        "number = 5\n"
        "def two(images, prompts): return [1.0] * len(images)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=f"{module}:{name}"):
        open_scorer(f"{module}:{name}")
    assert sys.modules[module].called == []
    assert open_scorer(f"{module}:two").score(greys(0, 1), ["a", "b"]).tolist() == [1.0, 1.0]


# -- scores of frames ------------------------------------------------------------------------------------------------------


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
