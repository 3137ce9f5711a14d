"""The page in headless Chromium, with a small random model: what a person does, and what they then see."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from vargen.demo.history import MAX_IMAGES_KEPT
from vargen.demo.image_service import ImageService
from vargen.demo.jobs import Job

Open = Callable[[], Any]
FIELD = "#prompt textarea, #prompt input"


_KEEP_PROGRESS = """
window.progress = [];
const keep = () => window.progress.push(document.querySelector('#details .vg-progress')?.innerText ?? '');
new MutationObserver(keep).observe(document.body, {childList: true, subtree: true});
"""


def test_type_generate_and_watch_the_preview_change(
    browser: Any, address: str, service: ImageService, permits: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = []
    start = service.start
    monkeypatch.setattr(service, "start", lambda *values, **more: jobs.append(start(*values, **more)) or jobs[-1])
    browser.write(FIELD, "a green frog")
    browser.driver.switch_to.active_element.send_keys("\n")  # Enter draws
    browser.script(_KEEP_PROGRESS)
    previews, maps = set(), set()

    def filled_in() -> bool:
        """Allow the next pass once the page shows the latest, however slow it is."""
        label, source = browser.attribute("#details svg", "aria-label"), browser.attribute("#stage img", "src")
        maps.add(label)
        previews.update([source] if source.startswith("data:image/webp") else [])
        if jobs and label.startswith(f"Token map: {jobs[0].tokens} of 64"):
            permits.release()
        return len(previews) >= 2 and len(maps) >= 3

    browser.until(filled_in)
    permits.release(1000)
    browser.says("#note", "Generated in")
    left = [float(seconds) for seconds in re.findall(r"([\d.]+) s left", browser.script("return window.progress.join()"))]
    assert left and max(left) > 0.3, "at least one pass is left"
    browser.until(lambda: browser.text("#details .vg-progress") == "100%")
    browser.until(lambda: browser.attribute("#details svg", "aria-label").startswith("Token map: 64 of 64 tokens"))
    browser.until(lambda: browser.attribute("#stage img", "src").startswith("data:image/png"))
    assert "green frog" in browser.attribute("#stage img", "alt")
    browser.until(lambda: browser.count("#gallery img"))
    browser.until(lambda: browser.ready("#generate"))
    foreign = [
        request["request"]["url"]
        for entry in browser.driver.get_log("performance")
        for message in [json.loads(entry["message"])["message"]]
        if message["method"] == "Network.requestWillBeSent" and (request := message["params"])
        if not request["request"]["url"].startswith((address, "data:", "blob:", "about:", "chrome"))
    ]
    assert not foreign, "the page asks other servers for something"
    assert not browser.errors()


def test_stop_ends_a_generation(browser: Any, permits: threading.Semaphore) -> None:
    browser.click("#generate")
    browser.says("#note", "Generating")
    browser.click("#stop")
    browser.until(lambda: not browser.ready("#stop"))
    permits.release(1000)
    browser.says("#note", "Stopped after")
    assert " of 64 tokens" in browser.text("#note")
    browser.until(lambda: browser.ready("#generate"))
    browser.click("#generate")
    browser.says("#note", "Generated in")


_SLIDER = """
const slider = document.querySelector('#slider'), images = [...slider.querySelectorAll('img')];
const below = images.map(each => each.getBoundingClientRect().bottom - slider.getBoundingClientRect().bottom);
return [images[1].style.clipPath, Math.max(...below), ...images.map(each => each.naturalWidth)];
"""


def test_race(browser: Any, service: ImageService) -> None:
    webdriver = pytest.importorskip("selenium.webdriver")
    browser.press_tab("Race")
    browser.click("#race")
    names = [name for name in ("ar", "gumbel", "gsd") if name in {each.name for each in service.available}]
    browser.says("#race-note", "was first")
    browser.says("#track", "Same image as Slow (ar)")

    def drawn() -> bool:
        sources = browser.attributes("#track img", "src")
        return len(sources) == len(names) and all(each.startswith("data:image/png") for each in sources)

    browser.until(drawn)
    assert browser.count("#track figure") == browser.count("#track tbody tr") == len(names)
    assert "gave the same image as Slow (ar)" in browser.text("#race-note")
    captions = browser.script("return [...document.querySelectorAll('#track figcaption')].map(each => each.innerText)")
    for name, words in [("Slow (ar)", "one token per step"), ("Fast (gumbel)", "several tokens per step")]:
        assert [name in caption for caption in captions if words in caption] == [True]
    browser.until(lambda: browser.count("#slider img") == 2 and browser.shown("#slider img"))
    assert f"{names[0]} (left) and {names[-1]} (right)" in browser.text("#slider")
    browser.until(lambda: set(browser.script(_SLIDER)[2:]) == {16}, 20)
    cut, bottom, *_ = browser.script(_SLIDER)
    assert bottom <= 1, "the images are seen as a whole"
    handle = browser.shown("#slider [data-testid=slider]")
    browser.script("arguments[0].scrollIntoView({block: 'center'})", handle)
    webdriver.ActionChains(browser.driver).drag_and_drop_by_offset(
        handle.find_element("css selector", ".icon-wrap"), 100, 0
    ).perform()
    browser.until(lambda: browser.script(_SLIDER)[0] != cut)


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
        browser.click("#generate")
        browser.says("#note", "Generated in")
        browser.press_tab("Race")
        browser.click("#race")
        browser.says("#race-note", "was first")
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


def test_race_needs_two_methods(browser: Any) -> None:
    browser.press_tab("Race")
    browser.until(lambda: browser.ready("#race"))
    browser.script("[...document.querySelectorAll('#racers input:checked')].slice(1).forEach(each => each.click())")
    browser.until(lambda: browser.count("#racers input:checked") == 1)
    browser.click("#race")
    browser.toast("Choose two to 4 methods")


def test_a_dropped_image_reloads_its_parameters(browser: Any, address: str, tmp_path: Path) -> None:
    chunk = PngInfo()
    reported = {"prompt": "a blue ${1+1} {{whale}} <b>", "seed": 77, "accelerator": "ar", "guidance_scale": 2.5, "top_k": 9}
    chunk.add_text("vargen", json.dumps(reported))
    Image.new("RGB", (8, 8)).save(tmp_path / "ours.png", pnginfo=chunk)
    Image.new("RGB", (8, 8)).save(tmp_path / "foreign.png")
    browser.drop("#drop input[type=file]", tmp_path / "ours.png")
    browser.until(lambda: browser.value(FIELD) == reported["prompt"])
    browser.says("#verdict", "Another image.")
    browser.click("#generate")
    browser.says("#note", "seed 77")
    browser.until(lambda: browser.attribute("#stage img", "src").startswith("data:image/png"))
    assert browser.attribute("#stage img", "alt") == reported["prompt"], "what people type is text, not markup or a template"

    browser.open(address)
    browser.drop("#drop input[type=file]", tmp_path / "foreign.png")
    browser.toast("carries no vargen parameters")


def test_two_browsers_at_once(browser: Any, open_browser: Open, address: str, slow: Callable[[float], None]) -> None:
    one, two = browser, open_browser().open(address)
    before = one.count("#gallery img")
    slow(0.02)
    for each, prompt in ((one, "a cat"), (two, "a dog")):
        each.write(FIELD, prompt)
    one.click("#generate")
    two.click("#generate")
    for each, prompt, images in ((one, "a cat", before + 1), (two, "a dog", 1)):
        each.says("#note", "Generated in")
        each.until(lambda b=each, p=prompt: b.attribute("#stage img", "alt") == p)
        each.until(lambda b=each, n=images: b.count("#gallery img") == min(n, MAX_IMAGES_KEPT))


def test_a_tab_makes_videos_by_a_model_of_its_own(browser: Any) -> None:
    browser.press_tab("Video")
    browser.click("#video-examples button")
    browser.until(lambda: browser.shown(FIELD).get_property("value") == "winking face")
    browser.unfold("#advanced")
    browser.click("#lock input")
    before = browser.shown("#seed input").get_property("value")
    browser.click("#video-make")
    browser.says("#video-note", "Generated ")
    browser.until(lambda: browser.attribute("#video-stage img", "src").startswith("data:image/webp"))
    assert browser.attribute("#video-stage img", "alt").startswith("winking face, ")
    assert browser.count("#video-badges .vg-block") >= 2
    assert browser.shown("#seed input").get_property("value") == before
    browser.click("#lock input")
    browser.driver.execute_script("arguments[0].focus()", browser.shown(FIELD))
    browser.driver.switch_to.active_element.send_keys("\n")  # Enter starts what the open tab starts
    browser.until(lambda: browser.shown("#seed input").get_property("value") != before)
    browser.says("#video-note", "Generated ")


_CUT = """
return [...document.querySelectorAll('[role=listbox], input[aria-haspopup=listbox], .wrap input')].filter(each => {
  if (!each.offsetParent || each.type !== 'text') return false;
  const style = getComputedStyle(each), pen = document.createElement('canvas').getContext('2d');
  pen.font = style.font;
  const icon = each.closest('.wrap')?.querySelector('svg')?.getBoundingClientRect();
  const box = each.getBoundingClientRect(), start = box.left + parseFloat(style.paddingLeft);
  return start + pen.measureText(each.value).width > (icon && icon.width ? icon.left : box.right);
}).map(each => each.value)"""


def test_on_narrow_and_wide_screens_all_is_seen_and_the_image_is_above_the_methods(browser: Any) -> None:
    browser.click("#generate")
    browser.says("#note", "Generated in")
    browser.until(lambda: browser.count("#gallery img"))
    top = "return document.querySelector(arguments[0]).getBoundingClientRect().top"
    for width in (390, 1280):
        browser.resize(width, 900)
        for tab, shown in {"Race": "#race", "Video": "#video-note", "Image": "#stage"}.items():
            browser.press_tab(tab)
            browser.until(lambda shown=shown: browser.shown(shown))
            browser.until(lambda width=width: browser.script("return document.documentElement.scrollWidth") <= width)
            if tab in ("Image", "Video"):
                assert browser.count("[role=listbox], .wrap input[type=text], .wrap input") and browser.script(_CUT) == []
        assert browser.script(top, "#generate") < browser.script(top, "#stage") < browser.script(top, "#gallery")
