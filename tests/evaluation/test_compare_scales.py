"""Methods of a next-scale model side by side, and what their passes cost."""

from __future__ import annotations

import pytest
import torch
from tiny_models import text_var_pipeline

from vargen.decoding import PRESETS, ScaleSchedule, Stage
from vargen.evaluation.compare import compare_methods
from vargen.evaluation.decoders import ScalePricedDecoder, open_decoder
from vargen.pipelines.var import VARPipeline

THERE_AND_BACK = ScaleSchedule("there and back", (Stage(until=1), Stage(until=3, model="draft"), Stage()))


@pytest.fixture(scope="module")
def pipe() -> VARPipeline:
    return text_var_pipeline()


def test_schedules_are_compared(pipe: VARPipeline) -> None:
    methods = {**{name: PRESETS[name] for name in ("plain", "code", "economy")}, "there and back": THERE_AND_BACK}
    result = compare_methods(pipe, ["a red apple", "a cat", "b"], methods, batch=2)
    assert result.baseline == "plain" and len(result.prompts) == 4 and set(result.tokens) == set(methods)
    assert {1, 4, 9, 16} <= set(result.cost_curve)
    by_name = {method.name: method for method in result.methods}
    assert [method.kind for method in result.methods] == ["exact", "relaxed", "relaxed", "relaxed"]
    plain = by_name["plain"]
    assert (plain.speedup, plain.predicted_speedup, plain.num_identical_images, plain.tokens_per_pass) == (1.0, 1.0, 4, 7.5)
    assert by_name["code"].num_identical_images < 4
    assert by_name["there and back"].passes_per_batch == 4
    for method in result.methods:
        assert method.efficiency == pytest.approx(method.speedup / method.predicted_speedup) and method.step_cost > 0
        assert method.predicted_speedup > 0  # of measured passes: a tiny model's may cost the same at any width
        assert method.share_by_part["target"] > 0
    with pytest.raises(ValueError, match="methods must include 'plain'"):
        compare_methods(pipe, ["a"], {"code": PRESETS["code"]})  # type: ignore[dict-item]


def test_passes_are_priced_by_model_and_guidance(pipe: VARPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up price of each: those of the small model and those without guidance are not the large one's."""
    decoder = open_decoder(pipe)
    assert isinstance(decoder, ScalePricedDecoder)
    priced: list[tuple[str, int, int, bool]] = []

    def price(self: ScalePricedDecoder, place: tuple[str, int, int, bool], *_: object, **__: object) -> float:
        priced.append(place)
        return {"target": 10.0, "draft": 1.0}[place[0]] / (1 if place[3] else 2)

    monkeypatch.setattr(ScalePricedDecoder, "_seconds", price)
    condition, _ = pipe.encode_condition(["a"])
    curve = decoder.measure_pass_seconds(condition, 1, [4, 9, 16])
    assert list(curve) == [1, 4, 9, 16], "the narrowest belongs to it"
    spent = {}
    for name in ("plain", "code", "economy"):
        run = decoder.decode(condition, torch.arange(1), name).stats
        spent[name] = decoder.estimate_seconds(PRESETS[name], [run, run], curve, condition, 1)
    assert spent["plain"] == (80.0, 8) and spent["economy"] == (70.0, 8)
    assert spent["code"] == (62.0, 8), "three passes of the large model and one of the small one, which holds all scales"
    assert ("draft", 0, 3, True) in priced
