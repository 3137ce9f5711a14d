"""The modes of the page, without a browser: what a run shows, what it writes, and what it says about bad input."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import gradio as gr
import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import infinity_pipeline

from vargen.demo.calls import generate, user_errors
from vargen.demo.edit_tab import read_painting
from vargen.demo.inputs import plain_name
from vargen.demo.known import KnownPrompts
from vargen.demo.links import MAX_PROMPT, MAX_SEED, make_link, read_link
from vargen.demo.page import Models, build_page
from vargen.image_metadata import read_parameters
from vargen.pipelines.loading import open_pipeline
from vargen.pipelines.regeneration import regenerate


def test_an_image_is_the_pipelines_and_its_file_generates_it_again(page: Any, pipe: Any) -> None:
    shown = page.run("image", prompt="a cat", seed=7, method="ar")
    last = shown[-1]
    ((path, _),) = last["stage"]
    parameters = read_parameters(path)
    expected = pipe("a cat", accelerator="ar", generator=torch.Generator().manual_seed(7)).images[0]
    assert parameters["seed"] == 7 and parameters["prompt"] == "a cat" and Path(path).name == "vargen-7.png"
    with Image.open(path) as stored:
        assert stored.tobytes() == expected.tobytes()
        assert regenerate(pipe, parameters, stored).same_pixels
    assert "64 steps" in last["note"] and "seed 7" in last["note"] and last["visit"] == [path]
    query = {key: value for key, (value,) in parse_qs(last["Textbox"][1:]).items()}
    assert read_link(query) == {"mode": "image", "prompt": "a cat", "seed": 7, "method": "ar"}


def test_four_images_have_seeds_that_follow_and_the_best_is_named(page: Any) -> None:
    last = page.run("image", prompt="a cat", seed=7, method="gumbel", count=4)[-1]
    paths = [path for path, _ in last["stage"]]
    assert [read_parameters(path)["seed"] for path in paths] == [7, 8, 9, 10]
    captions = [caption for _, caption in last["stage"]]
    best = next(k for k, each in enumerate(captions) if each.startswith("best match"))
    scores = [float(each.split()[-1]) for each in captions]
    assert scores[best] == max(scores) and last["save"] == paths[best]
    assert len(last["visit"]) == 4 and "The same image as the slow way" in last["note"]


def test_a_race_proves_the_same_image_token_for_token(page: Any) -> None:
    shown = page.run("race", prompt="a <b>cat</b>", seed=3, racers=["gsd", "gumbel", "ar"])
    track, note = shown[-1]["track"], shown[-1]["race-note"]
    assert track.index("Slow (ar)") < track.index("Fast (gumbel)"), "the slow way starts, as the others are compared with it"
    assert f"{plain_name('gumbel')} gave the same image as {plain_name('ar')}" in note
    assert track.count("✓ Same image as Slow") >= 1 and "<b>cat" not in track
    with pytest.raises(gr.Error, match="two to 4"):
        page.run("race", prompt="a cat", racers=["ar"])


def test_a_video_grows_block_by_block_and_plays(page: Any, models: Any) -> None:
    shown = page.run("video", **{"prompt": "a cat", "seed": 3, "video-method": "stride", "blocks": 3})
    clips = [each["clip"] for each in shown if "clip" in each]
    assert len(clips) == 3 and "6 frames" in shown[-1]["video-note"]
    assert "mode=video" in shown[-1]["Textbox"]
    again = page.run("video", **{"prompt": "a cat", "seed": 3, "video-method": "stride", "blocks": 3})
    with Image.open(clips[-1]) as one, Image.open([e["clip"] for e in again if "clip" in e][-1]) as other:
        assert one.tobytes() == other.tobytes()


def test_a_painted_part_alone_is_generated_again(page: Any, models: Any) -> None:
    side = models.edit.image_size
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)).convert("RGBA")
    layer = Image.new("RGBA", (side, side))
    layer.paste("#4f46e5", (0, 0, side // 2, side))
    source = read_painting({"background": image, "layers": [layer], "composite": image}, side)
    assert (
        source.mask is not None and np.asarray(source.mask)[:, : side // 2].all() and not np.asarray(source.mask)[:, -1].any()
    )
    assert read_painting({"background": image, "layers": [], "composite": image}, side).mask is None
    assert read_painting(None, side).image is None
    painted = {"background": image, "layers": [layer], "composite": image}
    shown = paint(page, painted)
    with Image.open(shown["edit-stage"]) as result:
        kept = np.asarray(result.convert("RGB"))[:, side - side // 4 :], np.asarray(image.convert("RGB"))[:, side - side // 4 :]
    assert (kept[0] == kept[1]).all(), "what is not painted keeps its pixels"


def test_a_model_of_bits_generates_races_and_is_painted_on(page: Any) -> None:
    pipe = infinity_pipeline()
    pipe.set_progress_bar_config(disable=True)
    own = type(page)(build_page(Models("bits", pipe, pipe)))
    shown = own.run("image", prompt="a cat", seed=7, method="plain")[-1]
    ((path, _),) = shown["stage"]
    assert "4 steps" in shown["note"] and "seed 7" in shown["note"]
    with Image.open(path) as stored:
        assert stored.size == (12, 12) and regenerate(pipe, read_parameters(path), stored).same_pixels
    race = own.run("race", prompt="a cat", seed=3, racers=["code", "plain"])[-1]
    assert race["track"].count("lane") and "cat" in str(race)
    image = Image.new("RGBA", (12, 12), "#a03010")
    layer = Image.new("RGBA", (12, 12))
    layer.paste("#4f46e5", (0, 0, 6, 12))
    painted = paint(own, {"background": image, "layers": [layer], "composite": image})
    with Image.open(painted["edit-stage"]) as result:
        assert (np.asarray(result.convert("RGB"))[:, 8:] == np.asarray(image.convert("RGB"))[:, 8:]).all()


def test_events_of_another_mode_leave_the_page_as_it_is(page: Any) -> None:
    """Gradio empties all outputs of a generator that yields nothing."""
    for number in range(len([each for each in page.blocks.fns.values() if each.name == "run_own"])):
        shown = page.run("image", "run_own", number, prompt="a cat")
        assert shown and not any(key != "note" for each in shown for key in each)


def paint(page: Any, painted: dict[str, Any]) -> dict[str, Any]:
    """The last update of the function that generates a painted part."""
    return next(
        found[-1]
        for number in range(8)
        if (found := page.run("edit", "run_own", number, prompt="a cat", **painted_if_read(page, number, painted)))
        and "edit-note" in found[-1]
        and str(found[-1]["edit-note"]).startswith("Painted part")
    )


def painted_if_read(page: Any, number: int, painted: dict[str, Any]) -> dict[str, Any]:
    """The editor's content, for functions that read it."""
    found = [each for each in page.blocks.fns.values() if each.name == "run_own"][number]
    return {"editor": painted} if page.find("editor") in found.inputs else {}


def test_closing_a_run_ends_its_call_within_a_pass(pipe: Any, permits: threading.Semaphore) -> None:
    running = generate(pipe, "a cat", [1], accelerator="ar")
    permits.release(8)
    while next(running) is None:
        permits.release(1)
    running.close()
    before = pipe.passes
    permits.release(1000)
    while pipe._calls:
        time.sleep(0.01)
    assert pipe.passes - before <= 8, "it may use up the permits that it had, and not those for all 64 passes"


def test_previews_are_transparent_where_nothing_is_generated(pipe: Any, permits: threading.Semaphore) -> None:
    running = generate(pipe, "a cat", [1], accelerator="ar")
    permits.release(6)
    progress = next(each for each in running if each is not None)
    alpha = np.asarray(progress.images[0])[..., 3]
    assert progress.result is None and alpha[0, 0] == 255 and alpha[-1, -1] == 0
    permits.release(1000)
    assert list(running)[-1].result is not None


def test_errors_are_one_line_for_visitors(page: Any) -> None:
    for given, words in (
        ({"prompt": " "}, "Type a prompt"),
        ({"prompt": "x" * (MAX_PROMPT + 1)}, "at most"),
        ({"method": "magic"}, "magic"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
    ):
        with pytest.raises(gr.Error, match=words) as raised:
            page.run("image", **{"prompt": "a <cat>", "seed": 1, **given})
        assert "\n" not in str(raised.value)
    with pytest.raises(gr.Error, match="the server's log"), user_errors():
        raise RuntimeError("/secret/place")
    with pytest.raises(gr.Error, match="&lt;b&gt;"), user_errors():
        raise ValueError("<b>")


@pytest.mark.parametrize("mode", ["image", "race", "video"])
def test_links_mean_prompt_seed_method_and_sampling(mode: str) -> None:
    defaults = {"temperature": 1.0, "top_p": 1.0}
    sampling = {"temperature": 0.5, "top_p": 1.0, "guidance_scale": 2.5, "top_k": 9, "negative_prompt": "blurry & ugly"}
    link = make_link(mode, "a cat & a <dog>", MAX_SEED, "gumbel:window=8", sampling, defaults)
    query = {key: value for key, (value,) in parse_qs(link[1:]).items()}
    expected = {"mode": mode, "prompt": "a cat & a <dog>", "seed": MAX_SEED, "method": "gumbel:window=8", **sampling}
    del expected["top_p"]
    assert read_link(query) == expected
    for name, value in (("seed", "-1"), ("seed", "x"), ("seed", "9" * 30), ("temperature", "nan"), ("top_p", "2")):
        with pytest.raises(ValueError, match=name):
            read_link({"prompt": "a", name: value})
    assert read_link({"unknown": "1"}) == {}


def test_prompts_far_from_what_a_model_knows_get_near_ones() -> None:
    known = KnownPrompts(open_pipeline("emoji"))
    assert "emoji" in known.describe()
    for prompt in ("a red apple, 3d style", "two sleepy cats", "😺", "pizza"):
        assert known.near(prompt) == []
    near = known.near("a hamburgr")
    assert "hamburger" in near and len(near) == 4
    assert len(known.near("qqqqq")) == 4 and known.near("") == []
    assert "cannot read" in known.unread("кот") and known.unread("a cat") == ""
