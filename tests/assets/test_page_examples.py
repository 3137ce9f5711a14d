"""What the page offers to draw looks like what it says, to the packaged scorer: a rocket got 4, a slice of pizza 2."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("gradio")

from vargen.demo.inputs import EXAMPLES
from vargen.pipelines.registry import open_pipeline
from vargen.scoring.registry import open_scorer

LEAST = 8.0  # what a person does not recognize is below it; pictures of the model's training captions have 10 to 13


@pytest.mark.slow
@pytest.mark.parametrize(("model", "method"), [("emoji", "gumbel"), ("emoji-var", "plain")])
def test_every_example_of_the_page_generates_what_it_says(model: str, method: str) -> None:
    pipe, scorer = open_pipeline(model), open_scorer("emoji-scorer")
    pipe.set_progress_bar_config(disable=True)
    images = pipe(EXAMPLES, accelerator=method, generator=[torch.Generator().manual_seed(0) for _ in EXAMPLES]).images
    scores = dict(zip(EXAMPLES, scorer.score(images, EXAMPLES).tolist(), strict=True))
    assert min(scores.values()) > LEAST, scores
