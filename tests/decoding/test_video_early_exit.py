"""Early exit: the draft is the target's own estimate, a rejected one goes on from it, and no small model is needed."""

import math
from dataclasses import replace

import pytest
import torch
from tiny_video import LEVELS, Placed, condition, models, stream, transformer, video

from vargen.decoding import PRESETS, Stride, Threshold, VideoMethod
from vargen.decoding.video.denoising import add_noise, make_block_noise
from vargen.models.causal_video.decoding import CausalVideoBlockModel
from vargen.training.routing_tree import build_routing_tree

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
