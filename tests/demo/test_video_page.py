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
from vargen.demo.page import build_video_page
from vargen.demo.rendering import block_badges
from vargen.demo.video_service import VideoService, encode_animation
from vargen.pipelines.registry import open_pipeline


def brightness(images: Any, prompts: Any) -> torch.Tensor:
    return images.mean((1, 2, 3))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> VideoService:
    pipe = open_pipeline(video_folder(tmp_path_factory.mktemp("runs")))
    return VideoService(pipe, "emoji-video", brightness)


def test_frames_grow_block_by_block_and_play(service: VideoService) -> None:
    seen = [frames for _, frames in service.generate("a", "a cat", 3, 3, "stride", 0.0)]
    assert [len(frames) for frames in seen] == [2, 4, 6] and (seen[0] == seen[2][:2]).all()
    with Image.open(io.BytesIO(encode_animation(seen[2], 12))) as played:
        assert played.n_frames == 6 and played.size == (16, 16)
    assert not service._streams


def test_the_threshold_moves_and_a_video_stops_while_it_is_made(service: VideoService) -> None:
    made = service.generate("a", "a cat", 3, 4, "sdvg", -math.inf)
    verdicts = [next(made)[0].record.outcome, next(made)[0].record.outcome]
    assert service.set_tau("a", 10.0) and not service.set_tau("b", 0.0)
    verdicts.append(next(made)[0].record.outcome)
    assert verdicts == ["forced", "accepted", "rejected"]
    service.stop("a")
    assert list(made) == [] and not service._streams
    other = service.generate("c", "a cat", 3, 2, "stride", 0.0)
    next(other)
    assert not service.set_tau("c", 1.0), "this method has no threshold"
    other.close()
    assert not service._streams


def test_a_badge_says_whose_a_block_is_in_words(service: VideoService) -> None:
    rows = [BlockRecord(0, 0), BlockRecord(1, 0, "draft", "accepted", 0.25), BlockRecord(2, 0, failure="<script>")]
    shown = block_badges(rows)
    assert "0 target" in shown and "1 draft · 0.2" in shown and "<script>" not in shown and "&lt;script&gt;" in shown


def test_the_page_makes_a_video(service: VideoService) -> None:
    page = build_video_page(service)
    functions = {each.name: each.fn for each in page.fns.values()}
    assert {"start_clicked", "run_job", "update_tau", "stop_clicked"} <= functions.keys()

    class Request:
        session_hash = "someone"

    ticket, _ = functions["start_clicked"](Request(), True)
    said = list(functions["run_job"](ticket, "a <b>cat</b>", "sdvg", 0.0, 2, 5))
    assert "&lt;b&gt;" in said[0][0] and "data:image/webp" in said[1][1] and "Generated 4 frames" in said[-1][0]
    assert list(functions["run_job"](ticket, "again", "sdvg", 0.0, 2, 5)) == [], "a ticket is good for one video"
    page.close(verbose=False)
