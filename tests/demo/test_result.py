"""What a visitor sees of a result, in headless Chromium: what it took, how to keep it, and that nothing moves meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

FIELD = "#prompt textarea, #prompt input"
SIZES = [(1280, 900), (390, 844)]


def generate(browser: Any, link: str) -> None:
    browser.open(link)
    browser.says("#note", "Generated in")
    browser.until(lambda: browser.ready("#generate") and browser.ready("#download"))


SMALL = """return [...document.querySelectorAll(arguments[0])].filter(each => each.offsetParent)
.map(each => [each.innerText, each.getBoundingClientRect().height]).filter(each => each[1] < arguments[1])"""


def box(browser: Any, selector: str) -> dict[str, float]:
    return dict(browser.script("return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()", selector))


def test_an_image_is_compared_with_the_slow_way(browser: Any, address: str) -> None:
    generate(browser, f"{address}?prompt=a+green+frog&seed=77&method=gumbel")
    browser.click("#compare")
    browser.says("#race-note", "gave the same image as Slow (ar)")
    assert "mode=race&prompt=a+green+frog&seed=77&method=ar%2Cgumbel" in browser.script("return location.search")
    browser.until(lambda: browser.attribute("#track .vg-copy", "data-link") == browser.script("return location.search"))
    assert browser.count("#track figure") == 2 and browser.text("#track").count("Same image as Slow (ar)") == 1
    assert browser.value(FIELD) == "a green frog"


def test_the_same_image_is_promised_only_by_a_method_that_keeps_the_promise(browser: Any, address: str) -> None:
    generate(browser, f"{address}?prompt=a+green+frog&seed=77&method=gumbel")
    assert browser.text("#compare") == "Race to check" and browser.shown("#same")
    browser.unfold("#advanced")
    browser.click("#method input[value=gsd]")
    browser.click("#generate")
    browser.until(lambda: browser.ready("#compare") and browser.text("#compare") == "Race the slow way")
    assert not browser.text("#same").strip() and not browser.shown("#same")


_LEAVE = """
const stream = fetch('gradio_api/heartbeat/somebody').then(each => each.text()).then(() => 'ended', error => error.name);
dispatchEvent(new PageTransitionEvent('pagehide'));
return stream;
"""


def test_a_page_that_is_left_closes_its_streams(browser: Any) -> None:
    """A browser has six connections to an address and keeps pages for Back: later pages would wait for a minute."""
    assert browser.script(_LEAVE) == "AbortError"


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_video_is_saved_and_shared_from_right_under_it(
    browser: Any, address: str, tmp_path: Path, width: int, height: int
) -> None:
    browser.save_to(tmp_path)
    browser.resize(width, height)
    browser.open(f"{address}?mode=video&prompt=winking+face&seed=7&method=sdvg")
    browser.says("#video-note", "Generated ")
    browser.until(lambda: browser.shown("#video-stage .vg-save"))
    assert box(browser, "#video-stage .vg-save")["bottom"] <= height
    assert width > 640 or browser.script(SMALL, "#video-stage button", 44) == []
    assert browser.attribute("#video-stage .vg-copy", "data-link") == browser.script("return location.search")
    browser.click("#video-stage .vg-save")
    file = browser.until(lambda: next(tmp_path.glob("*.webp"), None))
    assert file.read_bytes()[8:12] == b"WEBP"
    browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
