"""The page of a next-scale model: images that follow what is typed, variations and inpainting, and the brush in a browser."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_contrast import LOW_CONTRAST
from PIL import Image
from rejects import rejects

pytest.importorskip("gradio")

from tiny_models import text_var_pipeline

from vargen.decoding import list_methods
from vargen.demo.image_service import ImageService
from vargen.demo.jobs import JobRegistry
from vargen.demo.page import build_page
from vargen.demo.request import PageRequest
from vargen.demo.sources import ImageSource, read_painting
from vargen.image_metadata import png_file, read_parameters

FIELD = "#prompt textarea, #prompt input"
SIDE, GRID = 8, (4, 4)  # of the tiny model


@pytest.fixture(scope="module")
def service() -> Iterator[ImageService]:
    made = ImageService(text_var_pipeline(), "tiny")
    yield made
    made.close()


@pytest.fixture(scope="module")
def address(service: ImageService, serve_page: Any) -> Iterator[str]:
    yield from serve_page(build_page(service))


def noise(size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))


def sent(image: Image.Image, cells: str = "") -> str:
    data = base64.b64encode(png_file(image, {"prompt": "a"})).decode()
    return json.dumps({"image": f"data:image/png;base64,{data}", "cells": cells})


def test_painted_cells_become_the_mask() -> None:
    cells = "1000000000000001"
    found = read_painting(sent(noise(), cells), 0.3, SIDE, GRID)
    assert found is not None and found.mask is not None and found.strength is None
    assert found.image.tobytes() == noise().tobytes(), "not a pixel of the source changes on its way"
    white = np.asarray(found.mask) == 255
    assert white[:2, :2].all() and white[6:, 6:].all() and white.sum() == 8
    varied = read_painting(sent(noise()), 0.3, SIDE, GRID)
    assert varied is not None and varied.mask is None and varied.strength == 0.3
    assert read_painting("", 0.3, SIDE, GRID) is None


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "[]",
        "{}",
        '{"image": 1, "cells": ""}',
        '{"image": "data:,!", "cells": ""}',
        sent(noise(), "10"),
        sent(noise(), "2" * 16),
    ],
)
def test_what_is_no_painting_gets_a_message(text: str) -> None:
    rejects(lambda: read_painting(text, 0.8, SIDE, GRID), "cannot be read")


def test_limits_are_named() -> None:
    for strength in (-0.1, 1.5, float("nan"), "much"):
        rejects(lambda strength=strength: ImageSource(noise(), None, strength), "strength must be from 0")
    rejects(lambda: read_painting(sent(noise((9, 8))), 0.3, SIDE, GRID), "must have 8x8 pixels, not 9x8")
    rejects(lambda: read_painting(sent(noise()), 0.3, None, GRID), "cannot be read")


def test_the_engine_runs_what_the_pipeline_runs(service: ImageService) -> None:
    assert set(service.methods) == {preset.name for preset in list_methods("next-scale")}
    assert (service.default_method, service.baseline, service.live) == ("plain", "plain", True)
    generated = service.start(PageRequest("a cat", "code", 3)).result()
    assert generated.images[0].size == (8, 8) and generated.stats.passes == 4
    run = service.start(PageRequest("a cat", "plain", 3))
    run.result()
    assert run.counts == [1, 4, 9, 16]


def test_a_new_letter_stops_the_generation_of_the_last_ones() -> None:
    runs = JobRegistry()
    first, other, elsewhere = runs.enqueue("me", "live"), runs.enqueue("me"), runs.enqueue("you", "live")
    begun = runs.start(first)
    assert begun is not None
    runs.stop_visitor_jobs("me", "live")
    assert begun.stop.is_set() and runs.start(other) is not None and runs.start(elsewhere) is not None
    waiting = runs.enqueue("me", "live")
    runs.stop_visitor_jobs("me", "live")
    assert runs.start(waiting) is None, "what has not begun never does"


# -- in headless Chromium


def touch(browser: Any, kind: str, *points: tuple[float, float]) -> None:
    """Dispatch a touch over the image, at fractions of its width and height."""
    left, top, width, height = box(browser)
    places = [{"x": left + x * width, "y": top + y * height} for x, y in points]
    browser.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": places})


def box(browser: Any) -> list[float]:
    found = "const {left, top, width, height} = document.querySelector('#live-easel canvas').getBoundingClientRect();"
    return list(browser.script(found + "return [left, top, width, height]"))


def drag(browser: Any, *points: tuple[float, float]) -> None:
    """Paint with the mouse, along fractions of the image."""
    browser.script("document.querySelector('#live-easel').scrollIntoView({block: 'center'})")
    left, top, width, height = box(browser)
    kinds = ["mousePressed", *["mouseMoved"] * (len(points) - 1), "mouseReleased"]
    for kind, (x, y) in zip(kinds, [*points, points[-1]], strict=True):
        place = {"x": left + x * width, "y": top + y * height, "button": "left", "buttons": 1, "clickCount": 1}
        browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, **place})


def finished(browser: Any) -> str:
    """The PNG of the finished image in base64, or nothing while scales are shown."""
    kind, _, content = browser.attribute("#live-stage img", "src").partition(",")
    return content if kind.startswith("data:image/png") else ""


def shown(browser: Any) -> tuple[dict[str, Any], np.ndarray]:
    """The parameters and pixels of the finished image."""
    content = base64.b64decode(browser.until(lambda: finished(browser)))
    with Image.open(io.BytesIO(content)) as opened:
        return json.loads(opened.text["vargen"]), np.asarray(opened.convert("RGB")).astype(int)


def painted(browser: Any) -> list[int]:
    """The painted cells."""
    message = browser.script("return window.vargen.brush.read()")
    return [place for place, cell in enumerate(json.loads(message)["cells"]) if cell == "1"] if message else []


def open_live(browser: Any) -> None:
    browser.press_tab("Live")
    browser.says("#live-note", "Generated in")
    browser.until(lambda: finished(browser))


def test_the_image_follows_what_is_typed(browser: Any, service: ImageService) -> None:
    prompts: list[str] = []
    start = service.start

    def start_and_tell(settings: PageRequest, *rest: Any, **more: Any) -> Any:
        prompts.append(settings.prompt)
        return start(settings, *rest, **more)

    service.start = start_and_tell  # type: ignore[method-assign]
    try:
        browser.press_tab("Live")
        browser.says("#live-note", "Generated in")  # opening it draws what the prompt says
        before = browser.attribute("#live-stage img", "src")
        browser.write(FIELD, "a green frog")
        browser.until(lambda: "a green frog" in browser.attribute("#live-stage img", "alt"))
        browser.until(lambda: browser.attribute("#live-stage img", "src") not in ("", before))
        browser.until(lambda: browser.attribute("#live-stage img", "src").startswith("data:image/png"))
        assert prompts[-1] == "a green frog" and len(prompts) < 2 + len("a green frog")
        browser.press_tab("Image")
        generated = len(prompts)
        browser.write(FIELD, "a blue bird")
        time.sleep(0.5)
        assert len(prompts) == generated, "what is typed in another tab is not drawn"
        assert not browser.errors()
    finally:
        service.start = start  # type: ignore[method-assign]


def test_only_what_is_painted_is_generated_again_and_it_follows_the_prompt(browser: Any, tmp_path: Path) -> None:
    open_live(browser)
    parameters, before = shown(browser)
    assert "image" not in parameters and not browser.shown("#live-undo")
    assert browser.attribute("#live-stage .vg-copy", "data-link").startswith("?mode=live&prompt=")
    drag(browser, (0.1, 0.1), (0.1, 0.9))
    browser.says("#live-note", "Painted part generated again")
    assert set(painted(browser)) >= {0, 4, 8, 12} and not set(painted(browser)) & {3, 7, 11, 15}
    browser.write(FIELD, "a green frog")
    browser.until(lambda: shown(browser)[0]["prompt"] == "a green frog")
    parameters, after = shown(browser)
    assert {"image", "mask"} <= parameters.keys() and (after != before).any()
    assert not browser.shown("#live-stage .vg-copy"), "no link holds an image"
    browser.save_to(tmp_path)
    browser.click("#live-stage .vg-save")
    assert read_parameters(browser.until(lambda: next(tmp_path.glob("*.png"), None))) == parameters
    browser.click("#live-undo")
    browser.until(lambda: painted(browser) == [])
    browser.click("#live-vary")
    browser.says("#live-note", "Variation of strength 0.8")
    assert shown(browser)[0]["strength"] == 0.8
    browser.click("#live-restart")
    browser.says("#live-note", "Generated in")
    assert "image" not in shown(browser)[0] and not browser.shown("#live-restart")
    assert not browser.errors()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_editor_has_the_contrast_of_wcag_aa(browser: Any, theme: str) -> None:
    browser.prefer(theme)
    browser.until(lambda: browser.script("return document.body.classList.contains('dark')") == (theme == "dark"))
    open_live(browser)
    drag(browser, (0.1, 0.1), (0.1, 0.4))
    browser.until(lambda: browser.shown("#live-undo") and browser.shown("#live-restart"))
    browser.until(lambda: browser.script("return document.getAnimations().every(each => each.playState !== 'running')"))
    assert not browser.script(LOW_CONTRAST)


def test_a_finger_paints_after_the_brush_was_taken(browser: Any) -> None:
    browser.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    try:
        browser.resize(390, 844)
        browser.open(browser.script("return location.href"))
        open_live(browser)
        browser.until(lambda: browser.attribute(".vg-brush button", "aria-pressed") == "false")
        browser.script("document.querySelector('.vg-brush button').click()")
        browser.until(lambda: browser.count("#live-easel canvas.vg-brushing"))
        browser.script("document.querySelector('#live-easel').scrollIntoView({block: 'center'})")
        top = box(browser)[1]
        touch(browser, "touchStart", (0.9, 0.1))
        touch(browser, "touchMove", (0.9, 0.9))
        assert box(browser)[1] == top, "the page does not scroll meanwhile"
        touch(browser, "touchEnd")
        browser.says("#live-note", "Painted part generated again")
        assert set(painted(browser)) >= {3, 7, 11, 15}
        assert browser.script("return document.documentElement.scrollWidth") <= 390
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_an_image_of_ones_own_is_varied(browser: Any, tmp_path: Path) -> None:
    open_live(browser)
    noise((40, 20)).save(tmp_path / "own.jpg")
    browser.drop("#live-file input[type=file]", tmp_path / "own.jpg")
    browser.says("#live-note", "Your image")
    browser.click("#live-vary")
    browser.says("#live-note", "Variation of strength")
    assert {"image", "strength"} <= shown(browser)[0].keys()
    (tmp_path / "none.png").write_bytes(b"no image")
    browser.drop("#live-file input[type=file]", tmp_path / "none.png")
    browser.says("#live-note", "not an image")
