"""What a visitor keeps and shares, in headless Chromium: links, history, theme, files, and a PNG that is dropped anywhere."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import gradio as gr
import pytest
from PIL import Image
from rejects import rejects

from vargen.demo.history import MAX_IMAGES_KEPT, History, PastImage
from vargen.demo.image_service import ImageService
from vargen.demo.links import link_to, request_of_link
from vargen.demo.request import PageRequest
from vargen.image_metadata import read_parameters

FIELD = "#prompt textarea, #prompt input"
DEFAULTS = {"guidance_scale": 4.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


@pytest.mark.parametrize(
    "request_",
    [
        PageRequest("a cat & a <dog>", "gumbel:window=8", 7),
        PageRequest("a", "ar", 0, 2.5, 0.5, 9, 0.75, "blurry, ugly", 3, 4),
    ],
)
def test_a_link_holds_its_request(request_: PageRequest) -> None:
    query = {key: values[0] for key, values in parse_qs(urlsplit(link_to(request_, DEFAULTS)).query).items()}
    assert request_of_link(query, DEFAULTS) == request_
    assert set(query) >= {"prompt", "seed", "method"}


def test_a_link_out_of_range_gets_a_message() -> None:
    assert request_of_link({"seed": "3"}, DEFAULTS) is None
    for query, message in (({"seed": "x"}, "seed"), ({"guidance": "99"}, "Guidance"), ({"images": "1e3"}, "number of images")):
        rejects(lambda query=query: request_of_link({"prompt": "a", **query}, DEFAULTS), message)


def test_a_visit_keeps_its_latest_images() -> None:
    images = [PastImage(f"{k}.png", PageRequest("a", seed=k), 1, 0.1) for k in range(MAX_IMAGES_KEPT + 9)]
    history = History(gr.State([]), gr.Gallery())
    held, shown = history.add(images[:-1], images[-1:])
    assert held == [images[-1], *images[: MAX_IMAGES_KEPT - 1]] and len(shown.value) == MAX_IMAGES_KEPT


def stage_pixels(browser: Any) -> bytes:
    """The pixels of the image on the stage; its file also carries the seconds that it took."""
    browser.until(lambda: browser.attribute("#stage img", "src").startswith("data:image/png"))
    content = base64.b64decode(browser.attribute("#stage img", "src").split(",")[1])
    with Image.open(io.BytesIO(content)) as opened:
        return opened.tobytes()


@pytest.fixture
def download(browser: Any, tmp_path: Path) -> Callable[[str], io.BytesIO]:
    """Presses a button and returns the file that the browser saves."""
    browser.save_to(tmp_path)

    def press(selector: str) -> io.BytesIO:
        browser.click(selector)
        file = browser.until(lambda: next((each for each in tmp_path.iterdir() if each.suffix == ".png"), None))
        content = io.BytesIO(file.read_bytes())
        file.unlink()
        return content

    return press


def generate(browser: Any, prompt: str) -> None:
    """By Ctrl and Enter in the prompt."""
    browser.write(FIELD, prompt)
    browser.until(lambda: browser.ready("#generate"))
    browser.driver.switch_to.active_element.send_keys("\ue009\ue007")  # Control and Enter
    browser.until(lambda: browser.attribute("#stage img", "alt") == prompt)
    browser.says("#note", "Generated in")


def test_a_link_generates_its_image_and_reload_and_back_keep_everything(browser: Any, address: str) -> None:
    browser.open(f"{address}?prompt=a+green+frog&seed=77&method=ar")
    browser.says("#note", "seed 77")
    assert browser.attribute("#stage img", "alt") == "a green frog" and browser.value(FIELD) == "a green frog"
    first = stage_pixels(browser)
    generate(browser, "a blue whale")
    browser.until(lambda: "blue+whale" in browser.script("return location.search"))
    second, link = stage_pixels(browser), browser.script("return location.search")
    browser.until(lambda: browser.count("#gallery img") == 2)
    browser.open(f"{address}{link}")  # as a reload does
    browser.until(lambda: browser.attribute("#stage img", "alt") == "a blue whale")
    browser.says("#note", "Generated in")
    assert stage_pixels(browser) == second and browser.value(FIELD) == "a blue whale"
    generate(browser, "a red bird")
    browser.until(lambda: "red+bird" in browser.script("return location.search"))
    browser.driver.back()
    browser.until(lambda: browser.value(FIELD) == "a blue whale" and browser.script("return Boolean(window.vargen)"))
    browser.until(lambda: browser.attribute("#stage img", "alt") == "a blue whale")
    assert first != second


def test_a_link_that_asks_for_nonsense_gets_a_message(browser: Any, address: str) -> None:
    browser.driver.get(f"{address}?prompt=a&method=magic")
    browser.until(lambda: "'magic' is not available" in browser.text("body"))


def test_a_past_image_is_shown_with_all_that_belongs_to_it(browser: Any, download: Callable[[str], Any]) -> None:
    generate(browser, "a green frog")
    browser.until(lambda: browser.count("#gallery img") >= 1)
    first, width = stage_pixels(browser), browser.script("return document.querySelector('#stage img').width")
    generate(browser, "a blue whale")
    assert read_parameters(download("#download"))["prompt"] == "a blue whale"
    browser.until(lambda: browser.count("#gallery .thumbnail-item img") >= 2)
    browser.script("document.querySelectorAll('#gallery .thumbnail-item')[1].click()")
    browser.until(lambda: browser.attribute("#stage img", "alt") == "a green frog")
    assert stage_pixels(browser) == first and browser.script("return document.querySelector('#stage img').width") == width
    assert read_parameters(download("#download"))["prompt"] == "a green frog"
    assert "green+frog" in browser.attribute("#stage [data-link]", "data-link")
    assert browser.value(FIELD) == "a blue whale"
    browser.click("#reuse")
    browser.until(lambda: browser.value(FIELD) == "a green frog")
    browser.click("#stage img")
    browser.until(lambda: browser.shown("dialog.vg-zoom img"))
    assert browser.script("return document.querySelector('dialog.vg-zoom img').width") > width
    browser.click("dialog.vg-zoom")
    browser.until(lambda: not browser.count("dialog.vg-zoom"))


def test_each_of_several_images_has_its_seed_and_can_be_saved(browser: Any, download: Callable[[str], Any]) -> None:
    generate(browser, "a green frog")
    browser.click("#more-like-this")
    browser.until(lambda: browser.count("#stage figcaption") == 4)
    seeds = [
        int(caption.split()[1].strip(",")) for caption in browser.text("#stage .vg-stage").split("\n") if "seed" in caption
    ]
    assert len(seeds) == 4 and seeds == list(range(seeds[0], seeds[0] + 4))
    browser.says("#download", "first image")
    assert read_parameters(download("#download"))["seed"] == seeds[0]
    browser.until(lambda: browser.count("#gallery .thumbnail-item img") >= 4)
    browser.script("document.querySelectorAll('#gallery .thumbnail-item')[0].click()")
    browser.says("#download", "Save image")
    assert read_parameters(download("#download"))["seed"] == seeds[-1]


_DROP = """
const bytes = Uint8Array.from(atob(arguments[0]), c => c.charCodeAt(0)), transfer = new DataTransfer();
transfer.items.add(new File([bytes], 'shared.png', {type: 'image/png'}));
for (const kind of ['dragover', 'drop']) {
  const event = new DragEvent(kind, {dataTransfer: transfer, bubbles: true, cancelable: true});
  document.querySelector('#modes').dispatchEvent(event);
}
"""


def test_a_png_dropped_anywhere_is_generated_again_and_compared(browser: Any, service: ImageService) -> None:
    result = service.start(PageRequest("a green frog", "ar", 5), previews=False).result()
    shared = Path(service.save(result)[0]).read_bytes()
    browser.script(_DROP, base64.b64encode(shared).decode())
    browser.says("#verdict", "The same image: its tokens and pixels are identical.")
    assert browser.value(FIELD) == "a green frog"


def test_the_link_of_an_image_is_copied(browser: Any, address: str) -> None:
    allowed = {"origin": address.rstrip("/"), "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    browser.driver.execute_cdp_cmd("Browser.grantPermissions", allowed)
    generate(browser, "a green frog")
    browser.click("#copy-link")
    browser.says("#copy-link", "Link copied")
    copied = browser.script("return navigator.clipboard.readText()")
    assert copied == address + browser.attribute("#stage [data-link]", "data-link") and "prompt=a+green+frog" in copied
    assert browser.attribute("#copy-link", "title") != browser.attribute("#reuse", "title") != ""
    browser.until(lambda: browser.text("#copy-link") == "Copy link to share")
    pixels = stage_pixels(browser)
    browser.open(copied)
    browser.until(lambda: browser.attribute("#stage img", "alt") == "a green frog")
    assert stage_pixels(browser) == pixels
