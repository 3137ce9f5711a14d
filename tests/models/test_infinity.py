"""Infinity's transformer, schedules and adapter against the official ones, and against themselves: tiled, alone, resumed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from golden_infinity import GOLDEN, SETS, Official, list_cases, official
from rejects import rejects
from torch import Tensor

from vargen.decoding import DecodeOutput, Sampling, ScaleSchedule, Stage, decode_scales
from vargen.kernels.ops import probs_from_logits
from vargen.models.infinity.decoding import BitGuidance, InfinityScaleModel
from vargen.models.infinity.network import SIZES, InfinityTransformer, PassGuidance, parameter_count
from vargen.models.infinity.schedules import NUM_SCALES, SCALES, ScalePlan, choose_plan

GREEDY = Sampling(temperature=0.0)
_CLOSE = 1e-4


@pytest.fixture(params=SETS)
def golden(request: pytest.FixtureRequest) -> Official:
    return official(request.param)


@pytest.fixture(params=["infinity_a", "infinity_b"])
def tiny(request: pytest.FixtureRequest) -> Official:
    """For tests of one model against itself: five scales, and cases of these."""
    return official(request.param)


def decode(model: InfinityScaleModel, condition: Any, sampling: Sampling = GREEDY, **options: Any) -> tuple[Any, list[Tensor]]:
    """Decode images of seeds 0, 1, ..., and return the logits of the passes, too."""
    seen: list[Tensor] = []
    forward = model.forward

    def watched(*given: Any) -> Tensor:
        seen.append(forward(*given))
        return seen[-1]

    model.forward = watched  # type: ignore[method-assign]
    seeds = torch.arange(len(condition))
    return decode_scales(model, condition, seeds, sampling=sampling, **options), seen


def split(model: InfinityScaleModel, output: DecodeOutput) -> list[Tensor]:
    """The bits of each scale, `[B, n C]`."""
    return list(output.tokens.split(list(model.scale_tokens), dim=1))


# -- schedules ------------------------------------------------------------------------------------------------------------


def test_positions_are_the_official_ones() -> None:
    """Of all ratios and scales, with ties, which are rounded to even."""
    recorded = json.loads((GOLDEN / "infinity_positions.json").read_text())
    assert {float(ratio) for ratio in recorded} == SCALES.keys()
    for ratio, scales in recorded.items():
        plan = ScalePlan.official(13, float(ratio))
        assert plan.scales == tuple((rows, columns) for rows, columns in (scale["hw"] for scale in scales))
        expected = [torch.cartesian_prod(torch.tensor(scale["y"]), torch.tensor(scale["x"])) for scale in scales]
        assert torch.equal(plan.positions(), torch.cat(expected).float()), ratio


@pytest.mark.parametrize(
    ("given", "tokens", "last"),
    [
        ({}, 10521, (64, 64)), ({"pn": "0.25M"}, 2521, (32, 32)), ({"pn": "0.60M"}, 6425, (48, 48)),
        ({"height": 1024, "width": 1024}, 10521, (64, 64)), ({"height": 1000, "width": 500}, 7219, (74, 37)),
        ({"height": 256, "width": 768}, 2588, (18, 54)), ({"height": 1, "width": 9000}, 509, (9, 27)),
        ({"height": 10, "width": 8, "pn": "1M"}, 10774, (70, 56)), ({"height": 10, "width": 8, "pn": "0.06M"}, 614, (20, 16)),
    ],
)  # fmt: skip
def test_a_size_takes_the_nearest_official_scales(given: dict[str, Any], tokens: int, last: tuple[int, int]) -> None:
    plan = choose_plan(given.get("height"), given.get("width"), given.get("pn"), 13, 16)
    assert plan.ends[-1] == tokens and plan.scales[-1] == last
    assert plan.final in [table[-1] for table in SCALES.values() if plan.scales == table[: len(plan.scales)]]


def test_bad_sizes_are_named() -> None:
    for given, name in (
        ((7, None, None), "height"),
        ((None, 7, None), "width"),
        ((0, 7, None), "height"),
        ((7, 2.5, None), "width"),
    ):
        rejects(lambda given=given: choose_plan(*given, 13, 16), name)
    for pn in ("2M", 7, []):
        rejects(lambda pn=pn: choose_plan(None, None, pn, 13, 16), "pn")
    assert list(NUM_SCALES) == ["0.06M", "0.25M", "0.60M", "1M"]


# -- parity with the official code ----------------------------------------------------------------------------------------


@torch.inference_mode()
def test_text_and_modulation_are_the_official_ones(golden: Official) -> None:
    condition, io, model = golden.condition(), golden.io, golden.transformer
    both = condition.cat(model.null_condition(condition))
    assert both.caption_embeds is not None and both.caption_mask is not None
    pooled, text = model.embed_text(both.caption_embeds, both.caption_mask)
    torch.testing.assert_close(pooled, io["cond"], atol=1e-5, rtol=0)
    torch.testing.assert_close(text[both.caption_mask], io["text_ca"], atol=1e-5, rtol=0)


@torch.inference_mode()
def test_teacher_forced_logits_are_the_official_ones(golden: Official) -> None:
    condition = golden.condition()
    cache = golden.transformer.new_cache(golden.plan, 2, golden.config["text_maxlen"])
    logits = golden.transformer(golden.io["teacher_input"], condition, cache=cache).logits
    torch.testing.assert_close(logits, golden.io["teacher_logits"], atol=_CLOSE, rtol=0)


@pytest.mark.parametrize(("name", "case"), list_cases())
@torch.inference_mode()
def test_bits_and_guided_logits_are_the_official_ones(name: str, case: str) -> None:
    """Guidance by number, list, block and negative prompt; temperature; and first scales of an image, `gt_leak`."""
    golden = official(name)
    model, io = golden.model(case), golden.io
    _, _, leak, tau = golden.settings(case)
    given = [part.flatten(1).long() for part in golden.by_scale("encoded_token_bits")][:leak]
    output, logits = decode(model, golden.condition(case), fixed_scales=given)
    found = split(model, output)[len(given) :]
    for k, (bits, of_scale) in enumerate(zip(found, logits, strict=True), len(given)):
        assert torch.equal(bits, io[f"bits_{case}_scale{k}"].flatten(1).long()), k
        if (expected := io.get(f"logits_{case}_scale{k}")) is not None:
            torch.testing.assert_close(of_scale.flatten(1) / tau, expected.flatten(1), atol=_CLOSE, rtol=0)


@torch.inference_mode()
def test_logits_before_guidance_and_the_image_are_the_official_ones(golden: Official) -> None:
    condition, io, last = golden.condition(), golden.io, len(golden.plan.scales) - 1
    both = condition.cat(golden.transformer.null_condition(condition))
    cache = golden.transformer.new_cache(golden.plan, 4, golden.config["text_maxlen"])
    canvas, quantizer = golden.model().canvas(2), golden.quantizer
    for k, bits in enumerate(golden.by_scale("bits_cfg3")):
        inputs = io[f"codes_in_cfg3_scale{k}"].repeat(2, 1, 1) if k else None
        logits = golden.transformer(inputs, None if k else both, cache=cache).logits
        if k < last:
            expected = torch.cat([io[f"logits_cond_cfg3_scale{k}"], io[f"logits_uncond_cfg3_scale{k}"]])
            torch.testing.assert_close(logits, expected, atol=_CLOSE, rtol=0)
        canvas = canvas + quantizer.lookup(bits.flatten(1).long(), k)
        if (sums := io.get(f"summed_codes_after_scale{k}")) is not None:
            torch.testing.assert_close(canvas, sums, atol=2e-6, rtol=0)
        if k < last:
            torch.testing.assert_close(quantizer.transformer_input(canvas, k + 1), io[f"codes_in_cfg3_scale{k + 1}"])
    torch.testing.assert_close(canvas, io["summed_codes_cfg3"], atol=2e-6, rtol=0)
    torch.testing.assert_close(golden.vqvae.decode_latent(canvas), io["image_cfg3"], atol=_CLOSE, rtol=0)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.0), (0, 0.6), (0, 0.8), (1, 0.0), (2, 0.97), (900, 0.97)])
def test_filters_of_bits_are_the_official_ones(top_k: int, top_p: float) -> None:
    """There, 0 switches a filter off, and a top-k above 2 is 2."""
    for name in SETS:
        io = official(name).io
        probs = probs_from_logits(io["filter_logits"], 1.0, min(top_k, 2) or None, top_p or 1.0)
        torch.testing.assert_close(probs, io[f"filter_probs_k{top_k}_p{top_p}"], atol=1e-6, rtol=0)


# -- what is saved changes nothing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [1, 7, 36])
@torch.inference_mode()
def test_tiles_change_no_bit(tiny: Official, tile: int) -> None:
    for case in ("cfg3", "cfglist_layer0_-2"):
        whole, logits = decode(tiny.model(case), tiny.condition())
        tiled, others = decode(tiny.model(case, tile=tile), tiny.condition())
        assert torch.equal(whole.tokens, tiled.tokens)
        for one, other in zip(logits, others, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_keys_of_the_last_scale_are_not_kept_and_text_is_read_once(tiny: Official) -> None:
    model, condition = tiny.model(), tiny.condition()
    kept, calls = [], []
    hooks = [block.ca.mat_kv.register_forward_hook(lambda *_: calls.append(1)) for block in tiny.transformer.blocks]
    allocate = model.allocate
    model.allocate = lambda *given: kept.append(allocate(*given)) or kept[-1]  # type: ignore
    decode(model, condition)
    for hook in hooks:
        hook.remove()
    (state,) = kept
    assert state.cache.k.shape[3] == tiny.plan.ends[-2] and state.cache.k.dtype == tiny.transformer.dtype
    assert len(calls) == len(tiny.transformer.blocks), "once per layer and image"


@torch.inference_mode()
def test_unconditional_rows_are_dropped_where_no_later_scale_is_guided(tiny: Official) -> None:
    rows = []
    hook = tiny.transformer.blocks[0].register_forward_hook(lambda _, given, out: rows.append(len(out)))
    try:
        for case in ("cfglist", "cfg1", "cfglist_layer0_-2"):
            decode(tiny.model(case), tiny.condition())
        decode(tiny.model("cfg3"), tiny.condition(), schedule="economy")
    finally:
        hook.remove()
    assert rows == [4, 4, 4, 2, 2] + [2] * 5 + [4] * 5 + [4, 4, 4, 4, 2]


@torch.inference_mode()
def test_stages_are_lists_of_guidance(tiny: Official) -> None:
    """Factors 1, 0.5, 1.5 and 0 on a guidance of 3 are the official list 3, 2, 4, 1, 1."""
    stages = tuple(Stage(until, guidance=factor) for until, factor in ((1, 1), (2, 0.5), (3, 1.5), (None, 0)))
    model = tiny.model("cfg3")
    output, _ = decode(model, tiny.condition(), schedule=ScaleSchedule("list", stages))
    for k, bits in enumerate(split(model, output)):
        assert torch.equal(bits, tiny.io[f"bits_cfglist_scale{k}"].flatten(1).long())


@torch.inference_mode()
def test_an_image_is_the_same_alone(tiny: Official) -> None:
    """Prompts, negative prompts and lengths differ within the batch."""
    condition = tiny.condition("cfg3_negative")
    sampling = Sampling(temperature=1.0, top_p=0.97)
    together, _ = decode(tiny.model(), condition, sampling)
    for row in range(2):
        seeds = torch.tensor([row])
        alone = decode_scales(tiny.model(), condition.select_rows(slice(row, row + 1)), seeds, sampling=sampling)
        assert torch.equal(alone.tokens[0], together.tokens[row])
    assert not torch.equal(*together.tokens)


@torch.inference_mode()
def test_temperatures_by_scale(tiny: Official) -> None:
    scales = [3.0] * 5
    plan, depth = tiny.plan, tiny.config["depth"]

    def run(temperature: Any, sampling: Sampling) -> tuple[Any, list[Tensor]]:
        guidance = BitGuidance.make(scales, temperature, None, 5, depth)
        return decode(InfinityScaleModel(tiny.transformer, tiny.quantizer, plan, guidance), tiny.condition(), sampling)

    even, ones = run([0.5] * 5, Sampling()), run(0.5, Sampling(temperature=0.5))
    assert torch.equal(even[0].tokens, ones[0].tokens)
    mixed, plain = run([1.0, 0.5, 2.0, 1.0, 1.0], Sampling()), run(1.0, Sampling())
    torch.testing.assert_close(mixed[1][0], plain[1][0])
    torch.testing.assert_close(mixed[1][1], 2 * plain[1][1], msg="of the same bits")
    assert not torch.equal(mixed[0].tokens, plain[0].tokens)


def test_bad_guidance_is_named() -> None:
    for scale, temperature, layers, name in (
        ([3.0] * 4, 1.0, None, "guidance_scale"), ([3.0, "4"], 1.0, None, "guidance_scale"), (-1, 1.0, None, "guidance_scale"),
        ([-1.0, 1.0], 1.0, None, "guidance_scale"), (3.0, [1.0, 0.0], None, "temperature"), (3.0, [1.0], None, "temperature"),
        (3.0, 1.0, -2, "cfg_insertion_layer"), (3.0, 1.0, [], "cfg_insertion_layer"), (3.0, 1.0, [1], "cfg_insertion_layer"),
        (3.0, 1.0, [-4], "cfg_insertion_layer"), (3.0, 1.0, [0.0], "cfg_insertion_layer"),
    ):  # fmt: skip
        rejects(lambda scale=scale, t=temperature, layers=layers: BitGuidance.make(scale, t, layers, 2, 4), name)


@torch.inference_mode()
def test_several_scales_in_one_pass_are_one_after_another(tiny: Official) -> None:
    """As when one model continues from another; also with guidance between blocks."""
    condition, io = tiny.condition(), tiny.io
    both = condition.cat(tiny.transformer.null_condition(condition))
    inputs = [io[f"codes_in_cfg3_scale{k}"].repeat(2, 1, 1) for k in range(1, 5)]
    strength = torch.tensor([2.0, 2.0, 1.0, 0.0, 0.5])
    levels = tiny.plan.levels()

    def run(groups: list[list[int]]) -> Tensor:
        cache, found = tiny.transformer.new_cache(tiny.plan, 4, tiny.config["text_maxlen"]), []
        for group in groups:
            fed = [inputs[k - 1] for k in group if k]
            place = torch.isin(levels, torch.tensor(group))
            guidance = PassGuidance(strength[levels[place]], (tiny.config["depth"] - 2,))
            rows = torch.cat(fed, 1) if fed else None
            found.append(tiny.transformer(rows, None if group[0] else both, cache=cache, guidance=guidance).logits)
        return torch.cat(found, 1)

    expected = run([[0], [1], [2], [3], [4]])
    for groups in ([[0, 1, 2, 3, 4]], [[0], [1, 2], [3, 4]], [[0, 1, 2], [3], [4]]):
        torch.testing.assert_close(run(groups), expected, atol=2e-5, rtol=0)


@torch.inference_mode()
def test_a_model_catches_up_with_its_own_guidance(tiny: Official) -> None:
    """Scales that another model generated are fed together, also with guidance between blocks."""
    condition, io = tiny.condition(), tiny.io
    inputs: list[Tensor | None] = [None, *(io[f"codes_in_cfg3_scale{k}"] for k in range(1, 5))]
    for case in ("cfg3", "cfg3_layer-2", "cfglist_layer0_-2"):
        found = []
        for groups in ([1, 2, 3, 4, 5], [3, 4, 5], [4, 5]):
            model = tiny.model(case)
            state = model.allocate(condition, 2)
            model.reset(state, condition)
            found.append([model.forward(state, inputs[:end], 1.0) for end in groups][-1])
        for each in found[1:]:
            torch.testing.assert_close(each, found[0], atol=5e-5, rtol=0)


# -- sizes and misuse -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [("infinity-2b", 2_204_564_032), ("infinity-8b", 8_375_791_824)])
def test_official_sizes_have_the_published_number_of_parameters(name: str, count: int) -> None:
    with torch.device("meta"):
        model = InfinityTransformer(**SIZES[name])
    assert sum(each.numel() for each in model.parameters()) == count == parameter_count(**SIZES[name])


def test_bad_passes_are_named(tiny: Official) -> None:
    model, condition, io = tiny.transformer, tiny.condition(), tiny.io
    cache = model.new_cache(tiny.plan, 2, tiny.config["text_maxlen"])
    with pytest.raises(ValueError, match="whole scales, ending at 1, 5, 21, 57, 121 tokens, got 4"):
        model(io["teacher_input"][:, :3], condition, cache=cache)
    rejects(lambda: model(io["teacher_input"], cache=cache), "condition")
    rejects(lambda: InfinityTransformer(depth=1, dim=30, n_head=2), "n_head")
    rejects(lambda: InfinityTransformer(depth=1, dim=64, n_head=2, num_scales=14), "num_scales")
