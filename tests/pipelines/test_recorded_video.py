"""Refactoring changes no video: the packaged model `emoji-video` generates the recorded latents by the recorded decisions.

Latents are averaged over squares of 4 x 4 and recorded to 4 decimals. Transformers are in float64, decoders and noise in
float32, so that machines differ far less than `TOLERANCE`; a change of one block is 0.1 or more.
Decisions are compared exactly; the scores that they follow are at least `LEAD` away from the threshold.

New weights, noise or sampling change the record on purpose: then run `python tests/pipelines/test_recorded_video.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vargen import CausalVideoPipeline

RECORD = Path(__file__).parents[1] / "golden" / "recorded_video.json"
TOLERANCE, LEAD = 5e-4, 3e-3
SQUARE, SEED = 4, 11


class MeanColor:
    """Scores a frame by its mean; notes the prompt and the frames that it is given."""

    def __init__(self) -> None:
        self.prompt, self.seen = "", list[tuple[int, int, bool]]()

    def bind(self, prompt: str) -> Callable[[Any], Tensor]:
        self.prompt = prompt
        return self.score

    def score(self, view: Any) -> Tensor:
        self.seen.append((view.number, len(view.frames), view.previous is not None))
        return view.frames.double().mean((1, 2, 3))


VIDEOS: dict[str, dict[str, Any]] = {
    "target": {"accelerator": "target", "num_blocks": 3},
    "stride": {"accelerator": "stride", "num_blocks": 5},
    "early-exit": {"accelerator": "early-exit", "num_blocks": 3},
    "sdvg": {"accelerator": "sdvg", "tau": 0.872, "num_blocks": 8},
    "start image": {"accelerator": "target", "num_blocks": 3, "prompt": "a bouncing cat"},
    "window": {"accelerator": "stride", "num_blocks": 5, "window": 8, "sinks": 4},
}


def open_float64() -> CausalVideoPipeline:
    pipe = CausalVideoPipeline.from_pretrained("emoji-video", torch_dtype=torch.float64)
    for part in (pipe.text_encoder, pipe.image_lora):
        part.double()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def start_image(side: int) -> Tensor:
    """uint8 `[1, 3, Y, X]`: a disk on white."""
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    disk = (2 * x - side) ** 2 + (2 * y - side) ** 2 < (side // 2) ** 2
    return torch.where(disk, torch.tensor([220, 40, 90])[:, None, None], 255).to(torch.uint8)[None]


def generate(pipe: CausalVideoPipeline, name: str) -> dict[str, Any]:
    options = {"prompt": "a waving cat", **VIDEOS[name]}
    options["image"] = start_image(pipe.image_size) if name == "start image" else False
    scorer = MeanColor()
    stream = pipe.stream(generator=torch.Generator().manual_seed(SEED), scorer=scorer, **options)
    latents = []
    for number in range(stream.blocks):
        if (name, number) == ("window", 3):
            stream.change_prompt(pipe.encode_video_condition("a sleeping cat"))
        latents.append(next(stream).latents)
    blocks = stream.stats.blocks
    return {
        "latents": F.avg_pool2d(torch.cat(latents).double(), SQUARE).mul(1e4).round().div(1e4).tolist(),
        "sources": list(stream.stats.sources),
        "outcomes": [block.outcome for block in blocks],
        "passes": stream.stats.passes,
        "scores": [None if block.score is None else round(block.score, 5) for block in blocks],
        "scored": [scorer.prompt, *map(list, scorer.seen)],
    }


@pytest.fixture(scope="module")
def pipe() -> CausalVideoPipeline:
    return open_float64()


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


def distance(found: list[Any], expected: list[Any]) -> float:
    return float((torch.tensor(found, dtype=torch.float64) - torch.tensor(expected, dtype=torch.float64)).abs().max())


@pytest.mark.parametrize("name", VIDEOS)
def test_videos_are_the_recorded_ones(pipe: CausalVideoPipeline, record: dict[str, Any], name: str) -> None:
    found, expected = generate(pipe, name), record[name]
    assert distance(found.pop("latents"), expected["latents"]) < TOLERANCE
    scores = [list(zip(each["scores"], each["outcomes"], strict=True)) for each in (found, expected)]
    for (score, outcome), (other, decision) in zip(*scores, strict=True):
        assert outcome == decision and (score is None) == (other is None)
        assert score is None or abs(score - other) < LEAD / 30
    for part in ("sources", "outcomes", "passes", "scored"):
        assert found[part] == expected[part]


if __name__ == "__main__":
    opened = open_float64()
    RECORD.write_text(json.dumps({name: generate(opened, name) for name in VIDEOS}, separators=(",", ":")))
