"""What a visitor sees first, in headless Chromium: the race, the wall, contrast, the keyboard, and what a link looks like."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from page_contrast import LOW_CONTRAST

from vargen.demo import rendering
from vargen.demo.first_sight import FOLDER, read_wall, render_race
from vargen.demo.image_service import ImageService
from vargen.demo.rendering import ResultCard
from vargen.image_metadata import read_parameters

gradio_client = pytest.importorskip("gradio_client")


def test_the_wall_has_its_files_and_only_modes_of_the_page() -> None:
    tiles = read_wall(("image", "video"))
    assert len(tiles) > 20 and all((FOLDER / tile["file"]).is_file() for tile in tiles)
    places = [number for number, tile in enumerate(tiles) if tile["mode"] == "video"]
    assert places[0] < 5 and len(places) > 3, "videos are among the images"
    assert {tile["mode"] for tile in read_wall(("image",))} == {"image"}
    assert "57 steps instead of 256: 1.2 seconds instead of 2.4." in (shown := render_race()) and "2.1 times as fast" in shown


def test_bars_compare_only_what_has_finished() -> None:
    """The slowest method of a running race would otherwise have the shortest bar of seconds."""
    slow = ResultCard("ar", "", None, "", "", 256, 256, 2.0, 1.0, True)
    running = ResultCard("gumbel", "", None, "", "", 9, 256, 0.1, 4.0)
    waiting = ResultCard("gsd", "", None, "", "", 0, 256, 0.0, 0.0)
    shown = rendering.chart([slow, running, waiting])
    assert shown.count('class="vg-bar vg-a"') == 1 and "running" in shown and "waiting" in shown


def open_first(browser: Any, address: str, width: int, height: int) -> None:
    """Open the page as a visitor without images, whose strip would move what is below."""
    browser.script("localStorage.clear()")
    browser.open(address)
    browser.resize(width, height)


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_the_first_screen_shows_prompt_race_and_wall(browser: Any, address: str, width: int, height: int) -> None:
    browser.prefer("light", motion="no-preference")
    open_first(browser, address, width, height)
    bottom = "return document.querySelector(arguments[0]).getBoundingClientRect().bottom"
    for selector in ("#prompt", "#generate", ".vg-replay", ".vg-tile img"):
        browser.until(lambda selector=selector: 0 < browser.script(bottom, selector) <= height)
    browser.until(lambda: browser.script("return document.documentElement.scrollWidth") <= width)
    browser.until(lambda: browser.script("return document.querySelector('.vg-tile img').naturalWidth") == 128)
    assert not browser.shown("#seed"), "settings are folded away"
    passes = [browser.until(lambda: int(browser.text(".vg-lane:last-of-type .vg-passes") or 0)) for _ in range(2)]
    assert passes, "the race is replayed"
    browser.until(lambda: browser.count(".vg-finished"))


def test_the_example_is_saved_with_its_parameters_and_shared_by_link(browser: Any, address: str, tmp_path: Path) -> None:
    behavior = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", behavior)
    browser.click(".vg-replay .vg-save")
    file = browser.until(lambda: next(tmp_path.glob("*.png"), None))
    race = json.loads((FOLDER / "race.json").read_text("utf-8"))
    saved = read_parameters(file)
    wanted = (race["prompt"], race["seed"], "gumbel")
    assert (saved["prompt"], saved["seed"], saved["accelerator"]) == wanted
    assert {"model_digest", "tokens_digest"} <= saved.keys(), "as `vargen regenerate` reads it"
    allowed = {"origin": address.rstrip("/"), "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    browser.driver.execute_cdp_cmd("Browser.grantPermissions", allowed)
    browser.click(".vg-replay .vg-copy")
    browser.says(".vg-replay .vg-copy", "Link copied")
    browser.open(browser.script("return navigator.clipboard.readText()"))
    browser.until(lambda: browser.attribute("#stage img", "alt") == race["prompt"])
    browser.says("#note", f"seed {race['seed']}.")
    assert "method=gumbel" in browser.attribute("#stage [data-link]", "data-link")


def test_a_tile_is_generated_again_where_it_belongs(browser: Any) -> None:
    browser.click(".vg-tile[data-mode=image]")
    tile = read_wall(("image",))[0]
    browser.until(lambda: browser.attribute("#stage img", "alt") == tile["prompt"])
    browser.says("#note", f"seed {tile['seed']}.")
    assert not browser.shown(".vg-replay"), "the result takes the place of the race"
    browser.click(".vg-tile[data-mode=video]")
    video = next(each for each in read_wall(("image", "video")) if each["mode"] == "video")
    browser.says("#video-note", "Generated ")
    assert browser.attribute("#video-stage img", "alt").startswith(video["prompt"])
    assert "mode=video" in browser.script("return location.search")


def test_generate_is_few_tabs_away(browser: Any) -> None:
    browser.script("document.activeElement.blur()")
    browser.driver.execute_cdp_cmd("Page.bringToFront", {})
    keys = 0
    while browser.script("return document.activeElement.id") != "generate":
        keys += 1
        assert keys <= 5, browser.script("return document.activeElement.outerHTML")
        press_tab_key(browser)


def press_tab_key(browser: Any) -> None:
    for kind in ("keyDown", "keyUp"):
        event = {"type": kind, "key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}
        browser.driver.execute_cdp_cmd("Input.dispatchKeyEvent", event)


def test_a_waiting_job_says_its_place(browser: Any, address: str, permits: threading.Semaphore) -> None:
    client = gradio_client.Client(address, verbose=False, analytics_enabled=False, httpx_kwargs={"timeout": 300})
    job = client.submit("a", api_name="/generate")
    browser.click("#generate")
    browser.says("#note", "queue: 1/1")
    permits.release(1000)
    browser.says("#note", "Generated in")
    job.result()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(browser: Any, service: ImageService, theme: str) -> None:
    browser.prefer(theme)
    browser.until(lambda: browser.script("return document.body.classList.contains('dark')") == (theme == "dark"))
    browser.unfold("#advanced")
    browser.click("#generate")
    browser.says("#note", "Generated in")
    low = {}
    for tab in ("Image", "Video", "Race"):
        browser.press_tab(tab)
        browser.until(lambda: browser.script("return document.getAnimations().every(each => each.playState !== 'running')"))
        low |= browser.script(LOW_CONTRAST)
    assert not low
