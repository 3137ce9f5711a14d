"""The page in headless Chromium, with small random models: what a person does, and what they then see."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page_contrast import LOW_CONTRAST

from vargen.demo.opening import FOLDER, read_wall, render_race
from vargen.image_metadata import read_parameters

FIELD = "#prompt textarea, #prompt input"


def generate(browser: Any, prompt: str) -> None:
    """By Enter in the prompt."""
    browser.write(FIELD, prompt)
    browser.driver.switch_to.active_element.send_keys("\n")
    finished(browser, prompt)


def finished(browser: Any, prompt: str, note: str = "#note") -> str:
    """Wait for a result; returns what the page says about it."""
    browser.until(lambda: prompt in browser.text(note) and "seed" in browser.text(note) and "…" not in browser.text(note))
    browser.until(lambda: browser.ready("#start"))
    return str(browser.text(note))


def test_type_generate_and_watch_the_preview_change(browser: Any, address: str, permits: threading.Semaphore) -> None:
    browser.write(FIELD, "a green frog")
    browser.driver.switch_to.active_element.send_keys("\n")
    previews = set[str]()

    def filled_in() -> bool:
        permits.release()
        previews.update(each for each in [browser.attribute("#stage img", "src")] if each)
        return len(previews) >= 3

    browser.until(filled_in)
    assert "of 64 tokens" in browser.text("#note") and browser.ready("#stop")
    permits.release(1000)
    finished(browser, "a green frog")
    browser.until(lambda: browser.count("#visit img"))
    foreign = [
        request["request"]["url"]
        for entry in browser.driver.get_log("performance")
        for message in [json.loads(entry["message"])["message"]]
        if message["method"] == "Network.requestWillBeSent" and (request := message["params"])
        if not request["request"]["url"].startswith((address, "data:", "blob:", "about:", "chrome"))
    ]
    assert not foreign, "the page asks other servers for something"
    assert not browser.errors()


def test_stop_ends_the_image_of_one_visitor_only(
    browser: Any, open_browser: Callable[[], Any], address: str, permits: threading.Semaphore
) -> None:
    other = open_browser().open(address)
    other.write(FIELD, "a dog")
    browser.click("#start")
    browser.says("#note", "Generating")
    other.click("#start")
    other.says("#note", "Waiting for a free place")
    browser.click("#stop")
    browser.says("#note", "Stopped.")
    browser.until(lambda: browser.ready("#start"))
    permits.release(1000)
    finished(other, "a dog")
    assert browser.text("#note") == "Stopped." and not browser.count("#visit img"), "nothing comes after a stop"
    generate(browser, "a cat")


def test_what_waits_can_be_stopped(
    browser: Any, open_browser: Callable[[], Any], address: str, pipe: Any, permits: threading.Semaphore
) -> None:
    calls: list[Any] = []
    hook = pipe.text_encoder.register_forward_pre_hook(lambda *_: calls.append(_))
    other = open_browser().open(address)
    other.click("#start")
    other.says("#note", "Generating")
    browser.click("#start")
    browser.says("#note", "Waiting")
    browser.click("#stop")
    browser.says("#note", "Stopped.")
    permits.release(1000)
    other.until(lambda: other.ready("#start") and "seed" in other.text("#note"))
    time.sleep(1)  # in which the other would be generated
    hook.remove()
    assert len(calls) == 1, "the image that was stopped while it waited is not generated"


def test_a_link_generates_its_image_again(browser: Any, address: str, tmp_path: Path) -> None:
    browser.save_to(tmp_path)
    generate(browser, "a green frog")
    browser.until(lambda: "green+frog" in browser.script("return location.search"))
    saved = download(browser, tmp_path)
    link = browser.script("return location.href")
    browser.open(link)
    finished(browser, "a green frog")
    again = download(browser, tmp_path)
    assert browser.value(FIELD) == "a green frog" and again["tokens_digest"] == saved["tokens_digest"]
    browser.driver.get(f"{address}?prompt=a&method=magic")
    browser.until(lambda: "'magic'" in browser.text("body"))
    browser.driver.get(f"{address}?prompt=a&seed=-3")
    browser.until(lambda: "The link has the seed" in browser.text("body"))


def download(browser: Any, folder: Path) -> dict[str, Any]:
    """Press the button that saves the image; returns the parameters that the file carries."""
    browser.until(lambda: browser.script("return Boolean(document.querySelector('#save a, a#save, #save')?.href ?? true)"))
    browser.click("#save")
    file = browser.until(lambda: next((each for each in folder.iterdir() if each.suffix == ".png"), None))
    found = read_parameters(file)
    file.unlink()
    return found


def test_a_dropped_png_is_generated_again_and_compared(browser: Any, page: Any, tmp_path: Path) -> None:
    ((path, _),) = page.run("image", prompt="a cat", seed=5, method="gumbel")[-1]["stage"]
    browser.unfold("#again")
    browser.drop("#drop input[type=file]", Path(path))
    browser.says("#verdict", "tokens and pixels are identical")
    foreign = tmp_path / "foreign.png"
    foreign.write_bytes((FOLDER / "image-1.webp").read_bytes())
    browser.click("#drop button[aria-label=Clear], #drop [aria-label='Remove this file'], #drop .icon-button")
    browser.drop("#drop input[type=file]", foreign)
    browser.until(lambda: "PNG" in browser.messages())


def test_four_images_to_choose_from(browser: Any, tmp_path: Path) -> None:
    browser.save_to(tmp_path)
    browser.click("#count label:nth-of-type(2)")
    generate(browser, "a cat")
    browser.until(lambda: browser.count("#stage .thumbnail-item img") == 4)
    browser.says("#save", "Save the best one")
    browser.script("document.querySelectorAll('#stage .thumbnail-item')[3].click()")
    browser.says("#save", "Save this image")
    seed = int(browser.text("#note").split("seed ")[1].split(".")[0])
    assert download(browser, tmp_path)["seed"] == seed + 3


def test_an_image_follows_the_typing(browser: Any) -> None:
    browser.press_tab("Edit")
    browser.until(lambda: browser.attribute("#edit-stage img", "src"))
    before = browser.attribute("#edit-stage img", "src")
    browser.write(FIELD, "a blue whale")
    browser.says("#edit-note", "a blue whale")
    browser.until(lambda: browser.attribute("#edit-stage img", "src") not in ("", before))


def test_paint_over_a_part(browser: Any) -> None:
    from selenium import webdriver

    browser.press_tab("Edit")
    browser.until(lambda: browser.attribute("#edit-stage img", "src"))
    browser.click("#paint")
    canvas = browser.until(lambda: browser.shown("#editor canvas"))
    browser.script("arguments[0].scrollIntoView({block: 'center'})", canvas)

    def painted() -> bool:
        pointer = webdriver.ActionChains(browser.driver)
        pointer.move_to_element_with_offset(browser.shown("#editor canvas"), 20, -40).click_and_hold()
        pointer.move_by_offset(40, 30).move_by_offset(-30, 40).release().perform()
        return "Painted part" in browser.text("#edit-note")

    browser.until(painted)
    browser.click("#another")
    browser.says("#edit-note", "Painted part")


def test_race_and_video(browser: Any) -> None:
    browser.press_tab("Race")
    browser.says("#start", "Race")
    browser.click("#start")
    browser.says("#race-note", "gave the same image as Slow (ar)")
    browser.says("#track", "✓ Same image as Slow")
    browser.press_tab("Video")
    browser.click("#start")
    browser.says("#video-note", "s of video in")
    browser.until(lambda: ".webp" in browser.attribute("#clip img", "src"))
    assert "mode=video" in browser.script("return location.search") and not browser.errors()


def test_the_wall_has_its_files_and_only_modes_of_the_page() -> None:
    tiles = read_wall(("image", "video"))
    assert len(tiles) > 20 and all((FOLDER / tile["file"]).is_file() for tile in tiles)
    places = [number for number, tile in enumerate(tiles) if tile["mode"] == "video"]
    assert places[0] < 5 and len(places) > 3, "videos are among the images"
    assert {tile["mode"] for tile in read_wall(("image",))} == {"image"}
    assert "57 steps instead of 256: 1.2 seconds instead of 2.4." in (shown := render_race()) and "2.1 times as fast" in shown


def test_a_tile_is_generated_again_where_it_belongs(browser: Any) -> None:
    tiles = read_wall(("image", "video"))
    press_tile = "document.querySelectorAll('#wall .thumbnail-item')[arguments[0]].click()"
    browser.until(lambda: browser.count("#wall .thumbnail-item") == len(tiles))
    browser.script(press_tile, 0)
    assert f"seed {tiles[0]['seed']}." in finished(browser, tiles[0]["prompt"])
    assert not browser.shown(".vg-replay"), "the result takes the place of the race"
    number = next(k for k, each in enumerate(tiles) if each["mode"] == "video")
    browser.script(press_tile, number)
    browser.says("#video-note", f"seed {tiles[number]['seed']}")


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_the_first_screen_shows_prompt_and_race(browser: Any, address: str, width: int, height: int) -> None:
    browser.prefer("light", motion="no-preference")
    browser.open(address)
    browser.resize(width, height)
    bottom = "return document.querySelector(arguments[0]).getBoundingClientRect().bottom"
    for selector in ("#prompt", "#start", "#count", ".vg-replay"):
        browser.until(lambda selector=selector: 0 < browser.script(bottom, selector) <= height)
    browser.until(lambda: browser.script("return document.documentElement.scrollWidth") <= width)
    assert not browser.shown("#seed"), "settings are folded away"
    assert browser.until(lambda: int(browser.text(".vg-lane:last-of-type .vg-passes") or 0)), "the race is replayed"
    browser.until(lambda: browser.count(".vg-finished"))
    for tab in ("Race", "Edit", "Video", "Image"):
        browser.press_tab(tab)
        browser.until(lambda: browser.script("return document.documentElement.scrollWidth") <= width)


def test_generate_is_few_tabs_away(browser: Any) -> None:
    browser.script("document.activeElement.blur()")
    browser.driver.execute_cdp_cmd("Page.bringToFront", {})
    keys = 0
    while browser.script("return document.activeElement.id") != "start":
        keys += 1
        assert keys <= 5, browser.script("return document.activeElement.outerHTML")
        for kind in ("keyDown", "keyUp"):
            event = {"type": kind, "key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}
            browser.driver.execute_cdp_cmd("Input.dispatchKeyEvent", event)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(browser: Any, theme: str) -> None:
    browser.prefer(theme)
    browser.until(lambda: browser.script("return document.body.classList.contains('dark')") == (theme == "dark"))
    browser.unfold("#advanced")
    generate(browser, "a cat")
    low = {}
    for tab in ("Image", "Edit", "Video", "Race"):
        browser.press_tab(tab)
        browser.until(lambda: browser.script("return document.getAnimations().every(each => each.playState !== 'running')"))
        low |= browser.script(LOW_CONTRAST)
    assert not low


# The page reads that its stream of results was closed only after the server has taken the next event.
_LATE_CLOSE = """
const open = window.fetch, close = 'data: {"msg":"close_stream"';
let join, joined = new Promise((found) => (join = found));
window.held = 0;
window.fetch = async (resource, options) => {
  const url = String(resource.url ?? resource), answer = await open(resource, options);
  if (url.includes('/queue/join')) setTimeout(() => { join(); joined = new Promise((found) => (join = found)); }, 200);
  if (!url.includes('/queue/data')) return answer;
  const late = new TransformStream({async transform(chunk, out) {
    const text = new TextDecoder().decode(chunk), at = text.indexOf(close);
    if (at < 0) return out.enqueue(chunk);
    out.enqueue(new TextEncoder().encode(text.slice(0, at)));
    window.held++;
    await joined;
    out.enqueue(new TextEncoder().encode(text.slice(at)));
  }});
  return new Response(answer.body.pipeThrough(late), answer);
};
"""


def test_a_click_while_the_stream_of_results_closes_is_not_lost(browser: Any, address: str) -> None:
    script = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": f"{{{_LATE_CLOSE}}}"})
    try:
        browser.open(address)
        browser.until(lambda: browser.script("return window.held"))
        browser.click("#start")
        browser.says("#note", "seed")
        browser.press_tab("Race")
        browser.click("#start")
        browser.says("#race-note", "was first")
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


def test_a_page_that_is_left_frees_its_connections(browser: Any, address: str) -> None:
    """A browser has six to a server, and may keep those of pages that were left."""
    for number in range(9):
        browser.open(f"{address}?visit={number}")
        browser.until(lambda: browser.count("#wall img"), 20)
