"""Helios of diffusers by video methods: `target` is the untouched pipeline's video, and rejected drafts leave it as it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from PIL import Image
from rejects import rejects
from tiny_families import brightness
from tiny_helios import SIZE, AutoencoderKLWan, make_base, make_distilled, make_mid, noise
from tiny_video import randomised
from tiny_wan import VAE

import vargen
from vargen.decoding import SingleModel, Stride, VideoMethod
from vargen.models.helios import draft_noise

pytest.importorskip("ftfy")  # diffusers cleans prompts with it

CHUNK = 9  # frames of pixels
BASE: dict[str, Any] = {**SIZE, "num_inference_steps": 3, "guidance_scale": 3.0, "negative_prompt": "a dog"}
DISTILLED: dict[str, Any] = {
    **SIZE, "guidance_scale": 1.0, "pyramid_num_inference_steps_list": [2, 1, 1], "is_amplify_first_chunk": True
}  # fmt: skip
MID: dict[str, Any] = {**SIZE, "width": 128, "guidance_scale": 3.0, "pyramid_num_inference_steps_list": [2, 1, 3]}
DRAFTS = {name: value for name, value in DISTILLED.items() if name not in SIZE}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_base(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def pipe(base: Any) -> Any:
    return vargen.accelerate(base, draft_model=make_distilled())


@pytest.fixture(scope="module")
def pipes(base: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    distilled = make_distilled()
    distilled.text_encoder, distilled.tokenizer = base.text_encoder, base.tokenizer
    half = make_distilled()
    half.text_encoder, half.tokenizer = base.text_encoder, base.tokenizer
    half.transformer.to(torch.bfloat16)
    return {"base": (base, BASE), "mid": (make_mid(base), MID), "distilled": (distilled, DISTILLED), "half": (half, DISTILLED)}


@contextmanager
def counted(*networks: Any) -> Iterator[list[int]]:
    """The number of calls of each network."""
    counts = [0] * len(networks)

    def hook(number: int) -> Any:
        def count(*_: Any) -> None:
            counts[number] += 1

        return count

    handles = [network.register_forward_hook(hook(number)) for number, network in enumerate(networks)]
    yield counts
    for handle in handles:
        handle.remove()


def latents(pipe: Any, method: Any = "target", seed: int = 0, blocks: int = 3, **options: Any) -> torch.Tensor:
    options = {**BASE, "generator": noise(seed), "num_frames": CHUNK * blocks, **options}
    if pipe.drafter is not None:
        options.setdefault("draft_options", DRAFTS)
    return pipe("a cat", accelerator=method, output_type="latent", **options).frames[0]


@pytest.mark.parametrize("name", ["base", "mid", "distilled", "half"])
@pytest.mark.parametrize("frames", [1, 4 * CHUNK - 2])
def test_target_is_the_untouched_pipeline(pipes: Any, name: str, frames: int) -> None:
    untouched, options = pipes[name]
    sources = noise(3), noise(3)
    given = {**options, "num_frames": frames}
    with counted(untouched.transformer) as passes:
        expected = untouched("a cat", generator=sources[0], output_type="pt", **given).frames[0]
    made = vargen.accelerate(untouched)("a cat", generator=sources[1], output_type="pt", **given)
    assert len(expected) == (CHUNK if frames == 1 else 33) and torch.equal(made.frames[0], expected)
    assert torch.equal(*(source.get_state() for source in sources)), "the generator is consumed as by the call"
    assert made.stats.passes == {"target": passes[0]} and made.stats.accelerator == "target" and made.stats.seed == 3


def test_latents_are_those_of_the_untouched_pipeline(pipe: Any, base: Any) -> None:
    expected = base("a cat", generator=noise(), output_type="latent", num_frames=3 * CHUNK, **BASE).frames
    assert torch.equal(latents(pipe), expected[0].transpose(0, 1))


def test_the_last_frames_are_cut_as_in_diffusers(base: Any) -> None:
    options = {**BASE, "num_frames": 4 * CHUNK, "num_inference_steps": 1}
    expected = base("a cat", generator=noise(), output_type="pil", **options).frames[0]
    stream = vargen.accelerate(base).stream("a cat", generator=noise(), **options)
    assert [len(block.frames) for block in stream] == [9, 9, 9, 6] and len(expected) == 33
    assert vargen.accelerate(base)("a cat", generator=noise(), **options).frames[0] == expected


@pytest.mark.parametrize("kind", ["pil", "pt"])
def test_a_video_starts_from_an_image(pipe: Any, base: Any, kind: str) -> None:
    image: Any = Image.new("RGB", (80, 48), "red") if kind == "pil" else torch.rand(1, 3, 64, 64, generator=noise())
    options = {**BASE, "num_frames": 3 * CHUNK, "image": image}
    expected = base("a cat", generator=noise(), output_type="pt", **options).frames[0]
    made = pipe("a cat", accelerator="target", generator=noise(), output_type="pt", **options)
    assert torch.equal(made.frames[0], expected) and made.stats.seconds > 0
    drafted = latents(pipe, VideoMethod(policy=Stride(2), target_blocks=()), image=image)
    plain = latents(pipe, VideoMethod(policy=Stride(2), target_blocks=()))
    assert not torch.equal(drafted[:3], plain[:3])


def test_drafts_are_calls_of_the_drafter(pipe: Any) -> None:
    made = pipe.stream(
        "a cat", accelerator=VideoMethod(policy=Stride(9)), num_frames=27, generator=noise(5), draft_options=DRAFTS, **BASE
    )
    blocks = [block.latents.transpose(0, 1)[None] for block in made]
    assert made.stats.sources == ("target", "draft", "draft")
    prompt = pipe.encode_video_condition("a cat")
    expected = pipe.drafter(
        prompt_embeds=prompt.embeds, **{**DISTILLED, "is_amplify_first_chunk": False}, num_frames=1, output_type="latent",
        generator=draft_noise(made.seed)(2), image_latents=blocks[0][:, :, :1], video_latents=torch.cat(blocks[:2], 2),
        add_noise_to_image_latents=False, add_noise_to_video_latents=False,
    ).frames[:, :, -3:]  # fmt: skip
    assert torch.equal(blocks[2], expected)
    numbers = [int(torch.randint(2**60, (), generator=draft_noise(seed)(block))) for seed in (1, 1, 2) for block in (0, 1)]
    assert numbers[:2] == numbers[2:4] and len(set(numbers)) == 4, "of the seed and the block"


def test_sdvg_is_the_drafts_or_the_target(pipe: Any) -> None:
    accepted, rejected = (latents(pipe, "sdvg", tau=tau, scorer=brightness) for tau in (-math.inf, math.inf))
    assert torch.equal(accepted, latents(pipe, VideoMethod(policy=Stride(9))))
    assert torch.equal(rejected, latents(pipe)) and not torch.equal(accepted[3:], rejected[3:])


def test_a_rejected_draft_leaves_nothing(pipe: Any) -> None:
    """Blocks up to the first accepted draft are the target's; one that is scored low in a single frame is rejected."""

    class Scorer:
        def bind(self, prompt: str) -> Any:
            return lambda view: torch.tensor([1.0, 0.0 if view.number == 1 else 1.0])

    options = {"num_frames": 4 * CHUNK, "scorer": Scorer(), "tau": 0.5, "draft_options": DRAFTS, **BASE}
    with counted(pipe.target.transformer, pipe.drafter.transformer) as passes:
        result = pipe("a cat", generator=noise(), output_type="latent", **options)
    assert [record.outcome for record in result.stats.blocks] == ["forced", "rejected", "accepted", "accepted"]
    assert torch.equal(result.frames[0][:6], latents(pipe)[:6])
    assert [record.passes for record in result.stats.blocks] == [
        {"target": 6, "draft": 0}, {"target": 6, "draft": 4}, *[{"target": 0, "draft": 4}] * 2
    ]  # fmt: skip
    assert result.stats.passes == dict(zip(("target", "draft"), passes, strict=True))


def test_prompts_switch_between_blocks(pipe: Any) -> None:
    stream = pipe.stream("a cat", accelerator="target", num_frames=18, generator=noise(), **BASE)
    first = next(stream)
    stream.change_prompt(pipe.encode_video_condition("a dog", "a dog"))
    both, cat = torch.cat([first.latents, next(stream).latents]), latents(pipe)[:6]
    assert torch.equal(both[:3], cat[:3]) and not torch.equal(both[3:], cat[3:])


def test_a_callback_stops_within_a_step(pipe: Any, base: Any) -> None:
    calls: list[tuple[int, int]] = []

    def stop(pipeline: Any, step: int, block: int, inputs: Any) -> dict[str, bool]:
        calls.append((step, block))
        return {"stop": block == 1}

    options = {**BASE, "num_frames": 27, "accelerator": "target"}
    result = pipe("a cat", generator=noise(), callback_on_step_end=stop, output_type="latent", **options)
    assert calls == [(1, 0), (3, 0), (5, 0), (7, 1)] and result.stats.stopped
    assert torch.equal(result.frames[0], latents(pipe)[:3]), "the block before is kept, and later calls are as before"

    def interrupt(pipeline: Any, step: int, block: int, inputs: Any) -> None:
        base._interrupt = block == 1

    result = pipe("a cat", generator=noise(), callback_on_step_end=interrupt, output_type="latent", **options)
    assert result.stats.stopped and result.frames[0].shape[0] == 3


def test_a_seed_gives_the_video_again(pipe: Any) -> None:
    options = {**BASE, "num_frames": 18, "accelerator": "stride", "output_type": "latent", "draft_options": DRAFTS}
    torch.manual_seed(0)
    results = [pipe("a cat", **options) for _ in range(2)]
    again = pipe("a cat", generator=noise(results[0].stats.seed), **options)
    assert torch.equal(again.frames[0], results[0].frames[0]) and not torch.equal(*(each.frames[0] for each in results))


def test_a_distilled_drafter_has_its_settings(pipe: Any) -> None:
    method = VideoMethod(policy=SingleModel(draft=True), target_blocks=())
    stats = pipe("a cat", generator=noise(), accelerator=method, num_frames=18, **BASE).stats
    assert [record.passes["draft"] for record in stats.blocks] == [12, 6], "twice the steps in the first chunk, no guidance"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no scorer": ({"accelerator": "sdvg"}, "scorer"),
    "no scorer of frames": ({"accelerator": "sdvg", "scorer": 3}, "scorer"),
    "router": ({"accelerator": "sdvg-learned"}, "sdvg-learned"),
    "early exit": ({"accelerator": "early-exit"}, "early-exit"),
    "method of images": ({"accelerator": "gumbel"}, "gumbel"),
    "tau": ({"accelerator": "stride", "tau": 0.5}, "tau"),
    "frames": ({"num_frames": 0}, "num_frames"),
    "size": ({"height": 40}, "height"),
    "size of the drafter": ({"height": 80}, "height"),
    "steps": ({"num_inference_steps": 0}, "num_inference_steps"),
    "chunk": ({"num_latent_frames_per_chunk": 0}, "num_latent_frames_per_chunk"),
    "history": ({"history_sizes": [4, 2]}, "history_sizes"),
    "typo": ({"num_step": 3}, "num_step"),
    "of the other class": ({"zero_steps": 3}, "zero_steps"),
    "draft options": ({"draft_options": {"num_inference_steps": 3}}, "num_inference_steps"),
    "size of drafts": ({"draft_options": {"height": 64}}, "height"),
    "no dict": ({"draft_options": 3}, "draft_options"),
    "stages": ({"draft_options": {"pyramid_num_inference_steps_list": [2, 2]}}, "pyramid_num_inference_steps_list"),
    "generators": ({"generator": [noise()]}, "generator"),
    "image": ({"image": "cat.png"}, "image"),
    "output": ({"output_type": "mp4"}, "output_type"),
    "callback": ({"callback_on_step_end": 3}, "callback_on_step_end"),
    "negative": ({"negative_prompt": 3}, "negative_prompt"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_calls_are_refused_at_the_door(pipe: Any, case: str) -> None:
    options, name = BAD[case]
    with counted(pipe.target.transformer, pipe.drafter.transformer, pipe.target.text_encoder) as calls:
        rejects(lambda: pipe("a cat", **{**BASE, "accelerator": "stride", **options}), name)
    assert calls == [0, 0, 0]


def test_bad_prompts_are_refused(pipe: Any) -> None:
    for prompt in ("", ["a cat", "a dog"], None):
        rejects(lambda prompt=prompt: pipe(prompt, accelerator="target", **BASE), "prompt")


def test_pipelines_that_do_not_fit_are_refused(base: Any) -> None:
    drafter = make_distilled()
    rejects(lambda: vargen.accelerate(drafter), "text_encoder", ValueError)
    rejects(lambda: vargen.accelerate(base, draft_model=base.transformer), "draft_model", TypeError)
    rejects(lambda: vargen.accelerate(base, draft_model=make_distilled(text_dim=8)), "text_dim", ValueError)
    rejects(
        lambda: vargen.accelerate(base, draft_model=make_distilled(in_channels=8, out_channels=8)), "in_channels", ValueError
    )
    lists = randomised(AutoencoderKLWan.from_config({**base.vae.config, "latents_mean": list(base.vae.config.latents_mean)}), 3)
    assert vargen.accelerate(base, draft_model=make_distilled(lists)).drafter is not None
    other = randomised(AutoencoderKLWan(**VAE, latents_mean=[0.5] * 16), 3)
    rejects(lambda: vargen.accelerate(base, draft_model=make_distilled(other)), "latents_mean", ValueError)
    rejects(lambda: vargen.accelerate(base, base.tokenizer), "processor", ValueError)
    rejects(lambda: vargen.accelerate(base, size=(2, 2)), "size", ValueError)
    alone = vargen.accelerate(base)
    rejects(lambda: alone("a cat", accelerator="stride", **BASE), "stride")
    rejects(lambda: alone("a cat", draft_options={}, **BASE), "draft_options")
