"""Takes the images of README and docs/demo.md, beside a running `python app.py`; needs chromium, its driver and selenium:
`python docs/dev/screenshots.py http://127.0.0.1:7860 assets/screenshots`."""

from __future__ import annotations

import io
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver

FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
PROMPT, SEED = "a hamburger, 3d style", 1
FRAMES, HELD, SLOWDOWN = 72, 14, 4  # of the clip: frames of the race, frames of its end, times slower than recorded
MAX_CLIP = 2_000_000  # bytes


def wait(browser: Any, selector: str, words: str) -> None:
    for _ in range(1200):
        if words in browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector):
            return
        time.sleep(0.05)
    raise SystemExit(f"{selector} never said {words!r}")


def resize(browser: Any, width: int, height: int, dark: bool = False) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": theme})
    time.sleep(1.0)


def shoot(browser: Any, path: Path, width: int, height: int, dark: bool = False) -> None:
    resize(browser, width, height, dark)
    browser.execute_script("scrollTo(0, 0)")
    browser.save_screenshot(str(path))
    print(path, path.stat().st_size // 1024, "KiB")


def read_ends(browser: Any) -> list[float]:
    """Return the seconds of the two sides of the race, the faster one first."""
    race = json.loads(browser.execute_script("return document.querySelector('.vg-replay').dataset.race"))
    return sorted(lane["seconds"][-1] for lane in race["lanes"])


def record_race(browser: Any, path: Path) -> None:
    """Write the replayed race as a looping WebP, one screenshot per frame."""
    resize(browser, 1000, 900)
    longest = read_ends(browser)[-1]
    section = browser.find_element("css selector", ".vg-replay")
    frames = []
    for number in range(FRAMES + 1):
        browser.execute_script("window.vargen.replayAt = arguments[0]", longest * number / FRAMES)
        time.sleep(0.06)
        frames.append(Image.open(io.BytesIO(section.screenshot_as_png)).convert("RGB"))
    step = round(1000 * SLOWDOWN * longest / FRAMES)
    durations = [*[step] * FRAMES, step * HELD]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0, quality=80, method=6)
    browser.execute_script("window.vargen.replayAt = null")
    print(path, path.stat().st_size // 1024, "KiB,", frames[0].size)
    if path.stat().st_size > MAX_CLIP:
        raise SystemExit(f"{path} must have at most {MAX_CLIP} bytes")


def open_link(browser: Any, address: str, mode: str, note: str, words: str, method: str, prompt: str = PROMPT) -> None:
    browser.get(f"{address.rstrip('/')}/?mode={mode}&prompt={prompt.replace(' ', '+')}&seed={SEED}&method={method}")
    wait(browser, note, words)
    time.sleep(1)


def paint_half(browser: Any, prompt: str) -> None:
    """Paint over the right half of the live image, and have it follow another prompt."""
    pointer, canvas = webdriver.ActionChains(browser), browser.find_element("css selector", "#live-easel canvas")
    side = canvas.size["width"]
    pointer.move_to_element_with_offset(canvas, side // 10, 4 - side // 2).click_and_hold()
    for x, y in ((0, side - 8), (side // 5, 0), (0, 8 - side), (side // 7, 0), (0, side - 8)):
        pointer.move_by_offset(x, y)
    pointer.release().perform()
    wait(browser, "#live-note", "Painted part")
    field = browser.find_element("css selector", "#prompt textarea, #prompt input")
    field.clear()
    field.send_keys(prompt)
    time.sleep(4)


def main(address: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    narrow = Path(tempfile.gettempdir())
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS.split(), "--hide-scrollbars", f"--user-data-dir={profile}", "--window-size=1280,900"):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
        browser.get(address)
        wait(browser, ".vg-replay", "The same image")
        time.sleep(2)
        record_race(browser, folder / "race.webp")
        # The faster side has finished, the other not.
        browser.execute_script("window.vargen.replayAt = arguments[0]", sum(read_ends(browser)) / 2)
        shoot(browser, folder / "first_sight.png", 1280, 900)
        shoot(browser, narrow / "first-sight-390-dark.png", 390, 844, dark=True)
        open_link(browser, address, "image", "#note", "Generated in", "gumbel")
        shoot(browser, folder / "generate.png", 1280, 900)
        shoot(browser, narrow / "generate-390.png", 390, 844)
        resize(browser, 1280, 900)
        open_link(browser, address, "live", "#live-note", "Generated in", "plain", "a red apple, 3d style")
        paint_half(browser, "a green apple")
        shoot(browser, folder / "live.png", 1280, 760)
        shoot(browser, narrow / "live-390.png", 390, 844, dark=True)
        open_link(browser, address, "race", "#race-note", "was first", "ar,gumbel,gsd")
        shoot(browser, folder / "race.png", 1280, 900, dark=True)
        open_link(browser, address, "video", "#video-note", "Generated ", "sdvg", "face with rolling eyes")
        shoot(browser, folder / "video.png", 1280, 760)
        shoot(browser, narrow / "video-390.png", 390, 844, dark=True)
        browser.quit()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
