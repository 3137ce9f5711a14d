"""The page in headless Chromium, with a small random model: what a person does, and what they then see."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from vargen.demo.engine import Engine
from vargen.demo.settings import LONGEST_PROMPT

Open = Callable[[str], Any]


def test_type_generate_and_watch_the_preview_change(browser: Any, address: str, slow: Callable[[float], None]) -> None:
    slow(0.03)
    browser.write("#prompt textarea, #prompt input", "a green frog")
    browser.driver.switch_to.active_element.send_keys("\n")  # Enter draws
    seen, maps = set(), set()

    def finished() -> bool:
        seen.add(browser.attribute("#stage img", "src"))
        maps.add(browser.attribute("#stage svg", "aria-label"))
        return "Drawn in" in browser.text("#note")

    browser.until(finished)
    previews = {each for each in seen if each.startswith("data:image/webp")}
    assert len(previews) >= 2, "the picture has to fill in"
    assert len(maps) >= 3
    assert browser.attribute("#stage svg", "aria-label").startswith("Token map: 64 of 64 tokens")
    assert browser.attribute("#stage img", "src").startswith("data:image/png")
    assert "green frog" in browser.attribute("#stage img", "alt")
    browser.until(lambda: browser.all("#gallery img"))
    assert browser.shown("#generate").is_enabled()
    foreign = [
        request["request"]["url"]
        for entry in browser.driver.get_log("performance")
        for message in [json.loads(entry["message"])["message"]]
        if message["method"] == "Network.requestWillBeSent" and (request := message["params"])
        if not request["request"]["url"].startswith((address, "data:", "blob:", "about:", "chrome"))
    ]
    assert not foreign, "the page asks other servers for something"
    severe = [entry["message"] for entry in browser.driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert not severe


def test_stop_ends_a_drawing(browser: Any, slow: Callable[[float], None]) -> None:
    slow(0.3)  # 20 seconds a picture
    browser.click("#generate")
    browser.until(lambda: "Drawing" in browser.text("#note"))
    browser.click("#stop")
    browser.until(lambda: "Stopped after" in browser.text("#note"), 5)
    assert " of 64 tokens" in browser.text("#note")
    browser.until(lambda: browser.shown("#generate").is_enabled())
    slow(0.0)
    browser.click("#generate")
    browser.until(lambda: "Drawn in" in browser.text("#note"))


def test_race(browser: Any, engine: Engine) -> None:
    browser.press_tab("Race")
    browser.click("#race")
    names = [name for name in ("ar", "gumbel", "gsd") if name in {each.name for each in engine.available}]
    browser.until(lambda: "was first" in browser.text("#race-note"))
    assert len(browser.all("#track figure")) == len(names)
    assert len(browser.all("#track tbody tr")) == len(names)
    assert all(each.get_attribute("src").startswith("data:image/png") for each in browser.all("#track img"))
    assert "identical picture to ar" in browser.text("#track")
    assert "gumbel drew the identical picture" in browser.text("#race-note")


def test_race_needs_two_methods(browser: Any) -> None:
    browser.press_tab("Race")
    for box in browser.all("#racers input:checked")[1:]:
        browser.driver.execute_script("arguments[0].click()", box)
    browser.click("#race")
    browser.until(lambda: "Choose two to 4 methods" in browser.toasts())


def test_explore(browser: Any) -> None:
    browser.press_tab("Explore")
    browser.click("#explore")
    browser.until(lambda: "Done: seed" in browser.text("#explore-note"))
    assert len(browser.all("#strip figure")) == 4
    assert browser.text("#strip figure figcaption") == "exact"
    assert browser.text("#strip").count("relaxation") == 4


def test_a_dropped_picture_reloads_its_parameters(browser: Any, address: str, tmp_path: Path) -> None:
    chunk = PngInfo()
    told = {"prompt": "a blue ${1+1} {{whale}} <b>", "seed": 77, "accelerator": "ar", "guidance_scale": 2.5, "top_k": 9}
    chunk.add_text("vargen", json.dumps(told))
    Image.new("RGB", (8, 8)).save(tmp_path / "ours.png", pnginfo=chunk)
    Image.new("RGB", (8, 8)).save(tmp_path / "foreign.png")
    browser.all("#drop input[type=file]")[0].send_keys(str(tmp_path / "ours.png"))
    field = "#prompt textarea, #prompt input"
    browser.until(lambda: browser.shown(field).get_property("value") == told["prompt"])
    assert browser.all("#seed input")[0].get_property("value") == "77"
    assert browser.all("#lock input")[0].is_selected()
    browser.click("#generate")
    browser.until(lambda: "seed 77" in browser.text("#note"))
    assert browser.attribute("#stage img", "alt") == told["prompt"], "what people type is text, not markup or a template"

    browser.open(address)
    browser.all("#drop input[type=file]")[0].send_keys(str(tmp_path / "foreign.png"))
    browser.until(lambda: "carries no vargen parameters" in browser.toasts())


def test_bad_input_gets_a_message(browser: Any) -> None:
    field = "#prompt textarea, #prompt input"
    browser.write(field, " ")
    browser.click("#generate")
    browser.until(lambda: "Type what to draw first" in browser.toasts())
    assert browser.shown("#generate").is_enabled()
    assert "Traceback" not in browser.text("body")
    browser.write(field, "x" * (LONGEST_PROMPT + 50))
    assert len(browser.shown(field).get_property("value")) <= LONGEST_PROMPT


def test_two_browsers_at_once(browser: Any, open_browser: Open, address: str, slow: Callable[[float], None]) -> None:
    one, two = browser, open_browser(address)
    slow(0.02)
    for browser, prompt in ((one, "a cat"), (two, "a dog")):
        browser.write("#prompt textarea, #prompt input", prompt)
    one.click("#generate")
    two.click("#generate")
    for browser, prompt in ((one, "a cat"), (two, "a dog")):
        browser.until(lambda b=browser: "Drawn in" in b.text("#note"))
        assert browser.attribute("#stage img", "alt") == prompt
        browser.until(lambda b=browser: b.all("#gallery img"))
        assert len(browser.all("#gallery img")) == 1, "a session sees its own pictures only"


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen(browser: Any, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.click("#generate")
    browser.until(lambda: "Drawn in" in browser.text("#note") and browser.all("#gallery img"))
    for tab in ("Generate", "Race", "Explore"):
        browser.press_tab(tab)
        assert browser.driver.execute_script("return document.documentElement.scrollWidth") <= width
