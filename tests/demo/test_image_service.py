"""The model behind the page: the same pictures as the pipeline, previews, stopping, and figures as HTML."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from PIL import Image

pytest.importorskip("gradio")


from vargen.demo import rendering
from vargen.demo.image_service import ImageService
from vargen.demo.jobs import JobRegistry
from vargen.demo.request import PageRequest
from vargen.image_metadata import read_parameters
from vargen.scoring.protocol import Images, to_pil, to_scorer

WANTED = PageRequest("a red apple", "ar", 3, 2.0, 1.0, 0, 1.0, "", 2)


def test_the_images_are_the_pipelines(service: ImageService) -> None:
    generated = service.start(WANTED, previews=False).result()
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    direct = service.pipe(
        WANTED.prompt, num_images_per_prompt=2, guidance_scale=2.0, temperature=1.0, top_k=64, top_p=1.0, generator=generators
    )
    assert [each.tobytes() for each in generated.images] == [each.tobytes() for each in direct.images]
    assert sum(service.start(WANTED).result().stats.committed_histogram) > 0


def test_methods_that_promise_the_image_of_the_baseline_generate_it(
    service: ImageService, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [each.name for each in service.available]
    promised = [name for name in [*names, "gumbel:window=8"] if service.repeats_baseline(name)]
    assert {"auto", "gumbel", "gumbel:window=8"} <= set(promised) and not {"ar", "scd", "gsd"} & set(promised)
    slow, *same = [service.start(replace(WANTED, method=name)).result().tokens for name in ("ar", *promised)]
    assert all(torch.equal(each, slow) for each in same)
    monkeypatch.setattr(type(service.pipe.transformer), "dtype", torch.bfloat16)
    assert not any(service.repeats_baseline(name) for name in names), "a wide pass rounds differently"


def test_previews_are_transparent_where_nothing_is_generated(service: ImageService, slow: Callable[[float], None]) -> None:
    slow(0.02)
    run = service.start(PageRequest("a red apple", "ar"))
    run.result()
    assert run.preview and sum(run.counts) == 64
    with Image.open(io.BytesIO(run.preview[0])) as image:
        alpha = image.convert("RGBA").getchannel("A")
        assert alpha.getpixel((0, 0)) == 255 and alpha.getpixel((15, 15)) == 0
    assert 0 < run.preview_seconds < run.finished.seconds, "previews take a small part, and none of the method's time"


def test_a_run_stops_within_a_pass(service: ImageService, slow: Callable[[float], None]) -> None:
    slow(0.05)
    run = service.start(PageRequest("a red apple"))
    while len(run.counts) < 3:
        run.done.wait(0.01)
    before = len(run.counts)
    run.stop.set()
    assert run.result().stopped and len(run.counts) <= before + 2


def test_what_the_model_cannot_do_is_reported(service: ImageService) -> None:
    with pytest.raises(ValueError, match="Choose one of: auto, ar"):
        service.check(PageRequest("a", "nothing"))
    with pytest.raises(ValueError, match="at most 64"):
        service.check(PageRequest("a", top_k=65))
    assert "was cut after" in (service.prompt_warnings("apple " * 40) or "")
    assert service.prompt_warnings("an apple") is None
    assert "cannot read 4 of the 6 tokens" in (service.prompt_warnings("a собака") or "")
    assert "cannot read" in (both := service.prompt_warnings("собака " * 40) or "") and "was cut after" in both


def test_a_ticket_stops_what_waits_and_what_runs() -> None:
    runs = JobRegistry()
    waits, works = runs.enqueue("one"), runs.enqueue("two")
    ticket = runs.start(works)
    assert runs.stop(waits) and runs.start(waits) is None
    assert not runs.stop(works) and ticket is not None and ticket.stop.is_set()
    runs.end(works)
    left = runs.start(runs.enqueue("two"))
    runs.stop_visitor_jobs("two")
    assert left is not None and left.stop.is_set() and runs.start("made up") is None


def test_the_token_map_of_scales_shows_each() -> None:
    scales = [(side, side) for side in (1, 2, 3, 4)]
    generation = rendering.token_map([1, 4, 9], scales)
    assert "14 of 30 tokens generated in 3 passes" in generation and generation.count('class="u"') == 16
    assert generation.count("<rect") == 1 + 2 + 3, "a pill per row of each scale"
    assert rendering.token_map([5, 25], scales).count('class="u"') == 0
    places = re.findall(r'x="([\d.]+)" y="([\d.]+)"', rendering.token_map([1] * 30, scales))
    assert len(set(places)) == 30, "no two tokens lie on each other"


def test_what_people_type_is_inert() -> None:
    assert rendering.text("<b>`${x}{{y}}`") == "&lt;b&gt;&#96;&#36;&#123;x&#125;&#123;&#123;y&#125;&#125;&#96;"
    assert "<script" not in rendering.image_grid([None], "<script>") + rendering.status_line("<script>")


def brightness(images: Images, prompts: list[str]) -> list[float]:
    assert all(prompt == "a red apple" for prompt in prompts)
    return [float(torch.tensor(list(image.convert("L").tobytes())).float().mean()) for image in to_pil(images)]


@pytest.fixture
def scoring(service: ImageService) -> ImageService:
    other = ImageService(service.pipe, "tiny", to_scorer(brightness))
    yield other
    other.close()


def test_the_best_candidate_is_kept_and_can_be_generated_again_alone(scoring: ImageService) -> None:
    generated = scoring.start(replace(WANTED, best_of=4), previews=False).result()
    assert len(generated.images) == 2
    for number, (image, reported) in enumerate(zip(generated.images, generated.records, strict=True)):
        assert (
            reported["score"] == max(reported["candidates"])
            and len(reported["candidates"]) == 4
            and reported["asked_seed"] == 3 + number
        )
        assert [reported["score"]] == pytest.approx(brightness([image], [WANTED.prompt])) and reported["scorer"] == "brightness"
        alone = scoring.start(replace(WANTED, seed=reported["seed"], num_images=1), previews=False).result()
        assert alone.images[0].tobytes() == image.tobytes()
        saved = read_parameters(scoring.save(generated)[number])
        assert saved["seed"] == reported["seed"] and saved["score"] == reported["score"] and "best_of" not in saved
    assert rendering.score_caption(generated.records[0]).count(",") == 3, "its own score, and three others"


def test_candidates_need_a_scorer(service: ImageService) -> None:
    with pytest.raises(ValueError, match="no scorer here"):
        service.check(PageRequest("a", best_of=2))
    generated = service.start(WANTED, previews=False).result()
    assert generated.records == [{"seed": 3}, {"seed": 4}] and rendering.score_caption(generated.records[0]) == ""


def test_a_scorer_that_fails_loses_no_image(service: ImageService) -> None:
    broken = ImageService(service.pipe, "tiny", to_scorer(lambda images, prompts: [float("nan")] * len(images), "broken"))
    try:
        assert broken.start(WANTED, previews=False).result().records == [{"seed": 3}, {"seed": 4}]
        with pytest.raises(ValueError, match="broken gave nan"):
            broken.start(replace(WANTED, best_of=2), previews=False).result()
    finally:
        broken.close()


def test_methods_take_settings(service: ImageService) -> None:
    service.check(replace(WANTED, method="gumbel:window=3"))
    for wrong in ("gumbel:window=x", "gumbel:windw=3", "eagle:budget=3"):
        with pytest.raises(ValueError, match="not available here"):
            service.check(replace(WANTED, method=wrong))
