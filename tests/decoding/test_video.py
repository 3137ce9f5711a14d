"""The video loop: whoever draws a block, both models see the result, and the noise of later blocks is the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from rejects import rejects
from tiny_video import LEVELS, Placed, condition, models, preview, stream, transformer, vae, video

from vargen.decoding import (
    PRESETS,
    BlockModel,
    BlockRecord,
    LearnedRouting,
    NonFiniteLatentsError,
    Stride,
    Threshold,
    VideoMethod,
)
from vargen.decoding.noise import Purpose
from vargen.decoding.video.denoising import (
    BlockGenerator,
    add_noise,
    make_block_noise,
    predict_clean,
    shift_level,
    shifted_levels,
)
from vargen.decoding.video.policies import Policy
from vargen.eval.video import DRAFTS
from vargen.kernels.noise_bits import sample_normal
from vargen.models.causal_video.decoding import CausalVideoBlockModel
from vargen.models.guidance import Guidance
from vargen.training.router import build_routing_tree

FREE = VideoMethod(policy=Threshold(), target_blocks=())


def routed(makers: str, **changes) -> VideoMethod:
    """`"td"`: target, draft."""
    return VideoMethod(policy=Placed(makers), target_blocks=(), **changes)


def closely(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=2e-5, rtol=1e-4)


def noise_of(model: BlockModel, number: int):
    return lambda step: make_block_noise(7, number, step, model.block_shape, model.device)


# -- noise


def test_noise_depends_on_seed_block_and_step_alone() -> None:
    seeds, sample = torch.tensor([1, 2]), partial(sample_normal, purpose=Purpose.LATENT)
    generated = sample(seeds, 3, 1001, step=2)
    assert torch.equal(generated[1:], sample(seeds[1:], 3, 1001, step=2)) and generated.shape == (2, 1001)
    others = [sample(seeds, 3, 1001, step=1), sample(seeds, 2, 1001, step=2), sample(seeds + 5, 3, 1001, step=2)]
    assert all(abs(float((generated * other).mean())) < 0.1 for other in others)
    many = sample(torch.tensor([5]), 0, 200_000)
    assert abs(float(many.mean())) < 0.01 and abs(float(many.std()) - 1) < 0.01
    assert abs(float((many**4).mean()) - 3) < 0.1 and float(many.abs().max()) < 6.7


# -- the two ends


def test_an_infinite_threshold_is_one_of_the_models_bit_for_bit() -> None:
    for tau, end in ((-math.inf, DRAFTS), (math.inf, "target")):
        made, alone = stream(FREE.with_tau(tau)), stream(end)
        for a, b in zip(video(made), video(alone), strict=True):
            assert torch.equal(a, b)
        assert made.stats.sources == alone.stats.sources
    assert not torch.equal(video(stream(DRAFTS))[0], video(stream("target"))[0])


def test_switching_drafting_off_and_on_does_not_change_what_the_target_samples() -> None:
    made = stream(replace(FREE, target_blocks=(2, 3, 4, 6)).with_tau(math.inf), 9)
    assert torch.equal(video(made)[0], video(stream("target", 9))[0])
    assert [row.outcome[0] for row in made.stats.blocks] == list("rrfffrfrr")


# -- caches


def after(makers: str, window: int | None, sinks: int, **changes):
    model = models(window, sinks)
    made = stream(routed(makers, **changes), len(makers) + 2, model)
    blocks = [next(made) for _ in makers]
    return model, made, [block.latents[None] for block in blocks]


def keys(generator: BlockGenerator, frames: int) -> torch.Tensor:
    cache = generator.state.cache
    assert cache.frames == frames
    held = min(frames, cache.slots) * cache.geometry.frame_tokens
    return torch.cat([cache.keys[..., :held, :], cache.values[..., :held, :]])


@pytest.mark.parametrize("makers", ["".join(each) for each in product("td", repeat=3)] + ["dtdtdd", "tdttdt"])
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (6, 2)])
@torch.no_grad()
def test_both_caches_are_those_of_a_fresh_prefill(makers: str, window: int | None, sinks: int) -> None:
    model, made, latents = after(makers, window, sinks)
    for generator, network in zip(made.generators.values(), (model, model.draft_model), strict=True):
        generator.update_cache()
        fresh = network.start(condition(), 2 * len(makers) + 2)
        for block in latents:
            network.forward(fresh, [block])
        prefill = BlockGenerator(network, condition(), 2 * len(makers) + 2)
        prefill.state = fresh
        assert closely(keys(generator, 2 * len(makers)), keys(prefill, 2 * len(makers)))


def test_a_rolling_cache_with_sinks_is_one_that_is_rebuilt() -> None:
    """What each block sees of earlier ones, made from their latents alone, is what the ring holds."""
    window, sinks, model = 6, 2, models(6, 2)
    made = stream(VideoMethod(), 7, model)
    blocks = [block.latents[None] for block in made]
    for number in range(1, len(blocks)):
        state = model.start(condition(), 100)
        for block in blocks[:number]:
            model.forward(state, [block])
        generator = BlockGenerator(model, condition(), 100)
        generator.state = state
        with torch.no_grad():
            again = generator.generate(noise_of(model, number))
        assert closely(again, blocks[number])
    whole = models()
    assert not closely(video(stream(VideoMethod(), 7, whole))[0], torch.cat(blocks, 1)[0]), "the window matters"
    assert made.blocks * 2 > window > sinks


# -- decoding


@pytest.mark.parametrize("cheap", [False, True])
def test_frames_are_those_of_the_video_decoded_at_once(cheap: bool) -> None:
    made = stream(FREE.with_tau(0.3), 6, preview=preview() if cheap else None)
    latents, frames = video(made)
    assert {row.outcome for row in made.stats.blocks} == {"accepted", "rejected"}, "the test must see both"
    assert closely(frames, (vae().decode(latents[None])[0] / 2 + 0.5).clamp(0, 1))


def test_a_scorer_sees_the_frame_before_the_block() -> None:
    seen = []

    def score(view):
        seen.append(view)
        return view.frames.mean((1, 2, 3))

    _, frames = video(stream(FREE.with_tau(0.3), 4, score=score))
    assert [view.number for view in seen] == [0, 1, 2, 3] and seen[0].previous is None
    for view in seen[1:]:
        assert torch.equal(view.previous, frames[2 * view.number - 1]) and view.latents.shape == (2, 4, 2, 2)


# -- policies


def test_forced_blocks_are_the_targets() -> None:
    made = stream(replace(FREE, target_blocks=(0, 3)).with_tau(-math.inf), 8)
    video(made)
    assert "".join(maker[0] for maker in made.stats.sources) == "tddtdddd"
    assert made.stats.acceptance == 1 and made.stats.blocks[0].score is None


def test_baselines_place_the_target_without_looking() -> None:
    made = stream(VideoMethod(policy=Stride(3), target_blocks=()), 7, score=None)
    video(made)
    assert "".join(maker[0] for maker in made.stats.sources) == "tddtddt"


def test_each_block_is_routed_by_its_own_score() -> None:
    """Not by that of the block before or after it, whether a scorer or a router gives it."""
    scores = torch.rand(12, generator=torch.Generator().manual_seed(3)).tolist()
    expected = ["forced", *("accepted" if score >= 0.5 else "rejected" for score in scores[1:])]
    assert len(set(pairwise(expected[1:]))) == 4, "each outcome follows each"
    made = stream(VideoMethod(policy=Threshold(0.5)), 12, score=lambda view: torch.full((2,), scores[view.number]))
    video(made)
    assert [row.outcome for row in made.stats.blocks] == expected
    made = stream(VideoMethod(policy=LearnedRouting(0.5)), 12, score=None, router=lambda view: 1 - scores[view.number])
    video(made)
    assert [row.outcome for row in made.stats.blocks] == expected


@dataclass(frozen=True)
class OneAfterAnother(Policy):
    """Drafts a block if the one before it was not, and accepts a draft if no other was accepted."""

    def should_draft(self, record: BlockRecord, finished: Sequence[BlockRecord]) -> bool:
        return not finished or finished[-1].outcome == "undrafted"

    def should_accept(self, record: BlockRecord, finished: Sequence[BlockRecord]) -> bool:
        return "accepted" not in [each.outcome for each in finished]


def test_a_policy_of_ones_own_decides_from_the_records_of_earlier_blocks() -> None:
    made = stream(VideoMethod(policy=OneAfterAnother(), target_blocks=()), 5, score=None)
    video(made)
    assert [row.outcome for row in made.stats.blocks] == ["accepted", "undrafted", "rejected", "undrafted", "rejected"]


def test_the_threshold_moves_while_the_video_is_made() -> None:
    made = stream(FREE.with_tau(-math.inf), 4)
    first = [next(made).record.outcome for _ in range(2)]
    made.tau = math.inf
    assert first == ["accepted"] * 2 and [block.record.outcome for block in made] == ["rejected"] * 2
    with pytest.raises(ValueError, match="nan"):
        made.tau = math.nan
    with pytest.raises(ValueError, match="tau cannot be set"):
        stream("stride", 3).tau = 0.0


# -- prompts, given frames


def test_a_prompt_can_be_switched_between_blocks() -> None:
    for lazy in (False, True):
        made = stream(routed("ttdtdt", lazy=lazy), 6, score=None)
        before = [next(made) for _ in range(3)]
        made.change_prompt(condition(1))
        rest = torch.cat([block.latents for block in made])
        same = video(stream(routed("ttdtdt", lazy=lazy), 6, score=None))[0]
        assert torch.equal(torch.cat([block.latents for block in before]), same[:6]) and not closely(rest, same[6:])
        if not lazy:
            first = rest
    assert closely(first, rest), "what waits is seen under the prompt that it was made under"
    rejects(lambda: stream(FREE, 3).change_prompt(condition(1)), "score")


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_a_video_goes_on_from_given_latents(frames: int) -> None:
    first = torch.randn(1, frames, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    parts = [part for part in first.split(2, 1)]
    made = stream(routed("tdt"), 3, given=parts, score=None)
    latents, out = video(made)
    assert torch.equal(latents[:frames], first[0]) and len(latents) == frames + 6
    assert closely(out, (vae().decode(latents[None])[0] / 2 + 0.5).clamp(0, 1))
    assert not closely(latents[frames:], video(stream(routed("tdt"), 3, score=None))[0])


# -- what goes wrong


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda view: torch.tensor([0.3, math.nan]), "nan"),
        (lambda view: torch.tensor([]), "not finite numbers"),
        (lambda view: 1 / 0, "ZeroDivisionError"),
        (lambda view: "good", "TypeError"),
    ],
)
def test_a_scorer_that_fails_leaves_the_block_to_the_target_and_is_reported(answer, said: str) -> None:
    made = stream(FREE.with_tau(-math.inf), 3, score=lambda view: answer(view) if view.number == 1 else torch.ones(2))
    video(made)
    assert made.stats.sources == ("draft", "target", "draft")
    (failure,) = made.stats.failures
    assert failure.startswith("block 1: ") and said in failure and made.stats.blocks[1].score is None


class Broken(CausalVideoBlockModel):
    def forward(self, state, clean, noisy=None, level=0.0):
        found = super().forward(state, clean, noisy, level)
        return found if found is None or state.cache.frames < 2 else found * math.nan


def test_latents_that_are_not_finite_are_an_error_and_a_draft_of_them_is_refused() -> None:
    good = models()
    rejects(lambda: video(stream("target", 3, Broken(transformer(0), LEVELS))), "target", NonFiniteLatentsError)
    small = Broken(transformer(1, dim=12, num_heads=1, num_layers=1), LEVELS)
    pair = CausalVideoBlockModel(good.transformer, LEVELS, draft_model=small)
    routed_around = stream(FREE.with_tau(-math.inf), 3, pair)
    video(routed_around)
    assert routed_around.stats.sources == ("draft", "target", "target") and len(routed_around.stats.failures) == 2
    with pytest.raises(NonFiniteLatentsError, match=r"drafter .* block 1 of 3"):
        video(stream(DRAFTS, 3, pair))


def test_a_run_is_cancelled_between_steps() -> None:
    steps = []

    def callback(progress):
        steps.append(progress)
        return progress.passes < 7

    made = stream("target", 5, callback=callback)
    assert len(list(made)) == 1 and made.stats.stopped and not made.generators
    assert [step.passes for step in steps] == list(range(1, 8)) and steps[-1].block == 1
    made = stream("target", 5)
    next(made)
    made.cancel()
    assert list(made) == [] and made.stats.stopped and len(made.stats.blocks) == 1

    def raises(progress):
        raise KeyError("mine")

    made = stream("stride", 5, callback=lambda progress: progress.block < 3)
    assert len([next(made) for _ in range(3)]) == 3
    made.change_prompt(condition(1), made.score)  # its passes, after block 2, stop the run
    assert list(made) == [] and made.stats.stopped

    made = stream("target", 5, callback=raises)
    rejects(lambda: next(made), "mine", KeyError)
    assert not made.generators and list(made) == []


@pytest.mark.parametrize("method", [PRESETS["sdvg"], DRAFTS, PRESETS["target"]], ids=lambda method: method.name)
def test_memory_stays_flat_over_many_blocks(method: VideoMethod) -> None:
    made = stream(method.with_tau(-math.inf) if method.threshold else method, 80, models(6, 2))
    sizes = []
    for _ in made:
        generators = made.generators.values()
        waiting = sum(part.numel() for each in generators for part in each.pending)
        decoder = sum(part.nbytes for part in made._decoder.state.parts if isinstance(part, torch.Tensor))
        sizes.append((sum(each.state.cache.nbytes for each in generators), waiting, decoder))
    held = [size[0] for size in sizes]
    assert len(sizes) == 80 and len(set(held)) == 1
    assert max(size[1] for size in sizes[50:]) == max(size[1] for size in sizes[25:50])
    assert len({size[2] for size in sizes}) == 1


def test_guidance_runs_a_second_row_and_a_velocity_can_be_followed() -> None:
    plain = video(stream("target", 2))[0]
    null = condition(3)
    guided = CausalVideoBlockModel(transformer(0), LEVELS, guidance=Guidance(2.0, negative=null))
    assert not closely(video(stream("target", 2, guided))[0], plain)
    same = CausalVideoBlockModel(transformer(0), LEVELS, guidance=Guidance(2.0, negative=condition()))
    assert closely(video(stream("target", 2, same))[0], plain), "guidance away from the prompt itself changes nothing"
    followed = CausalVideoBlockModel(transformer(0), LEVELS, resamples_noise=False)
    shape = followed.block_shape
    x = make_block_noise(7, 0, 0, shape, torch.device("cpu"))
    state = followed.start(condition(), 4)
    with torch.no_grad():
        for level, following in zip(LEVELS, [*LEVELS[1:], 0.0], strict=True):
            v = (x - followed.forward(state, [], x, level)) / level
            x = x + (following - level) * v
    assert closely(video(stream("target", 1, followed))[0][None], x)


def test_a_caller_may_report_another_seed_than_that_of_the_noise() -> None:
    """A pipeline reports the seed of the caller's generator."""
    made = stream("target", 2)
    made.stats.seed = 123
    assert torch.equal(video(made)[0], video(stream("target", 2))[0]) and made.stats.blocks[0].seed == 123


# -- one network with several tables of steps


def ladder(
    window: int | None = None, sinks: int = 0, guided: bool = False, draft: dict[str, Any] | None = None
) -> CausalVideoBlockModel:
    """One network with two tables of steps."""
    options = {"window": window, "sinks": sinks}
    if guided:
        options["guidance"] = Guidance(2.0, negative=condition(3))
    small = CausalVideoBlockModel(transformer(0), shifted_levels((1000, 500)), **{**options, **(draft or {})})
    return CausalVideoBlockModel(transformer(0), LEVELS, draft_model=small, **options)


@pytest.mark.parametrize("guided", [False, True])
def test_a_ladder_keeps_one_cache_with_the_bits_of_two(guided: bool) -> None:
    method = replace(FREE, lazy=False).with_tau(0.4)
    both = []
    for shared in (True, False):
        model = ladder(6, 2, guided=guided)
        model.shares_cache = model.shares_cache and shared
        made = stream(method, 6, model)
        blocks = [next(made) for _ in range(5)]
        assert (made.generators["draft"].state is made.generators["target"].state) == shared
        both.append((torch.cat([block.latents for block in [*blocks, *made]]), made.stats))
    (one, few), (two, many) = both
    assert torch.equal(one, two) and few.sources == many.sources and set(few.sources) == {"draft", "target"}
    fed = [sum(stats.passes.values()) for stats in (few, many)]
    assert fed[1] - fed[0] == 5, "each block but the last is fed once instead of twice"


def test_only_equal_caches_are_shared() -> None:
    assert ladder().shares_cache and ladder(6, 2, guided=True).shares_cache
    assert not models().shares_cache and not CausalVideoBlockModel(transformer(0), LEVELS).shares_cache
    for draft in (
        {"window": 8},
        {"sinks": 1},
        {"motion": 1},
        {"guidance": 1.0},
        {"guidance": Guidance(2.0, negative=condition(4))},
    ):
        assert not ladder(6, 2, guided=True, draft=draft).shares_cache, draft


# -- noise levels ------------------------------------------------------------------------------------------------------


def test_the_warped_table_is_that_of_the_distilled_models():
    assert [1000 * level for level in shifted_levels()] == pytest.approx([1000, 937.5, 833.3333, 625])
    assert shifted_levels((1000, 757, 522), shift=8) == pytest.approx((1, 6.056 / 6.299, 4.176 / 4.654))
    assert shift_level(0) == 0 and shift_level(1) == 1 and shift_level(0.3, 1) == pytest.approx(0.3)


def test_the_velocity_leads_back_to_the_clean_latents_from_every_level():
    clean, noise = torch.randn(2, 1, 3, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    for level in shifted_levels():
        assert torch.allclose(predict_clean(add_noise(clean, noise, level), noise - clean, level), clean, atol=1e-6)
    assert torch.equal(add_noise(clean, noise, 0.0), clean) and torch.equal(add_noise(clean, noise, 1.0), noise)
    half = clean.bfloat16()
    assert predict_clean(half, half, 0.5).dtype == torch.bfloat16


# -- early exit ------------------------------------------------------------------------------------------------------------


ALWAYS = VideoMethod(policy=Stride(1_000_000), exit_step=2)


def without_a_small_model() -> CausalVideoBlockModel:
    return CausalVideoBlockModel(transformer(0), LEVELS)


def test_a_rejected_estimate_is_finished_to_the_targets_block() -> None:
    method = VideoMethod(policy=Threshold(math.inf), exit_step=1)
    made, plain = stream(method, 4, without_a_small_model()), stream("target", 4)
    assert torch.equal(video(made)[0], video(plain)[0])
    assert {record.outcome for record in made.stats.blocks[1:]} == {"rejected"}
    assert made.stats.passes == plain.stats.passes


def test_an_accepted_estimate_is_the_targets_after_some_steps() -> None:
    made = stream(ALWAYS, 2, without_a_small_model())
    block = list(made)[1]
    assert block.record.source == "draft" and made.stats.blocks[1].passes == {"target": 3}  # a clean block, then two steps
    model = models()
    state = model.start(condition(), 4)
    first = video(stream("target", 1))[0][None]
    model.forward(state, [first])

    def noise(step: int) -> torch.Tensor:
        return make_block_noise(7, 1, step, model.block_shape, model.device)

    x = add_noise(model.forward(state, [], noise(0), LEVELS[0]), noise(1), LEVELS[1])
    torch.testing.assert_close(block.latents[None], model.forward(state, [], x, LEVELS[1]), atol=1e-5, rtol=1e-4)


def test_exits_need_fewer_passes_and_no_small_model() -> None:
    passes = []
    for exit_step in (1, 2, 3, 0):
        method = replace(ALWAYS, exit_step=exit_step) if exit_step else PRESETS["target"]
        made = stream(method, 4, without_a_small_model())
        video(made)
        passes.append(made.stats.passes["target"])
    assert passes == sorted(passes) and len(set(passes)) == 4
    assert ALWAYS.kind == "relaxed" and not ALWAYS.needs_draft_model
    made = stream("early-exit", 5, without_a_small_model())
    video(made)
    assert "".join(source[0] for source in made.stats.sources) == "tdddd"
    placed = replace(PRESETS["early-exit"], policy=Placed("tdddd"), target_blocks=())
    assert torch.equal(video(stream(placed, 5))[0], video(stream("early-exit", 5))[0])


@pytest.mark.parametrize("exit_step", [None, 1])
def test_a_tree_contains_every_routed_video(exit_step: int | None) -> None:
    model = models()
    tree = build_routing_tree(model, condition(), 7, 4, exit_step)
    assert [len(block.target) for block in tree] == [1, 1, 2, 4]
    for choices in ((0, 1, 0, 1), (0, 0, 1, 1), (0, 1, 1, 0)):
        made = stream(
            VideoMethod(policy=Placed("".join("td"[choice] for choice in choices)), exit_step=exit_step or 0), 4, model
        )
        latents, row, past = video(made)[0].unflatten(0, (4, -1)), 0, None
        for number, (block, choice) in enumerate(zip(tree, choices, strict=True)):
            assert past is None or torch.equal(block.previous[row], past)
            past = (block.draft if choice else block.target)[row]
            torch.testing.assert_close(past, latents[number], atol=1e-4, rtol=1e-3)
            row = 2 * row + choice if number else 0
