"""The page of a model of video: it plays while it is made, the threshold moves, and everything typed is inert."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("gradio")

from tiny_video_folder import video_folder

from vargen.decoding import BlockRecord
from vargen.demo import video_page
from vargen.demo.video_tab import VideoEngine, animation, badges
from vargen.pipelines.registry import open_pipeline


def brightness(images: Any, prompts: Any) -> torch.Tensor:
    return images.mean((1, 2, 3))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> VideoEngine:
    pipe = open_pipeline(video_folder(tmp_path_factory.mktemp("runs")))
    return VideoEngine(pipe, "emoji-video", brightness)


def test_frames_grow_block_by_block_and_play(engine: VideoEngine) -> None:
    seen = [frames for _, frames in engine.make("a", "a cat", 3, 3, "stride", 0.0)]
    assert [len(frames) for frames in seen] == [2, 4, 6] and (seen[0] == seen[2][:2]).all()
    with Image.open(io.BytesIO(animation(seen[2], 12))) as played:
        assert played.n_frames == 6 and played.size == (16, 16)
    assert not engine._streams


def test_the_threshold_moves_and_a_video_stops_while_it_is_made(engine: VideoEngine) -> None:
    made = engine.make("a", "a cat", 3, 4, "sdvg", -math.inf)
    verdicts = [next(made)[0].record.outcome, next(made)[0].record.outcome]
    assert engine.set_tau("a", 10.0) and not engine.set_tau("b", 0.0)
    verdicts.append(next(made)[0].record.outcome)
    assert verdicts == ["forced", "accepted", "rejected"]
    engine.stop("a")
    assert list(made) == [] and not engine._streams
    other = engine.make("c", "a cat", 3, 2, "stride", 0.0)
    next(other)
    assert not engine.set_tau("c", 1.0), "this method has no threshold"
    other.close()
    assert not engine._streams


def test_a_badge_says_whose_a_block_is_in_words(engine: VideoEngine) -> None:
    rows = [BlockRecord(0, 0), BlockRecord(1, 0, "draft", "accepted", 0.25), BlockRecord(2, 0, failure="<script>")]
    shown = badges(rows)
    assert "0 target" in shown and "1 draft · 0.2" in shown and "<script>" not in shown and "&lt;script&gt;" in shown


def test_the_page_makes_a_video(engine: VideoEngine) -> None:
    page = video_page.build(engine)
    functions = {each.name: each.fn for each in page.fns.values()}
    assert {"press", "draw", "move", "end"} <= functions.keys()

    class Request:
        session_hash = "someone"

    ticket, _ = functions["press"](Request(), True)
    said = list(functions["draw"](ticket, "a <b>cat</b>", "sdvg", 0.0, 2, 5))
    assert "&lt;b&gt;" in said[0][0] and "data:image/webp" in said[1][1] and "Made 4 frames" in said[-1][0]
    assert list(functions["draw"](ticket, "again", "sdvg", 0.0, 2, 5)) == [], "a ticket is good for one video"
    page.close(verbose=False)
