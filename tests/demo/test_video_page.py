"""The page of a model of video: it plays while it is made, the threshold moves meanwhile, and everything typed is inert."""

from __future__ import annotations

import base64
import io
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("gradio")

from tiny_families import brightness
from tiny_models import text_pipeline

from vargen.decoding import BlockRecord
from vargen.demo.page import build_video_page
from vargen.demo.rendering import block_badges
from vargen.demo.video_service import VideoService, encode_animation
from vargen.pipelines.loading import open_pipeline

TAU = "#video-tau input[type=number]"


@pytest.fixture(scope="module")
def service(video_model: Path) -> Iterator[VideoService]:
    """A random model that can be slowed down, as that of the other page."""
    pipe = open_pipeline(video_model)
    made = VideoService(pipe, "emoji-video", brightness)
    made.pause = 0.0  # type: ignore[attr-defined]
    pipe.draft_transformer.register_forward_pre_hook(lambda *_: time.sleep(made.pause))  # type: ignore[attr-defined]
    yield made
    made.close()


@pytest.fixture(scope="module")
def address(service: VideoService, serve_page: Any) -> Iterator[str]:
    yield from serve_page(build_video_page(service))


def test_frames_grow_block_by_block_and_play(service: VideoService) -> None:
    seen = [frames for _, frames in service.generate("a", "a cat", 3, 3, "stride", 0.0)]
    assert [len(frames) for frames in seen] == [2, 4, 6] and (seen[0] == seen[2][:2]).all()
    distinct = np.random.default_rng(0).integers(0, 256, seen[2].shape, dtype=np.uint8)  # WebP merges equal frames
    with Image.open(io.BytesIO(encode_animation(distinct, 12))) as played:
        assert played.n_frames == 6 and played.size == (16, 16)
    assert not service._streams


def test_a_video_starts_from_an_image_if_the_model_may(service: VideoService, monkeypatch: Any) -> None:
    starting = VideoService(service.pipe, "emoji-video", service.scorer, text_pipeline())

    def last(of: VideoService) -> Any:
        return list(of.generate("a", "a cat", 3, 2, "stride", 0.0))[-1][1]

    assert len(last(starting)) == 1 + len(last(service)), "the image is the first frame"
    assert (last(starting)[1:] != last(service)).any()
    monkeypatch.setitem(service.pipe.config.defaults, "image", False)
    assert (last(starting) == last(service)).all()


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

    values = ["a <b>cat</b>", "any", 5, "sdvg", 0.0, 2]
    ticket, link, *_ = functions["start_clicked"](Request(), *values, True, False)
    assert link == "?mode=video&prompt=a+%3Cb%3Ecat%3C%2Fb%3E&seed=5&method=sdvg"
    said = list(functions["run_job"](ticket, *values))
    assert "&lt;b&gt;" in said[0][0] and "data:image/webp" in said[1][1] and "Generated 4 frames" in said[-1][0]
    assert list(functions["run_job"](ticket, *values)) == [], "a ticket is good for one video"
    page.close(verbose=False)


# -- in headless Chromium


def set_number(browser: Any, selector: str, value: str) -> None:
    browser.unfold("#video-options")
    browser.write(selector, value)
    browser.driver.switch_to.active_element.send_keys("\ue007")  # Enter


def verdicts(browser: Any) -> list[str]:
    return [title.split(": ")[1] for title in browser.attributes("#video-badges .vg-block", "title")]


def frames_shown(browser: Any) -> int:
    """Of the animation that plays, by its description: frames that are alike are one in the file, shown for longer."""
    source = browser.attribute("#video-stage img", "src")
    if not source.startswith("data:image/webp;base64,"):
        return 0
    with Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))) as played:
        assert played.n_frames >= 2 and played.info.get("loop", 0) == 0
    return int(browser.attribute("#video-stage img", "alt").split(", ")[-1].split()[0])


def test_it_plays_while_it_is_made_and_the_slider_acts_meanwhile(browser: Any, slow: Callable[[float], None]) -> None:
    slow(0.15)
    set_number(browser, "#video-blocks input[type=number]", "10")
    set_number(browser, TAU, "-10")
    browser.click("#video-make")
    browser.until(lambda: "accepted" in verdicts(browser) and 2 <= frames_shown(browser) < 20)
    set_number(browser, TAU, "10")
    browser.until(lambda: "rejected" in verdicts(browser))
    slow(0.0)
    browser.says("#video-note", "Generated 20 frames")
    browser.until(lambda: frames_shown(browser) == 20)
    found = verdicts(browser)
    assert len(found) == 10 and found[0] == "forced"
    first = found.index("rejected")
    assert set(found[1:first]) == {"accepted"} and set(found[first:]) == {"rejected"}
    badges = browser.text("#video-badges").split("\n")
    assert re.match(r"0 target · \d+ ms", badges[0]) and "1 draft" in " ".join(badges)
    assert not browser.errors()


def test_stop_ends_it_with_what_is_finished(browser: Any, slow: Callable[[float], None]) -> None:
    slow(0.2)
    set_number(browser, "#video-blocks input[type=number]", "30")
    set_number(browser, TAU, "-10")
    browser.click("#video-make")
    browser.until(lambda: len(verdicts(browser)) >= 2)
    browser.click("#video-stop")
    browser.says("#video-note", "Stopped after")
    assert 2 <= len(verdicts(browser)) < 30
