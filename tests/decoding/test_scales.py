"""The next-scale loop: exact where it says so, by enumeration; the same picture for the same seed, alone or in a batch."""

from collections.abc import Sequence

import pytest
import torch
from rejects import rejects
from torch import Tensor

from vargen.decoding import Noise, Progress, Purpose, Sampling, ScaleSchedule, Stage, decode_scales
from vargen.decoding.sampling import to_probs
from vargen.verify.tables import ScaleTable


def tables(**changed) -> ScaleTable:
    """A model of three scales, and a smaller one of the same tokens."""
    model = ScaleTable(**{"seed": 4, **changed})
    model.draft_model = ScaleTable(**{**changed, "seed": 77})
    return model


def generated(model: ScaleTable, schedule: str | ScaleSchedule = "plain", images: int = 64, **options):
    zeros = torch.zeros(images, dtype=torch.int64)
    return decode_scales(model, zeros, torch.arange(images) + 5, schedule, **options)


def test_a_pass_generates_a_scale() -> None:
    model = tables(scale_tokens=(1, 1, 1, 2, 2))
    assert generated(model).stats.passes == 5 and generated(model).stats.passes_by_width == {1: 3, 2: 2}


@pytest.mark.parametrize("handover", [1, 2, 3])
def test_code_is_the_two_models_run_by_hand(handover: int) -> None:
    model = tables(scale_tokens=(1, 2, 2, 3))
    small = model.draft_model
    assert small is not None
    result = generated(model, ScaleSchedule("code", (Stage(until=handover), Stage(model="draft"))))
    canvas, seeds, zeros, start = model.canvas(64), torch.arange(64) + 5, torch.zeros(64, dtype=torch.int64), 0
    for scale, n in enumerate(model.scale_tokens):
        logits = (model if scale < handover else small).logits(zeros, canvas[:, :start], scale)
        position = torch.arange(start, start + n).expand(64, -1)
        canvas, _ = model.add(canvas, Noise(seeds, position).sample(to_probs(logits, Sampling()), Purpose.TOKEN), scale)
        start += n
    assert torch.equal(result.tokens, canvas)
    assert model.passes == [(k, k) for k in range(handover)], "the large model never sees the late scales"
    assert small.passes == [(0, handover), *((k, k) for k in range(handover + 1, 4))], "the prefix is one pass"


def test_several_hand_overs_feed_only_what_is_missing() -> None:
    model = tables(scale_tokens=(1, 1, 2, 2))
    generated(model, ScaleSchedule("there and back", (Stage(until=1), Stage(until=3, model="draft"), Stage())))
    assert model.passes == [(0, 0), (1, 3)] and model.draft_model.passes == [(0, 1), (2, 2)]


def test_given_scales_stand_and_cost_no_pass() -> None:
    model = tables()
    given = [torch.tensor([[2]]).expand(64, -1).contiguous(), torch.tensor([[0, 1]]).expand(64, -1).contiguous()]
    result = generated(model, fixed_scales=given)
    assert torch.equal(result.tokens[:, :3], torch.cat(given, 1)) and model.passes == [(0, 2)]
    assert result.stats.passes == 1 and result.stats.by_scale[0]["model"] == "given"
    third = model.logits(torch.zeros(64, dtype=torch.int64), torch.cat(given, 1), 2)
    expected = Noise(torch.arange(64) + 5, torch.arange(3, 5).expand(64, -1)).sample(third.softmax(-1), Purpose.TOKEN)
    assert torch.equal(result.tokens[:, 3:], expected)
    everything = [*given, torch.zeros(64, 2, dtype=torch.int64)]
    assert generated(model, fixed_scales=everything).stats.passes == 0


def test_kept_tokens_stand_and_the_rest_follows_them() -> None:
    """Drawing a part anew is drawing from the model whose other tokens are certain."""
    model, certain = tables(), tables()
    certain.tables[1][:, :, 0] = torch.tensor([-1e4, -1e4, 0.0])
    certain.draft_model = None

    def keep(canvas: Tensor, scale: int) -> tuple[Tensor, Tensor]:
        tokens = torch.full((len(canvas), model.scale_tokens[scale]), 2)
        stands = torch.zeros_like(tokens, dtype=torch.bool)
        stands[:, 0] = scale == 1
        return tokens, stands

    N = 60_000
    result = decode_scales(model, torch.zeros(N, dtype=torch.int64), torch.arange(N), "plain", fixed_tokens=keep)
    assert (result.tokens[:, 1] == 2).all()
    index = (result.tokens * 3 ** torch.arange(4, -1, -1)).sum(1)
    truth = certain.joint(0, lambda logits: to_probs(logits, Sampling()))
    error = (truth * (1 - truth) / N).sqrt().sum() * 0.4
    assert (torch.bincount(index, minlength=243) / N - truth).abs().sum() / 2 < 1.5 * error


def test_a_callback_sees_every_pass_and_may_change_the_newest_scale() -> None:
    model, seen = tables(), []

    def change(progress: Progress) -> None:
        seen.append((progress.step, int(progress.length[0]), int(progress.num_committed[0])))
        if progress.step == 1:
            progress.tokens[:, 0] = 1

    result = generated(model, callback=change)
    assert seen == [(1, 1, 1), (2, 3, 2), (3, 5, 2)]
    given = [torch.ones(64, 1, dtype=torch.int64)]
    assert torch.equal(result.tokens, generated(model, fixed_scales=given).tokens)
    stopped = generated(model, callback=lambda progress: progress.step < 2)
    assert not stopped.finished and stopped.stats.stopped and (stopped.length == 3).all()


def test_statistics_say_what_each_scale_took() -> None:
    result = generated(tables(), "code")
    stats, scales = result.stats, result.stats.by_scale
    assert [scale["tokens"] for scale in scales] == [1, 2, 2] and stats.tokens == 64 * 5
    assert [scale["model"] for scale in scales] == ["target", "target", "draft"]
    assert [scale["passes"] for scale in scales] == [1, 1, 1] and scales[0]["seconds"] > 0
    assert stats.to_dict()["draft_passes_by_width"] == {"5": 1} and stats.relaxation == [0.0] * 64
    both = type(stats).merge([stats, stats])
    assert both.by_scale[0]["passes"] == 2 and both.by_scale[0]["tokens"] == 1


@pytest.mark.parametrize(
    ("fraction", "scales", "end"), [(0.8, 10, 8), (0.8, 6, 5), (0.8, 4, 3), (0.8, 2, 1), (0.01, 10, 1), (0.99, 10, 9)]
)
def test_a_stage_may_end_at_a_fraction_of_the_scales(fraction: float, scales: int, end: int) -> None:
    stages = ScaleSchedule("part", (Stage(until=fraction), Stage(model="draft"))).assign_stages(scales)
    assert [stage.model for stage in stages] == ["target"] * end + ["draft"] * (scales - end)


BAD: Sequence[tuple[ScaleSchedule, str]] = (
    (ScaleSchedule("far", (Stage(until=4), Stage())), r"until of stage 1 of 'far' must be from 1 to 3.* got 4"),
    (
        ScaleSchedule("back", (Stage(until=2), Stage(until=1), Stage())),
        r"until of stage 2 of 'back' must be from 3 to 3.* got 1",
    ),
    (ScaleSchedule("before", (Stage(until=-3), Stage())), r"until of stage 1 of 'before' must be .* got -3"),
    (ScaleSchedule("short", (Stage(until=2),)), r"the stages of 'short' end at scale 2 of 3: the last needs until=None"),
    (ScaleSchedule("behind", (Stage(), Stage())), "stage 2 of 'behind' has no scale left"),
)


@pytest.mark.parametrize(("schedule", "message"), BAD, ids=lambda value: getattr(value, "name", ""))
def test_schedules_that_do_not_fit_are_refused_before_any_pass(schedule: ScaleSchedule, message: str) -> None:
    model = tables()
    with pytest.raises(ValueError, match=message):
        generated(model, schedule)
    assert not model.passes


def test_what_a_model_lacks_is_said() -> None:
    model = tables()
    model.draft_model = None
    rejects(lambda: generated(model, "code"), "code")
    model.draft_model = ScaleTable(scale_tokens=(1, 2, 3))
    with pytest.raises(ValueError, match="the draft model must be of the same image tokenizer: its scale_tokens"):
        generated(model, "code")
    with pytest.raises(ValueError, match="'ar' is for next-token models, and this is a next-scale one"):
        generated(model, "ar")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fixed_scales": [torch.zeros(64, 2, dtype=torch.int64)]}, ValueError, "fixed_scales"),
        ({"fixed_scales": [torch.full((64, 1), 3)]}, ValueError, "fixed_scales"),
        ({"sampling": Sampling(top_k=4)}, ValueError, "top_k"),
        ({"callback": 3}, TypeError, "callback"),
        ({"schedule": ScaleSchedule}, TypeError, "must be a preset's name"),
    ],
)
def test_calls_are_checked(options: dict, error: type, message: str) -> None:
    rejects(lambda: generated(tables(), **options), message, error)
    rejects(lambda: ScaleSchedule(stages=(3,)), "stages", TypeError)
