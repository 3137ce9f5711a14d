"""A page with a small random model, served from this process, and headless browsers to look at it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

gradio = pytest.importorskip("gradio", reason="the demo needs gradio: pip install -e .[demo]")

from tiny_families import brightness  # noqa: E402
from tiny_models import text_pipeline, text_var_pipeline  # noqa: E402

from vargen.demo.launch import serve  # noqa: E402
from vargen.demo.page import Models, build_page  # noqa: E402
from vargen.pipelines.loading import open_pipeline  # noqa: E402

_FLAGS = (
    "--headless --no-sandbox --use-angle=swiftshader --enable-unsafe-swiftshader "
    "--disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,1000"
).split()


@pytest.fixture(scope="session")
def pipe() -> Any:
    """A random model of 8 x 8 tokens. Each pass waits for `pipe.permits`, a semaphore, if it has one."""
    made: Any = text_pipeline(grid_size=8)
    made.permits, made.passes = None, 0
    made.set_progress_bar_config(disable=True)

    def wait(*_: Any) -> None:
        made.passes += 1
        if made.permits is not None:
            made.permits.acquire()

    made.transformer.register_forward_pre_hook(wait)
    return made


@pytest.fixture(scope="session")
def models(pipe: Any, video_model: Path) -> Models:
    """A page of four modes with random models."""
    edit: Any = text_var_pipeline()
    edit.set_progress_bar_config(disable=True)
    return Models("tiny", pipe, edit, open_pipeline(video_model), None, score_by_brightness, has_examples=True)


def score_by_brightness(images: Any, prompts: Any) -> Any:
    """Score frames of videos, float `[N, 3, Y, X]`, and PIL images."""
    frames = torch.stack([pil_to_tensor(each) / 255 for each in images]) if isinstance(images, list) else images
    return brightness(frames, prompts)


def pil_to_tensor(image: Any) -> Any:
    return torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1)


@pytest.fixture(scope="session")
def page(models: Models) -> Any:
    return Page(build_page(models))


class Page:
    """A page whose functions are called without a browser; components are named by their `elem_id`."""

    def __init__(self, blocks: Any):
        self.blocks = blocks

    def find(self, name: str) -> Any:
        return next(each for each in self.blocks.blocks.values() if each.elem_id == name)

    def run(self, mode: str, function: str = "run_open_mode", number: int = 0, **values: Any) -> list[dict[str, Any]]:
        """Run a function of all inputs; returns the updates, by the name or else the type of the component."""
        found = [each for each in self.blocks.fns.values() if each.name == function][number]
        given = {each: each.value for each in found.inputs}
        states = [each for each in found.inputs if type(each).__name__ == "State"]
        given[next(each for each in states if each.value in ("image", "video"))] = mode
        given |= {self.find(name): value for name, value in values.items()}
        return [{key.elem_id or type(key).__name__: _plain(value) for key, value in each.items()} for each in found.fn(given)]


def _plain(value: Any) -> Any:
    """Return what an update holds: paths of files, and pairs of path and caption of galleries."""
    value = getattr(value, "value", value)
    if isinstance(value, dict) and "path" in value:
        return value["path"]
    if isinstance(value, list) and value and isinstance(value[0], dict) and "image" in value[0]:
        return [(each["image"]["path"], each["caption"] or "") for each in value]
    return value


@pytest.fixture(scope="session")
def address(page: Any) -> Iterator[str]:
    yield from _serve_page(page.blocks)


def find_free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="session")
def free_port() -> int:
    return find_free_port()


@pytest.fixture(scope="session")
def serve_page() -> Callable[[Any], Iterator[str]]:
    return _serve_page


def _serve_page(page: Any) -> Iterator[str]:
    """Serve a page at a free port until the test's end; yields its address."""
    yield serve(page, "127.0.0.1", find_free_port())  # gradio's own search is a race between parallel test workers
    page.close(verbose=False)


@pytest.fixture
def permits(pipe: Any) -> Iterator[threading.Semaphore]:
    """Has passes wait; a release allows one."""
    pipe.permits = threading.Semaphore(0)
    yield pipe.permits
    made, pipe.permits = pipe.permits, None
    made.release(1000)


# Messages vanish by themselves after seconds, which a busy machine may take to look.
_KEEP_MESSAGES = """
window.messages = [];
const keep = () => document.querySelectorAll('.toast-body').forEach(each => window.messages.push(each.innerText));
new MutationObserver(keep).observe(document.body, {childList: true, subtree: true, characterData: true});
"""

_NOTES = ("#note", "#edit-note", "#video-note", "#race-note")  # where a mode says how far it is


class Browser:
    """One headless Chromium, and the few things that tests do with it.

    The page draws itself again at any moment, and late on a busy machine. So what is read is asked for by script, in one go,
    and what is done is done again until the page shows that it happened; no element is kept.
    """

    def __init__(self, start: Callable[[], Any]):
        self._start = start
        self.driver = start()

    def leave(self) -> None:
        """Leave the page. A Chromium that does not, which happens on loaded machines once in many runs, is replaced."""
        try:
            self.driver.set_page_load_timeout(60)
            self.driver.get("about:blank")
        except Exception as error:  # of Selenium, or of its connection
            warnings.warn(f"a browser hung when it left its page, and is replaced: {type(error).__name__}", stacklevel=1)
            profile = self.driver.capabilities["chrome"]["userDataDir"]
            subprocess.run(["pkill", "-9", "-f", f"--user-data-dir={profile}"], check=False)
            self.driver.service.process.kill()
            self.driver = self._start()

    def open(self, url: str) -> Browser:
        self.driver.get(url)
        self.until(lambda: self.shown("#start"))
        settled = (
            "const same = window.first === document.querySelector('#start'); window.first = document.querySelector('#start');"
        )
        for _ in range(3):  # gradio draws a page twice when it is loaded
            time.sleep(0.2)
            self.until(lambda: self.script(f"{settled} return same"))
        self.script(_KEEP_MESSAGES)
        return self

    def script(self, body: str, *arguments: Any) -> Any:
        return self.driver.execute_script(body, *arguments)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def shown(self, selector: str) -> Any:
        return next((found for found in self.all(selector) if found.is_displayed()), None)

    def ready(self, selector: str) -> bool:
        """Whether it is shown and may be used."""
        return bool((found := self.shown(selector)) and found.is_enabled())

    def count(self, selector: str) -> int:
        return int(self.script("return document.querySelectorAll(arguments[0]).length", selector))

    def text(self, selector: str) -> str:
        return str(self.script("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def value(self, selector: str) -> str:
        return str(self.script("return document.querySelector(arguments[0])?.value ?? ''", selector))

    def attribute(self, selector: str, name: str) -> str:
        script = "return document.querySelector(arguments[0])?.getAttribute(arguments[1]) ?? ''"
        return str(self.script(script, selector, name))

    def attributes(self, selector: str, name: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(each => each.getAttribute(arguments[1]) ?? '')"
        return list(self.script(script, selector, name))

    def click(self, selector: str) -> None:
        def clicked() -> bool:
            if not self.ready(selector):
                return False
            self.script("arguments[0].scrollIntoView({block: 'center'})", self.shown(selector))
            self.shown(selector).click()
            return True

        self.until(clicked)

    def press_tab(self, name: str) -> None:
        tabs = "[...document.querySelectorAll('button[role=tab]')].filter(each => each.innerText === arguments[0])"

        def pressed() -> bool:
            self.script(f"{tabs}.filter(each => each.ariaSelected !== 'true').forEach(each => each.click())", name)
            return bool(self.script(f"return {tabs}.some(each => each.ariaSelected === 'true')", name))

        self.until(pressed)

    def unfold(self, selector: str) -> None:
        """Open an accordion, if it is not open yet."""

        def opened() -> bool:
            if self.script("return document.querySelector(arguments[0] + ' > button')?.classList.contains('open')", selector):
                return True
            self.script("document.querySelector(arguments[0] + ' > button').click()", selector)
            return False

        self.until(opened)

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def save_to(self, folder: Path) -> None:
        """Let downloads be saved there."""
        behavior = {"behavior": "allow", "downloadPath": str(folder)}
        self.driver.execute_cdp_cmd("Browser.setDownloadBehavior", behavior)

    def errors(self) -> list[str]:
        """What the console holds since the last look at it."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def prefer(self, theme: str, motion: str = "reduce") -> None:
        """Emulate what the system prefers: light or dark, and reduced motion or not, which a page reads when it is opened."""
        features = [{"name": "prefers-color-scheme", "value": theme}, {"name": "prefers-reduced-motion", "value": motion}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def write(self, selector: str, value: str) -> None:
        """Replace a field's text; what is longer than the field allows is cut."""

        def written() -> bool:
            if (field := self.shown(selector)) is None:
                return False
            field.send_keys(_keys().CONTROL, "a")
            field.send_keys(value)
            held = str(field.get_property("value"))
            return bool(held) and value.startswith(held)

        self.until(written)

    def drop(self, selector: str, path: Path) -> None:
        self.until(lambda: self.all(selector))
        self.all(selector)[0].send_keys(str(path))

    def until(self, condition: Callable[[], Any], seconds: float = 180) -> Any:
        """Wait for a condition, however long the machine is busy elsewhere; returns what it gave."""
        end = time.monotonic() + seconds
        while True:
            try:
                if found := condition():
                    return found
            except _not_yet():
                pass
            if time.monotonic() > end:
                notes = {selector: self.text(selector) for selector in _NOTES if self.count(selector)}
                raise AssertionError(f"not within {seconds} s; the page says {notes}, and in messages {self.messages()}")
            time.sleep(0.05)

    def says(self, selector: str, words: str) -> None:
        """Wait until an element's text holds some words."""
        self.until(lambda: words in self.text(selector))

    def toast(self, words: str) -> None:
        """Wait until some message since the page was opened held some words; it may be gone again."""
        self.until(lambda: words in self.messages())

    def messages(self) -> str:
        """All messages since the page was opened."""
        return str(self.script("return window.messages?.join() ?? ''"))


def _keys() -> Any:
    from selenium.webdriver.common.keys import Keys

    return Keys


def _not_yet() -> tuple[type[Exception], ...]:
    """What is raised when the page draws itself again between two looks at it, or something lies in front."""
    from selenium.common import exceptions

    return (
        exceptions.StaleElementReferenceException,
        exceptions.NoSuchElementException,
        exceptions.ElementClickInterceptedException,
        exceptions.ElementNotInteractableException,
    )


@pytest.fixture(scope="session")
def chromium() -> SimpleNamespace:
    webdriver = pytest.importorskip("selenium.webdriver", reason="BROWSER TESTS LEFT OUT: no selenium; pip install -e .[dev]")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not driver:
        pytest.skip("BROWSER TESTS LEFT OUT: no chromium here; apt-get install chromium chromium-driver")
    return SimpleNamespace(webdriver=webdriver, browser=browser, driver=driver)


@pytest.fixture(scope="session")
def opened() -> list[Browser]:
    """The browsers of this process."""
    return []


@pytest.fixture(autouse=True)
def no_page_stays_open(opened: list[Browser]) -> Iterator[None]:
    """The recorded race of a page that nobody looks at would take a quarter of a core from all later tests."""
    yield
    for browser in opened:
        browser.leave()


@pytest.fixture(scope="session")
def open_browser(chromium: SimpleNamespace, opened: list[Browser]) -> Iterator[Callable[[], Browser]]:
    """Opens any number of browsers, each with an empty profile of its own."""
    profiles: list[tempfile.TemporaryDirectory[str]] = []

    def start() -> Any:
        profiles.append(tempfile.TemporaryDirectory(prefix="vargen-chromium-", ignore_cleanup_errors=True))
        options = chromium.webdriver.ChromeOptions()
        options.binary_location = chromium.browser
        for flag in (*_FLAGS, f"--user-data-dir={profiles[-1].name}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = chromium.webdriver.ChromeService(chromium.driver)
        return chromium.webdriver.Chrome(options=options, service=service)

    def open_one() -> Browser:
        opened.append(Browser(start))
        return opened[-1]

    yield open_one
    for browser in opened:
        browser.driver.quit()
    for profile in profiles:
        profile.cleanup()


@pytest.fixture(scope="session")
def one_browser(open_browser: Callable[[], Browser]) -> Browser:
    return open_browser()


@pytest.fixture
def browser(one_browser: Browser, address: str) -> Browser:
    """The page just loaded: a new session, in a browser that all tests share. Its race stands still, which takes no time."""
    one_browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    one_browser.prefer("light")
    for kind in ("browser", "performance"):
        one_browser.driver.get_log(kind)
    return one_browser.open(address)
