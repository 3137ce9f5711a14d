"""A page with a small random model, served from this process, and headless browsers to look at it."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

gradio = pytest.importorskip("gradio", reason="the demo needs gradio: pip install -e .[demo]")

from tiny_models import text_pipeline  # noqa: E402

from vargen.demo import page  # noqa: E402
from vargen.demo.address import Address  # noqa: E402
from vargen.demo.engine import Engine  # noqa: E402

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,1000"
).split()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A random model of 8 x 8 tokens that can be slowed down: `engine.pause` is seconds slept before every pass."""
    pipe = text_pipeline(grid_size=8)
    made = Engine(pipe, "tiny")
    made.pause = 0.0  # type: ignore[attr-defined]
    pipe.transformer.register_forward_pre_hook(lambda *_: time.sleep(made.pause))  # type: ignore[attr-defined]
    yield made
    made.close()


@pytest.fixture(autouse=True)
def full_speed(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").pause = 0.0


@pytest.fixture(scope="module")
def address(engine: Engine) -> Iterator[str]:
    served = page.build(engine)
    with socket.socket() as free:  # gradio's own search for a port is a race between parallel test workers
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    yield page.serve(served, Address("127.0.0.1", port))
    served.close(verbose=False)


@pytest.fixture
def slow(engine: Engine) -> Callable[[float], None]:
    def set_pause(seconds: float) -> None:
        engine.pause = seconds  # type: ignore[attr-defined]

    return set_pause


class Browser:
    """One headless Chromium, and the few things that tests do with it."""

    def __init__(self, driver: Any):
        self.driver = driver

    def open(self, url: str) -> Browser:
        self.driver.get(url)
        self.until(lambda: self.shown("#generate"))
        return self

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def shown(self, selector: str) -> Any:
        return next((found for found in self.all(selector) if found.is_displayed()), None)

    def text(self, selector: str) -> str:
        return str(self.driver.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def attribute(self, selector: str, name: str) -> str:
        script = "return document.querySelector(arguments[0])?.getAttribute(arguments[1]) ?? ''"
        return str(self.driver.execute_script(script, selector, name))

    def click(self, selector: str) -> None:
        self.until(lambda: self.shown(selector) and self.shown(selector).is_enabled())
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", self.shown(selector))
        self.shown(selector).click()

    def press_tab(self, name: str) -> None:
        button = next(each for each in self.all("button[role=tab]") if each.text == name and each.is_displayed())
        self.driver.execute_script("arguments[0].click()", button)

    def write(self, selector: str, value: str) -> None:
        field = self.shown(selector)
        field.send_keys(_keys().CONTROL, "a")
        field.send_keys(value)

    def until(self, condition: Callable[[], Any], seconds: float = 30) -> Any:
        end = time.monotonic() + seconds
        while True:
            try:
                if found := condition():
                    return found
            except _stale():
                pass
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds} s; the page says: {self.text('body')[-1500:]}")
            time.sleep(0.05)

    def toasts(self) -> str:
        return " ".join(each.text for each in self.all(".toast-body"))


def _keys() -> Any:
    from selenium.webdriver.common.keys import Keys

    return Keys


def _stale() -> tuple[type[Exception], ...]:
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException

    return StaleElementReferenceException, NoSuchElementException


@pytest.fixture(scope="session")
def chromium() -> SimpleNamespace:
    webdriver = pytest.importorskip("selenium.webdriver", reason="BROWSER TESTS LEFT OUT: no selenium; pip install -e .[dev]")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not driver:
        pytest.skip("BROWSER TESTS LEFT OUT: no chromium here; apt-get install chromium chromium-driver")
    return SimpleNamespace(webdriver=webdriver, browser=browser, driver=driver)


@pytest.fixture(scope="module")
def open_browser(chromium: SimpleNamespace) -> Iterator[Callable[[str], Browser]]:
    """Opens any number of browsers, each with an empty profile of its own."""
    opened: list[Browser] = []
    profiles: list[tempfile.TemporaryDirectory[str]] = []

    def open_one(url: str) -> Browser:
        profiles.append(tempfile.TemporaryDirectory(prefix="vargen-chromium-", ignore_cleanup_errors=True))
        options = chromium.webdriver.ChromeOptions()
        options.binary_location = chromium.browser
        for flag in (*_FLAGS, f"--user-data-dir={profiles[-1].name}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = chromium.webdriver.ChromeService(chromium.driver)
        opened.append(Browser(chromium.webdriver.Chrome(options=options, service=service)))
        return opened[-1].open(url)

    yield open_one
    for browser in opened:
        browser.driver.quit()
    for profile in profiles:
        profile.cleanup()


@pytest.fixture(scope="module")
def one_browser(open_browser: Callable[[str], Browser], address: str) -> Browser:
    return open_browser(address)


@pytest.fixture
def browser(one_browser: Browser, address: str) -> Browser:
    """The page just loaded: a new session, in a browser that the module's tests share."""
    one_browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    for kind in ("browser", "performance"):
        one_browser.driver.get_log(kind)
    return one_browser.open(address)
