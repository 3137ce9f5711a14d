"""`InfinityPipeline`: sizes, lists by scale, guidance within the network, tiles, and images to start from."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from golden_infinity import list_cases, official
from PIL import Image
from rejects import rejects
from tiny_families import brightness, no_passes, seeded
from tiny_models import infinity_pipeline, tiny_bsq, tiny_infinity

from vargen import InfinityPipeline
from vargen.image_metadata import read_parameters
from vargen.models.infinity.schedules import NUM_SCALES, SCALES, ScalePlan, choose_plan
from vargen.pipelines.regeneration import regenerate

PROMPTS = ["a red apple", "a very long sentence about a cat that sits", "b"]


@pytest.fixture(scope="module")
def pipe() -> InfinityPipeline:
    return infinity_pipeline()


def tokens(pipe: InfinityPipeline, prompt: Any = PROMPTS[0], seed: int = 0, **options: Any) -> torch.Tensor:
    count = 1 if isinstance(prompt, str) else len(prompt)
    return pipe(prompt, generator=seeded(*range(seed, seed + count)), output_type="latent", **options).images


def an_image(width: int = 12, height: int = 12, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize(("name", "case"), list_cases())
def test_calls_give_the_official_bits_and_image(name: str, case: str) -> None:
    golden, count = official(name), len(official(name).plan.scales)
    own = InfinityPipeline(vqvae=golden.vqvae, transformer=golden.transformer)
    own._plan = golden.plan
    condition, (scales, layers, leak, _) = golden.condition(case), golden.settings(case)
    given: dict[str, Any] = {"prompt_embeds": condition.caption_embeds, "prompt_mask": condition.caption_mask}
    if (negative := condition.negative) is not None:
        given |= {"negative_prompt_embeds": negative.caption_embeds, "negative_prompt_mask": negative.caption_mask}
    if leak:
        given |= {"image": (golden.io["pixels"].float() + 1) / 2, "strength": (count - leak) / count}
    result = own(**given, guidance_scale=scales, cfg_insertion_layer=layers, temperature=0, output_type="pt")
    found = result.tokens.split(own._quantizer().scale_tokens, dim=1)
    for k in range(leak, count):
        assert torch.equal(found[k], golden.io[f"bits_{case}_scale{k}"].flatten(1).long()), k
    if (image := golden.io.get(f"image_{case}")) is not None:
        torch.testing.assert_close(result.images, (image + 1) / 2, atol=1e-4, rtol=0)


# -- sizes ----------------------------------------------------------------------------------------------------------------


def test_official_sizes_are_their_own_nearest() -> None:
    for ratio in SCALES:
        for name, count in NUM_SCALES.items():
            plan = ScalePlan.official(count, ratio)
            rows, columns = plan.scales[-1]
            assert choose_plan(16 * rows, 16 * columns, None, 13, 16) == plan, (ratio, name)


def test_images_have_the_official_size_nearest_to_the_requested(pipe: InfinityPipeline, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "vargen"):
        result = pipe("b", height=30, width=60, generator=seeded(3)[0])
    assert "44x22" in caplog.text and "60x30" in caplog.text, "7 scales of ratio 1/2"
    caplog.clear()
    assert result.images[0].size == (44, 22) and result.tokens.shape == (1, 451 * 4)
    assert {name: result.parameters()[name] for name in ("height", "width")} == {"height": 22, "width": 44}
    exact = pipe("b", height=22, width=44, generator=seeded(3)[0])
    assert torch.equal(exact.tokens, result.tokens) and not caplog.text
    turned = pipe("b", height=44, width=22, generator=seeded(3)[0])
    assert turned.images[0].size == (22, 44) and not torch.equal(turned.tokens, result.tokens)
    again = pipe.at_size(22, 44)
    assert again.grid == (11, 22) and again.decode_tokens(result.tokens)[0].tobytes() == result.images[0].tobytes()
    assert pipe.grid == (6, 6) and pipe("b", pn="0.06M").images[0].size == (32, 32)


def test_previews_of_a_call_have_its_size(pipe: InfinityPipeline) -> None:
    sizes = []

    def look(given: InfinityPipeline, step: int, count: int, tensors: dict[str, Any]) -> dict[str, Any]:
        sizes.append((count, given.preview(tensors["latents"], count)[0].size))
        return {"stop": step == 2}

    result = pipe("b", height=22, width=44, callback_on_step_end=look)
    assert sizes == [(4, (44, 22)), (20, (44, 22)), (52, (44, 22))] and result.stats.stopped


BAD: list[tuple[dict[str, Any], str]] = [
    ({"height": 64}, "height"), ({"width": 64}, "width"), ({"height": 0, "width": 8}, "height"), ({"pn": "4M"}, "pn"),
    ({"height": 64, "width": "64"}, "width"), ({"tile": 0}, "tile"), ({"tile": 2.5}, "tile"),
    ({"guidance_scale": [1.0, 2.0]}, "guidance_scale"), ({"guidance_scale": [1.0, 2.0, 3.0, -1.0]}, "guidance_scale"),
    ({"temperature": [1.0, 0.0, 1.0, 1.0]}, "temperature"), ({"temperature": "warm"}, "temperature"), ({"top_k": 3}, "top_k"),
    ({"guidance_scale": [1.0, float("nan"), 1.0, 1.0]}, "guidance_scale"), ({"cfg_insertion_layer": []}, "cfg_insertion_layer"),
    ({"cfg_insertion_layer": [1]}, "cfg_insertion_layer"),
    ({"cfg_insertion_layer": -2}, "cfg_insertion_layer"), ({"cfg_insertion_layer": [-4]}, "cfg_insertion_layer"),
    ({"guidance_interval": 3}, "guidance_interval"), ({"return_log_probs": True}, "return_log_probs"),
    ({"image": an_image(8, 8)}, "image"), ({"image": an_image(), "height": 22, "width": 44}, "image"), ({"hight": 22}, "hight"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "name"), BAD, ids=lambda each: str(each)[:40])
def test_bad_calls_are_named_before_anything_runs(pipe: InfinityPipeline, given: dict[str, Any], name: str) -> None:
    with no_passes(pipe):
        rejects(lambda: pipe("b", **given), name)


def test_a_text_without_rows_is_refused(pipe: InfinityPipeline) -> None:
    embeds = torch.randn(1, 12, 32)
    rejects(lambda: pipe(prompt_embeds=embeds, prompt_mask=torch.zeros(1, 12)), "prompt_mask")
    mask = torch.arange(12)[None] >= 8
    assert torch.isfinite(pipe(prompt_embeds=embeds, prompt_mask=mask, output_type="pt").images).all()


# -- guidance and temperature ---------------------------------------------------------------------------------------------


def test_lists_say_what_numbers_say(pipe: InfinityPipeline) -> None:
    plain = tokens(pipe, PROMPTS, guidance_scale=3.0, temperature=0.5)
    assert torch.equal(tokens(pipe, PROMPTS, guidance_scale=[3.0] * 4, temperature=(0.5,) * 4), plain)
    assert torch.equal(tokens(pipe, PROMPTS, guidance_scale=[3, 3, 3, 1]), tokens(pipe, PROMPTS, accelerator="economy"))
    alone = tokens(pipe, guidance_scale=1.0)
    assert torch.equal(tokens(pipe, guidance_scale=[1, 1, 1, 1]), alone)
    assert not torch.equal(tokens(pipe, guidance_scale=[1, 1, 1, 3]), alone), "guidance may begin late"
    negative = tokens(pipe, PROMPTS, negative_prompt=["a dog", "blue", "c"], guidance_scale=[3, 1, 2, 1])
    assert not torch.equal(negative, tokens(pipe, PROMPTS, guidance_scale=[3, 1, 2, 1]))


def test_guidance_within_the_network(pipe: InfinityPipeline) -> None:
    plain, inner, both = (tokens(pipe, PROMPTS, cfg_insertion_layer=layers) for layers in (None, [-2], [0, -2]))
    assert torch.equal(tokens(pipe, PROMPTS, cfg_insertion_layer=[0]), plain)
    assert not torch.equal(inner, plain) and not torch.equal(both, inner)
    for method in ("plain", "code", "economy"):
        options: dict[str, Any] = {"cfg_insertion_layer": [-2], "accelerator": method}
        together = tokens(pipe, PROMPTS, **options)
        for row, prompt in enumerate(PROMPTS):
            assert torch.equal(tokens(pipe, prompt, seed=row, **options)[0], together[row])


@pytest.mark.parametrize("method", ["plain", "code", "economy"])
def test_tiles_change_no_bit(pipe: InfinityPipeline, method: str) -> None:
    whole, widths = tokens(pipe, PROMPTS, accelerator=method), []
    hook = pipe.transformer.blocks[0].ffn.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    assert torch.equal(tokens(pipe, PROMPTS, accelerator=method, tile=5), whole)
    hook.remove()
    assert max(widths) == 5
    sized = {"height": 22, "width": 44, "accelerator": method}
    assert torch.equal(tokens(pipe, PROMPTS, tile=50, **sized), tokens(pipe, PROMPTS, **sized))


def test_the_best_of_several_of_another_size(pipe: InfinityPipeline) -> None:
    options: dict[str, Any] = {"height": 44, "width": 22, "output_type": "pt"}
    result = pipe(PROMPTS[:2], num_candidates=3, scorer=brightness, generator=seeded(3, 9), **options)
    for row in range(2):
        again = pipe(PROMPTS[row], generator=seeded(result.stats.seeds[row])[0], **options)
        assert torch.equal(again.tokens[0], result.tokens[row])
        assert result.stats.scores[row].index(max(result.stats.scores[row])) == result.stats.candidate_seeds[row].index(
            result.stats.seeds[row]
        )


def test_an_image_carries_size_and_lists(pipe: InfinityPipeline, tmp_path: Any) -> None:
    options: dict[str, Any] = {
        "height": 22, "width": 44, "guidance_scale": [3.0, 2.0, 1.0, 4.0, 2.0, 1.0, 1.0], "temperature": [0.5] * 7,
        "cfg_insertion_layer": [0, -1],
    }  # fmt: skip
    result = pipe("a red apple", generator=seeded(5)[0], **options)
    found = read_parameters(result.save(tmp_path / "a.png"))
    assert {name: found[name] for name in options} == options
    with Image.open(tmp_path / "a.png") as original:
        assert regenerate(pipe, found, original).same_pixels
        assert not regenerate(pipe, {**found, "temperature": [1.5] * 7}, original).same_pixels
    usual = pipe("a red apple", generator=seeded(5)[0]).parameters()
    assert "height" not in usual and usual["guidance_scale"] == 3.0


# -- images to start from -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strength", "kept"), [(0.0, 4), (0.25, 3), (0.5, 2), (1.0, 0)])
def test_strength_is_the_share_of_scales_that_is_generated(pipe: InfinityPipeline, strength: float, kept: int) -> None:
    own, ends = pipe.encode_image(an_image())[0], [0, 4, 20, 84, 228]
    result = pipe("b", image=an_image(), strength=strength, generator=seeded(3)[0], output_type="latent")
    assert torch.equal(result.images[0, : ends[kept]], own[: ends[kept]]) and result.stats.passes == 4 - kept
    assert kept == 4 or not torch.equal(result.images[0, ends[kept] :], own[ends[kept] :])


@pytest.mark.parametrize("patchify", [False, True])
@pytest.mark.parametrize("method", ["plain", "code", "economy"])
def test_what_a_mask_leaves_black_stays(method: str, patchify: bool) -> None:
    """Of an image that is not square, also where a token is 2 x 2 positions."""
    own = infinity_pipeline()
    if patchify:
        parts = {"transformer": tiny_infinity(code_dim=16), "draft_transformer": tiny_infinity(1, code_dim=16, depth=1)}
        own = InfinityPipeline(**{**own.components, **parts, "vqvae": tiny_bsq(patchify=True)})
    bound = own.at_size(pn="0.06M", height=44, width=22)
    (height, width), last = bound.pixel_size, len(bound.grids) - 1
    image, mask, quantizer = an_image(width, height), Image.new("L", (width, height)), bound._quantizer()
    mask.paste(255, (0, height // 2, width, height))
    target = bound._encode_latent(own.image_processor.preprocess([image]))
    black = torch.zeros(1, 1, *quantizer.scales[-1])
    black[:, :, : black.shape[2] // 2] = 1
    kept = quantizer.spread(black, last).bool()
    for seed in (1, 2):
        result = bound("b", image=image, mask_image=mask, accelerator=method, generator=seeded(seed)[0], output_type="np")
        assert np.abs(result.images[0][: height // 2 - 2] - (np.asarray(image) / 255)[: height // 2 - 2]).max() < 0.01
        before = result.tokens.clone()
        before[:, -quantizer.scale_tokens[-1] :] = -1
        nearest = quantizer.find_nearest(target - bound._accumulate_scales(before, None)[0], last)
        same = nearest == result.tokens[:, -quantizer.scale_tokens[-1] :]
        assert same[kept].all() and not same[~kept].all()


def test_black_masks_keep_all_and_white_ones_nothing(pipe: InfinityPipeline) -> None:
    black, white = Image.new("L", (12, 12), 0), Image.new("L", (12, 12), 255)
    assert torch.equal(tokens(pipe, image=an_image(), mask_image=black), pipe.encode_image(an_image()))
    assert torch.equal(tokens(pipe, image=an_image(), mask_image=white), tokens(pipe))


def test_each_prompt_may_have_its_image(pipe: InfinityPipeline) -> None:
    images = [an_image(seed=0), an_image(seed=1), an_image(seed=2)]
    together = tokens(pipe, PROMPTS, image=images, strength=0.5)
    for row, prompt in enumerate(PROMPTS):
        assert torch.equal(tokens(pipe, prompt, seed=row, image=images[row], strength=0.5)[0], together[row])


# -- components -----------------------------------------------------------------------------------------------------------


def test_parts_that_do_not_belong_together_are_refused(pipe: InfinityPipeline) -> None:
    for changed, name in (
        ({"vqvae": tiny_bsq(bits=8)}, "code_dim"), ({"vqvae": tiny_bsq(patchify=True)}, "code_dim"),
        ({"draft_transformer": tiny_infinity(caption_rows=9)}, "caption_rows"), ({"defaults": {"top_k": 3}}, "top_k"),
        ({"transformer": tiny_infinity(caption_dim=64), "draft_transformer": None}, "caption_dim"),
    ):  # fmt: skip
        rejects(lambda changed=changed: InfinityPipeline(**{**pipe.components, **changed}), name)


def test_weights_in_half_the_memory_generate_the_same() -> None:
    """Stored in float16 and cast back for their layer; these weights lose nothing by it."""
    own = infinity_pipeline()
    own.transformer.half().float()
    expected = tokens(own, PROMPTS)
    own.transformer.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    assert {weight.dtype for weight in own.transformer.blocks.parameters()} == {torch.float16, torch.float32}
    assert torch.equal(tokens(own, PROMPTS), expected)


def test_other_families_have_no_height() -> None:
    from tiny_models import text_var_pipeline

    rejects(lambda: text_var_pipeline()("b", height=8, width=8), "height")
