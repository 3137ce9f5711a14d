"""`VARPipeline`: conventions of diffusers, seeds, batches, previews, pictures to start from, and what bad input gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_families import THERE_AND_BACK, seeded
from tiny_models import text_var_pipeline

from vargen import VARPipeline

METHODS = ["plain", "code", "economy", THERE_AND_BACK]
PROMPTS = ["a red apple", "a very long sentence about a cat that sits", "b"]


@pytest.fixture(scope="module")
def texts() -> VARPipeline:
    return text_var_pipeline()


def a_image(seed: int = 0, size: int = 8) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8))


def half(size: int = 8) -> Image.Image:
    """Black on the left, white on the right."""
    mask = Image.new("L", (size, size))
    mask.paste(255, (size // 2, 0, size, size))
    return mask


# -- while it draws ---------------------------------------------------------------------------------------------------------


def test_a_preview_per_scale(scale_pipe: VARPipeline) -> None:
    seen: list[tuple[int, int, bytes]] = []

    def look(pipe: VARPipeline, step: int, drawn: int, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        seen.append((step, drawn, pipe.preview(tensors["latents"], drawn)[0].tobytes()))
        return {}

    image = scale_pipe(class_labels=3, generator=seeded(0)[0], callback_on_step_end=look).images[0]
    assert [(step, drawn) for step, drawn, _ in seen] == [(0, 1), (1, 5), (2, 14), (3, 30)]
    assert len({shown for *_, shown in seen}) == 4 and seen[-1][2] == image.tobytes()


def test_a_stopped_generation_is_a_coarse_image(scale_pipe: VARPipeline) -> None:
    def stop(pipe: VARPipeline, step: int, drawn: int, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"stop": step == 1}

    result = scale_pipe(class_labels=3, generator=seeded(0)[0], callback_on_step_end=stop, output_type="np")
    whole = scale_pipe(class_labels=3, generator=seeded(0)[0], output_type="latent").images
    assert result.stats.stopped and result.stats.passes == 2
    coarse = scale_pipe.decode_tokens(whole, torch.tensor([5]), output_type="np")
    assert np.allclose(result.images, coarse) and not np.allclose(coarse, scale_pipe.decode_tokens(whole, output_type="np"))
    left_out = whole.clone()
    left_out[:, 5:] = -1
    assert np.allclose(scale_pipe.decode_tokens(left_out, output_type="np"), coarse)
    assert (scale_pipe.decode_tokens(whole, torch.tensor([0]), output_type="np") == 1).all(), "white where nothing is drawn"


# -- pictures to start from ---------------------------------------------------------------------------------------------------


def test_tokens_of_an_image_are_an_image_again(scale_pipe: VARPipeline) -> None:
    tokens = scale_pipe.encode_image([a_image(0), a_image(1)])
    assert tokens.shape == (2, 30) and not torch.equal(tokens[0], tokens[1])
    assert torch.equal(scale_pipe.encode_image(a_image(1))[0], tokens[1])
    by_scale = scale_pipe.vqvae.encode(scale_pipe.image_processor.preprocess([a_image(0)]))
    assert torch.equal(torch.cat([each.flatten(1) for each in by_scale], dim=1)[0], tokens[0])


@pytest.mark.parametrize(("strength", "kept"), [(0.0, 4), (0.01, 3), (0.25, 3), (0.5, 2), (0.6, 1), (1.0, 0)])
def test_strength_is_the_share_of_scales_that_is_generated(scale_pipe: VARPipeline, strength: float, kept: int) -> None:
    own, ends = scale_pipe.encode_image(a_image())[0], [0, 1, 5, 14, 30]
    result = scale_pipe(
        class_labels=3, image=a_image(), strength=strength, generator=seeded(3)[0], output_type="latent", top_p=1.0
    )
    assert torch.equal(result.images[0, : ends[kept]], own[: ends[kept]])
    assert result.stats.passes == 4 - kept
    if kept < 4:
        assert not torch.equal(result.images[0, ends[kept] :], own[ends[kept] :])
    drawn = scale_pipe(class_labels=3, generator=seeded(3)[0], output_type="latent", top_p=1.0).images[0]
    assert torch.equal(result.images[0], drawn) == (strength == 1.0)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: getattr(method, "name", method))
def test_what_a_mask_leaves_black_stays(scale_pipe: VARPipeline, method: Any) -> None:
    """Fine cells of the black half are those of the picture, quantised behind what was drawn; the white half is another."""
    image, mask = a_image(), half()
    latents = [
        scale_pipe(
            class_labels=3, image=image, mask_image=mask, generator=seeded(seed)[0], output_type="latent", accelerator=method
        ).images
        for seed in range(2)
    ]
    assert not torch.equal(*latents)
    target = scale_pipe._encode_latent(scale_pipe.image_processor.preprocess([image]))
    for tokens in latents:
        canvas, _ = scale_pipe._accumulate_scales(tokens, None)
        before = tokens.clone()
        before[:, 14:] = -1
        lacking = target - scale_pipe._accumulate_scales(before, None)[0]
        codes = scale_pipe.vqvae.quantize.find_nearest(lacking, 3)
        assert torch.equal(tokens[0, 14:].view(4, 4)[:, :2], codes[0, :, :2]), "black cells hold the nearest codes"
        error = (canvas - target).square().mean((0, 1, 2))
        assert error[:2].mean() < error[2:].mean()
    white = [tokens[0, 14:].view(4, 4)[:, 2:] for tokens in latents]
    assert not torch.equal(*white)


def test_a_black_mask_keeps_all_and_a_white_one_nothing(scale_pipe: VARPipeline) -> None:
    def generate(**options: Any) -> torch.Tensor:
        return scale_pipe(class_labels=3, generator=seeded(1)[0], output_type="latent", **options).images

    black, white = Image.new("L", (8, 8), 0), Image.new("L", (8, 8), 255)
    assert torch.equal(generate(image=a_image(), mask_image=black), scale_pipe.encode_image(a_image()))
    assert torch.equal(generate(image=a_image(), mask_image=white), generate())


def test_kept_pixels_are_those_of_the_image(scale_pipe: VARPipeline) -> None:
    """The mask is black in columns 0 to 3, of which the last one is the transition."""
    image = np.asarray(a_image().convert("RGB"))
    for kind in ("pil", "np"):
        found = scale_pipe(class_labels=3, image=a_image(), mask_image=half(), generator=seeded(1)[0], output_type=kind).images[
            0
        ]
        pixels = np.asarray(found) if kind == "pil" else (255 * found).round().astype(np.uint8)
        assert (pixels[:, :3] == image[:, :3]).all() and (pixels[:, 4:] != image[:, 4:]).any()


@pytest.mark.parametrize(("given", "said"), [
    ({"strength": 0.0}, {"image": True, "strength": 0.0}), ({}, {"image": True, "strength": 0.8}),
    ({"mask_image": half()}, {"image": True, "mask": True, "strength": 1.0}),
])  # fmt: skip
def test_parameters_say_what_an_image_starts_from(scale_pipe: VARPipeline, given: Any, said: Any) -> None:
    found = scale_pipe(class_labels=3, image=a_image(), **given).parameters()
    assert {name: found[name] for name in ("image", "mask", "strength") if name in found} == said


def test_each_prompt_may_have_its_image_and_mask(texts: VARPipeline) -> None:
    images, masks = [a_image(0), a_image(1)], [half(), half().transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
    options: dict[str, Any] = {"output_type": "latent", "strength": 0.9}
    together = texts(
        PROMPTS[:2], image=images, mask_image=masks, num_images_per_prompt=2, generator=seeded(0, 1, 2, 3), **options
    ).images
    for k in range(4):
        alone = texts(PROMPTS[k // 2], image=images[k // 2], mask_image=masks[k // 2], generator=seeded(k)[0], **options).images
        assert torch.equal(alone[0], together[k])
