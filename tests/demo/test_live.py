"""The page of a next-scale model: its token map, its previews, and the tab that draws while someone types."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("gradio")

from tiny_models import text_var_pipeline

from vargen.decoding import list_methods
from vargen.demo.image_service import ImageService
from vargen.demo.jobs import JobRegistry
from vargen.demo.page import build_page
from vargen.demo.request import PageRequest

FIELD = "#prompt textarea, #prompt input"


@pytest.fixture(scope="module")
def service() -> Iterator[ImageService]:
    """A random model of four scales that can be slowed down: `service.pause` is seconds slept before every pass."""
    pipe = text_var_pipeline()
    made = ImageService(pipe, "tiny")
    made.pause = 0.0  # type: ignore[attr-defined]
    pipe.transformer.register_forward_pre_hook(lambda *_: time.sleep(made.pause))  # type: ignore[attr-defined]
    yield made
    made.close()


@pytest.fixture(scope="module")
def address(service: ImageService, serve_page: Any) -> Iterator[str]:
    yield from serve_page(build_page(service))


def test_the_engine_runs_what_the_pipeline_runs(service: ImageService) -> None:
    assert set(service.methods) == {preset.name for preset in list_methods("next-scale")}
    assert (service.default_method, service.baseline, service.live) == ("plain", "plain", True)
    generated = service.start(PageRequest("a cat", "code", 3)).result()
    assert generated.images[0].size == (8, 8) and generated.stats.passes == 4
    run = service.start(PageRequest("a cat", "plain", 3))
    run.result()
    assert run.counts == [1, 4, 9, 16]


def test_a_stopped_generation_shows_what_is_there(service: ImageService) -> None:
    service.pause = 0.2  # type: ignore[attr-defined]
    run = service.start(PageRequest("a cat", "plain", 3))
    while not run.counts:
        time.sleep(0.01)
    run.stop.set()
    generated = run.result()
    service.pause = 0.0  # type: ignore[attr-defined]
    assert generated.stopped and generated.stats.passes < 4 and generated.images[0].size == (8, 8)


def test_a_new_letter_stops_the_generation_of_the_last_ones() -> None:
    runs = JobRegistry()
    first, other, elsewhere = runs.enqueue("me", "live"), runs.enqueue("me"), runs.enqueue("you", "live")
    begun = runs.start(first)
    assert begun is not None
    runs.stop_visitor_jobs("me", "live")
    assert begun.stop.is_set() and runs.start(other) is not None and runs.start(elsewhere) is not None
    waiting = runs.enqueue("me", "live")
    runs.stop_visitor_jobs("me", "live")
    assert runs.start(waiting) is None, "what has not begun never does"


def test_the_image_follows_what_is_typed(browser: Any, service: ImageService) -> None:
    prompts: list[str] = []
    start = service.start

    def start_and_tell(settings: PageRequest, *rest: Any, **more: Any) -> Any:
        prompts.append(settings.prompt)
        return start(settings, *rest, **more)

    service.start = start_and_tell  # type: ignore[method-assign]
    try:
        browser.press_tab("Live")
        browser.says("#live-note", "Generated in")  # opening it draws what the prompt says
        before = browser.attribute("#live-stage img", "src")
        browser.write(FIELD, "a green frog")
        browser.until(lambda: "a green frog" in browser.attribute("#live-stage img", "alt"))
        browser.until(lambda: browser.attribute("#live-stage img", "src") not in ("", before))
        browser.until(lambda: browser.attribute("#live-stage img", "src").startswith("data:image/png"))
        assert prompts[-1] == "a green frog" and len(prompts) < 2 + len("a green frog")
        browser.press_tab("Image")
        generated = len(prompts)
        browser.write(FIELD, "a blue bird")
        time.sleep(0.5)
        assert len(prompts) == generated, "what is typed in another tab is not drawn"
        severe = [entry["message"] for entry in browser.driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert not severe
    finally:
        service.start = start  # type: ignore[method-assign]
