"""Best of N: candidates are ordinary pictures, the scorer chooses among them, and every score is told."""

from typing import Any

import pytest
import torch
from rejects import rejects
from tiny_families import brightness, seeded
from tiny_models import text_var_pipeline

from vargen.scoring import open_scorer
from vargen.scoring.protocol import NonFiniteScoreError

NAME = "tiny_families:brightness"


def test_the_best_candidate_is_returned_and_its_seed_generates_it_again(text_pipe: Any) -> None:
    result = text_pipe(["a", "b"], num_candidates=5, scorer=brightness, generator=seeded(3, 4), output_type="pt")
    stats = result.stats
    assert result.images.shape[0] == 2 and stats.scorer == "brightness" and [len(each) for each in stats.scores] == [5, 5]
    assert stats.images == 10 and [each[0] for each in stats.candidate_seeds] == [3, 4]
    for row, prompt in enumerate("ab"):
        best = max(range(5), key=lambda k: stats.scores[row][k])
        assert stats.seeds[row] == stats.candidate_seeds[row][best]
        again = text_pipe(prompt, generator=seeded(stats.seeds[row])[0], output_type="pt").images
        torch.testing.assert_close(again[0], result.images[row], atol=1e-5, rtol=0)  # rounding follows the batch
        assert float(again.mean()) == pytest.approx(stats.scores[row][best], abs=1e-6)


def test_the_first_candidate_is_the_image_without_candidates(text_pipe: Any) -> None:
    def first(images: torch.Tensor, prompts: list[str]) -> list[float]:
        return [-float(i % 3) for i in range(len(images))]

    plain = text_pipe(["a", "b"], num_images_per_prompt=2, generator=seeded(1, 2, 3, 4), output_type="latent")
    best = text_pipe(
        ["a", "b"], num_images_per_prompt=2, num_candidates=3, scorer=first, generator=seeded(1, 2, 3, 4), output_type="latent"
    )
    assert torch.equal(plain.images, best.images) and best.stats.seeds == [1, 2, 3, 4]


def test_a_scorer_alone_scores_and_a_low_score_may_be_the_better(text_pipe: Any) -> None:
    class Dark:
        name, higher_is_better = "dark", False

        def score(self, images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
            assert prompts == ["a"] * len(images)
            return images.mean((1, 2, 3))

    alone = text_pipe("a", scorer=Dark(), generator=seeded(1)[0]).stats
    assert alone.scores == [alone.scores[0]] and len(alone.scores[0]) == 1 and alone.seeds == [1]
    chosen = text_pipe("a", scorer=Dark(), num_candidates=6, generator=seeded(1)[0]).stats
    assert chosen.seeds[0] == chosen.candidate_seeds[0][chosen.scores[0].index(min(chosen.scores[0]))]


def test_classes_are_scored_by_name(class_pipe: Any) -> None:
    read = []

    def reader(images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        read.extend(prompts)
        return torch.zeros(len(images))

    named = type(class_pipe).from_pipe(class_pipe, id2label={1: "tench, Tinca tinca"})
    named(class_labels=1, scorer=reader, num_candidates=2)
    assert read == ["tench", "tench"]
    rejects(lambda: class_pipe(class_labels=1, scorer=reader), "scorer")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_candidates": 2, "scorer": lambda images, prompts: [1.0]}, ValueError, "must give [2]"),
        ({"scorer": lambda images, prompts: [float("nan")]}, NonFiniteScoreError, "gave nan"),
    ],
)
def test_bad_requests_are_reported(text_pipe: Any, options: dict[str, Any], error: type, message: str) -> None:
    rejects(lambda: text_pipe("a", **options), message, error)


def test_a_scorer_may_be_named(text_pipe: Any) -> None:
    scorer, scales = open_scorer(NAME), text_var_pipeline()
    for each in (text_pipe, scales):
        stats = each("a red apple", num_candidates=3, scorer=NAME, generator=seeded(2)[0]).stats
        given = each("a red apple", num_candidates=3, scorer=scorer, generator=seeded(2)[0]).stats
        assert stats.scorer == scorer.name and given.scores == stats.scores and given.seeds == stats.seeds
        with pytest.raises(ValueError, match="no-such-scorer"):
            each("a red apple", num_candidates=3, scorer="no-such-scorer")
