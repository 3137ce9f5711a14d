"""A video starts from an image: as many frames of it as the model was trained with, or what an image model generates for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rejects import rejects
from tiny_models import class_pipeline, text_pipeline
from tiny_video import randomised

from vargen.assets import packaged_model_path
from vargen.eval.video import DRAFTS
from vargen.models.causal_video.network import CausalVideoLoRA
from vargen.pipelines.causal_video import CausalVideoPipeline
from vargen.pipelines.loading import open_pipeline
from vargen.pipelines.start_images import encode_start_image, remove_motion

PHRASES = json.loads((packaged_model_path("emoji-video") / "model_index.json").read_text())["defaults"]["motions"]


@pytest.fixture(scope="module")
def pipe(video_model: Path) -> CausalVideoPipeline:
    return open_pipeline(video_model)


@pytest.mark.parametrize(
    ("prompt", "still"),
    [
        ("a bouncing pizza", "a pizza"),
        ("A quickly Bouncing pizza, 3d style", "A pizza, 3d style"),
        ("an apple that bounces slowly, 3d style", "an apple, 3d style"),
        ("rice slides in from the left", "rice"),
        ("a strawberry sliding in from the left.", "a strawberry"),
        ("a baby chick growing and shrinking", "a baby chick"),
        ("a jelly bean spinning", "a jelly bean"),
        ("bouncing", None),
        ("a rolling", None),
        ("a bouncingly red apple", None),
        ("waving hand", None),
        ("rolling on the floor laughing", None),
    ],
)
def test_the_still_image_is_of_the_prompt_without_its_motion(prompt: str, still: str | None) -> None:
    assert remove_motion(prompt, PHRASES) == still and remove_motion(prompt, ()) is None


def test_an_image_model_generates_the_start_image_with_the_seed_of_the_video(
    pipe: CausalVideoPipeline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(pipe.config.defaults, "motions", ["bouncing"])
    image_pipe = text_pipeline()

    def image(count: int = 1) -> Image.Image:
        options = {"num_candidates": count, "scorer": "emoji-scorer"}
        return image_pipe("a cat, 3d style", generator=torch.Generator().manual_seed(6), **options).images[0]

    options: dict[str, Any] = {"accelerator": "target", "output_type": "pt"}

    def frames(start: Any) -> torch.Tensor:
        return pipe("a bouncing cat", image=start, generator=torch.Generator().manual_seed(6), **options).frames

    first, best = image(), image(8)
    assert torch.equal(frames(image_pipe), frames(first)) and not torch.equal(frames(image_pipe)[:, 1:], frames(None))
    monkeypatch.setitem(pipe.config.defaults, "image_candidates", 8)
    assert first.tobytes() != best.tobytes() and torch.equal(frames(image_pipe), frames(best))
    folder = tmp_path / "images"
    image_pipe.save_pretrained(folder)
    assert torch.equal(frames(str(folder)), frames(best))
    assert pipe.named_image_pipe(str(folder)) is pipe.named_image_pipe(str(folder)), "opened once"


def test_the_image_is_shown_as_long_as_in_training(pipe: CausalVideoPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    red = Image.new("RGB", (16, 16), "red")
    (one,) = encode_start_image(pipe, red, None, 0)
    monkeypatch.setitem(pipe.config.defaults, "image_frames", 2)
    (two,) = encode_start_image(pipe, red, None, 0)
    assert one.shape[1] == 1
    torch.testing.assert_close(two, one.repeat(1, 2, 1, 1, 1))
    made = pipe("a cat", image=red, num_blocks=2, accelerator="target", output_type="pt").frames
    assert made.shape[1] == 2 + 2 * pipe.transformer.geometry.block_frames


def test_the_seconds_of_a_video_are_those_of_its_image_too(pipe: CausalVideoPipeline) -> None:
    for image in (Image.new("RGB", (16, 16), "red"), False):
        stats = pipe("a cat", image=image, num_blocks=1, accelerator="target").stats
        assert (stats.seconds > sum(block.seconds for block in stats.blocks)) == bool(image)


def test_an_image_that_moves_is_shrunk_as_in_training(pipe: CausalVideoPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    red, seen = Image.new("RGB", (16, 16), "red"), []
    decoder: Any = type(pipe.vae)
    encode = decoder.encode
    monkeypatch.setattr(decoder, "encode", lambda self, pixels: seen.append(pixels[0, 0]) or encode(self, pixels))
    monkeypatch.setitem(pipe.config.defaults, "motions", ["bouncing"])
    monkeypatch.setitem(pipe.config.defaults, "image_scale", 0.5)
    for prompt in ("a bouncing cat", "a cat", None):
        encode_start_image(pipe, red, prompt, 0)
    shrunk, whole, without = seen
    assert torch.equal(whole, without) and torch.equal(whole[1:], -torch.ones_like(whole[1:]))
    assert torch.allclose(shrunk[:, 4:12, 4:12], whole[:, 4:12, 4:12])
    shrunk[:, 4:12, 4:12] = 1
    assert torch.equal(shrunk, torch.ones_like(shrunk))


def a_lora(transformer: Any, seed: int) -> CausalVideoLoRA:
    size = transformer.config
    return randomised(CausalVideoLoRA(size.dim, size.ffn_dim, size.num_layers, rank=2), seed, 0.3)


@pytest.fixture
def with_loras(video_model: Path, tmp_path: Path) -> CausalVideoPipeline:
    """The same model with a LoRA of each network, saved and opened."""
    opened = open_pipeline(video_model)
    loras = {"image_lora": a_lora(opened.transformer, 1), "draft_image_lora": a_lora(opened.draft_transformer, 2)}
    opened.register_modules(**loras)
    opened.save_pretrained(tmp_path / "with")
    return open_pipeline(tmp_path / "with")


@pytest.mark.parametrize("accelerator", ["target", DRAFTS, "sdvg:tau=-9"], ids=lambda each: getattr(each, "name", each))
def test_loras_are_used_for_videos_that_start_from_an_image(
    pipe: CausalVideoPipeline, with_loras: CausalVideoPipeline, accelerator: Any
) -> None:
    def frames(opened: CausalVideoPipeline, image: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        return opened("a cat", image=image, accelerator=accelerator, output_type="pt", generator=generator).frames

    red = Image.new("RGB", (16, 16), "red")
    start = pipe.setting("image_frames")
    assert torch.equal(frames(pipe, None), frames(with_loras, None)), "as without one"
    one, other = frames(pipe, red), frames(with_loras, red)
    assert torch.equal(one[:, :start], other[:, :start]) and not torch.equal(one[:, start:], other[:, start:])
    target = with_loras.image_lora.merge(with_loras.transformer)
    drafter = with_loras.draft_image_lora.merge(with_loras.draft_transformer)
    with_loras.register_modules(transformer=target, draft_transformer=drafter, image_lora=None, draft_image_lora=None)
    assert torch.equal(frames(with_loras, red), other)


def test_a_drafter_that_does_not_move_start_images_is_not_the_default(with_loras: CausalVideoPipeline) -> None:
    def names() -> list[str]:
        return [with_loras.resolve_method(None, from_image=starts).name for starts in (False, True)]

    assert names() == ["sdvg", "sdvg"]
    with_loras.register_modules(draft_image_lora=None)
    assert names() == ["sdvg", "target"] and with_loras.resolve_method("sdvg", from_image=True).name == "sdvg"
    stats = with_loras("a cat", image=Image.new("RGB", (16, 16), "red"), num_blocks=2).stats
    assert set(stats.sources) == {"target"}
    with_loras.register_modules(image_lora=None)
    assert names() == ["sdvg", "sdvg"]


def test_what_generates_no_image_from_prompts_is_refused(pipe: CausalVideoPipeline, tmp_path: Path) -> None:
    rejects(lambda: pipe("a cat", image=class_pipeline(), accelerator="target"), "image")
    rejects(lambda: pipe("a cat", image=pipe, accelerator="target"), "image")
    rejects(lambda: pipe("a cat", image="emoji-video", accelerator="target"), "image_model")
    embeds = torch.zeros(1, 3, 384)
    rejects(lambda: pipe(prompt_embeds=embeds, image=text_pipeline(), accelerator="target"), "image")
