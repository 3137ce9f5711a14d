"""The page of a model of video in headless Chromium: it plays while it is made, and the threshold is moved meanwhile."""

from __future__ import annotations

import base64
import io
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_video_folder import video_folder

from vargen.demo.launch import Address, serve
from vargen.demo.page import build_video_page
from vargen.demo.video_service import VideoService
from vargen.pipelines.registry import open_pipeline

TAU = "#tau input[type=number]"


def brightness(images: Any, prompts: Any) -> torch.Tensor:
    return images.mean((1, 2, 3))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VideoService]:
    """A random model that can be slowed down, as that of the other page."""
    pipe = open_pipeline(video_folder(tmp_path_factory.mktemp("runs")))
    made = VideoService(pipe, "emoji-video", brightness)
    made.pause = 0.0  # type: ignore[attr-defined]
    pipe.draft_transformer.register_forward_pre_hook(lambda *_: time.sleep(made.pause))  # type: ignore[attr-defined]
    yield made
    made.close()


@pytest.fixture(scope="module")
def address(service: VideoService) -> Iterator[str]:
    served = build_video_page(service)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    yield serve(served, Address("127.0.0.1", port))
    served.close(verbose=False)


def set_number(browser: Any, selector: str, value: str) -> None:
    browser.write(selector, value)
    browser.driver.switch_to.active_element.send_keys("\ue007")  # Enter


def verdicts(browser: Any) -> list[str]:
    return [title.split(": ")[1] for title in browser.attributes("#badges .vg-block", "title")]


def frames_shown(browser: Any) -> int:
    """Of the animation that plays, by its description: frames that are alike are one in the file, shown for longer."""
    source = browser.attribute("#stage img", "src")
    if not source.startswith("data:image/webp;base64,"):
        return 0
    with Image.open(io.BytesIO(base64.b64decode(source.split(",")[1]))) as played:
        assert played.n_frames >= 2 and played.info.get("loop", 0) == 0
    return int(browser.attribute("#stage img", "alt").split(", ")[-1].split()[0])


def test_it_plays_while_it_is_made_and_the_slider_acts_meanwhile(browser: Any, slow: Callable[[float], None]) -> None:
    slow(0.15)
    set_number(browser, "#blocks input[type=number]", "10")
    set_number(browser, TAU, "-10")
    browser.click("#make")
    browser.until(lambda: "accepted" in verdicts(browser) and 2 <= frames_shown(browser) < 20)
    set_number(browser, TAU, "10")
    browser.until(lambda: "rejected" in verdicts(browser))
    slow(0.0)
    browser.says("#note", "Generated 20 frames")
    browser.until(lambda: frames_shown(browser) == 20)
    found = verdicts(browser)
    assert len(found) == 10 and found[0] == "forced"
    first = found.index("rejected")
    assert set(found[1:first]) == {"accepted"} and set(found[first:]) == {"rejected"}
    badges = browser.text("#badges").split("\n")
    assert re.match(r"0 target · \d+ ms", badges[0]) and "1 draft" in " ".join(badges)
    assert not severe(browser)


def test_stop_ends_it_with_what_is_finished(browser: Any, slow: Callable[[float], None]) -> None:
    slow(0.2)
    set_number(browser, "#blocks input[type=number]", "30")
    set_number(browser, TAU, "-10")
    browser.click("#make")
    browser.until(lambda: len(verdicts(browser)) >= 2)
    browser.click("#stop")
    browser.says("#note", "Stopped after")
    assert 2 <= len(verdicts(browser)) < 30


def severe(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.driver.get_log("browser") if entry["level"] == "SEVERE"]


def empty(browser: Any, selector: str) -> None:
    field = browser.shown(selector)
    field.send_keys("\ue009", "a")  # Control
    field.send_keys("\ue003")  # Backspace
    browser.until(lambda: field.get_property("value") == "")


def test_a_threshold_that_is_being_typed_is_no_error_of_the_server(browser: Any, slow: Callable[[float], None]) -> None:
    slow(0.15)
    set_number(browser, "#blocks input[type=number]", "8")
    browser.click("#make")
    browser.until(lambda: len(verdicts(browser)) >= 2)
    empty(browser, TAU)
    time.sleep(1.0)  # the slider's event
    slow(0.0)
    browser.says("#note", "Generated 16 frames")
    assert not severe(browser)


@pytest.mark.parametrize("width", [1280, 390])
def test_everything_fits_the_screen(browser: Any, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    set_number(browser, "#blocks input[type=number]", "12")
    browser.click("#make")
    browser.says("#note", "Generated 24 frames")
    browser.until(lambda: len(verdicts(browser)) == 12)
    assert browser.script("return document.documentElement.scrollWidth <= window.innerWidth")
    boxes = """return [...document.querySelectorAll(arguments[0])].map(each => each.getBoundingClientRect())
               .map(box => [box.left, box.top, box.right, box.bottom])"""
    badges = browser.script(boxes, "#badges .vg-block")
    assert all(0 <= left < right <= width for left, _, right, _ in badges)
    (tau,), (stage,), (make,) = (browser.script(boxes, name) for name in ("#tau", "#stage", "#make"))
    if width == 390:
        assert tau[3] <= stage[1] < tau[3] + 150, "the slider and what it changes are seen together"
    assert make[3] - min(make[1], 0) < 900, "what starts it is on the first screen"
