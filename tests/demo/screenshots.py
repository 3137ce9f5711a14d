"""Takes the screenshots of the README, beside a running `python app.py`; needs chromium, its driver and selenium:
`python tests/demo/screenshots.py http://127.0.0.1:7860 assets/screenshots`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from selenium import webdriver

FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
PROMPT, SEED = "a hamburger, flat style", "7"


def wait(browser: Any, selector: str, words: str) -> None:
    for _ in range(1200):
        if words in browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector):
            return
        time.sleep(0.05)
    raise SystemExit(f"{selector} never said {words!r}")


def write(browser: Any, selector: str, value: str) -> None:
    field = browser.find_element("css selector", selector)
    field.send_keys(webdriver.Keys.CONTROL, "a")
    field.send_keys(value)


def press(browser: Any, selector: str, name: str = "") -> None:
    script = "[...document.querySelectorAll(arguments[0])].find(e => e.innerText.includes(arguments[1])).click()"
    browser.execute_script(script, selector, name)
    time.sleep(0.5)


def shoot(browser: Any, path: Path, width: int, dark: bool) -> None:
    browser.execute_script("document.body.classList.toggle('dark', arguments[0])", dark)
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    time.sleep(0.4)
    metrics["height"] = browser.execute_script("return document.querySelector('.gradio-container').scrollHeight")
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    time.sleep(0.4)
    browser.save_screenshot(str(path))
    print(
        path, path.stat().st_size // 1024, "KiB", browser.execute_script("return document.documentElement.scrollWidth"), "wide"
    )


def main(address: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS.split(), f"--user-data-dir={profile}", "--window-size=1280,900"):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
        browser.get(address)
        wait(browser, "#generate", "Generate")
        time.sleep(1)
        write(browser, "#prompt textarea, #prompt input", PROMPT)
        write(browser, "#seed input", SEED)
        press(browser, "#lock label")
        press(browser, "#method input[value=gumbel]")
        press(browser, "#generate")
        wait(browser, "#note", "Generated in")
        time.sleep(1)
        shoot(browser, folder / "generate.png", 1280, dark=False)
        shoot(browser, Path(tempfile.gettempdir()) / "generate-390-dark.png", 390, dark=True)
        shoot(browser, Path(tempfile.gettempdir()) / "generate-390.png", 390, dark=False)
        press(browser, "button[role=tab]", "Race")
        press(browser, "#race")
        wait(browser, "#race-note", "was first")
        shoot(browser, folder / "race.png", 1280, dark=True)
        shoot(browser, Path(tempfile.gettempdir()) / "race-390.png", 390, dark=False)
        press(browser, "button[role=tab]", "Explore")
        press(browser, "#explore")
        wait(browser, "#explore-note", "Done")
        shoot(browser, Path(tempfile.gettempdir()) / "explore.png", 1280, dark=False)
        press(browser, "button[role=tab]", "Video")
        press(browser, "#video-examples button", "face with rolling eyes")
        press(browser, "#video-make")
        wait(browser, "#video-note", "Generated ")
        time.sleep(1)
        shoot(browser, folder / "video.png", 1280, dark=False)
        shoot(browser, Path(tempfile.gettempdir()) / "video-390.png", 390, dark=True)
        browser.quit()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
