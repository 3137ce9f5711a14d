"""Methods of a next-scale model side by side."""

from __future__ import annotations

import pytest
from tiny_models import text_var_pipeline

from vargen.decoding import PRESETS, ScaleSchedule, Stage
from vargen.evaluation.compare import compare_methods
from vargen.pipelines.var import VARPipeline

THERE_AND_BACK = ScaleSchedule("there and back", (Stage(until=1), Stage(until=3, model="draft"), Stage()))


@pytest.fixture(scope="module")
def pipe() -> VARPipeline:
    return text_var_pipeline()


def test_schedules_are_compared(pipe: VARPipeline) -> None:
    methods = {**{name: PRESETS[name] for name in ("plain", "code", "economy")}, "there and back": THERE_AND_BACK}
    result = compare_methods(pipe, ["a red apple", "a cat", "b"], methods, batch=2)
    assert result.baseline == "plain" and len(result.prompts) == 4 and set(result.tokens) == set(methods)
    by_name = {method.name: method for method in result.methods}
    assert [method.kind for method in result.methods] == ["exact", "relaxed", "relaxed", "relaxed"]
    plain = by_name["plain"]
    assert (plain.speedup, plain.num_identical_images, plain.tokens_per_pass) == (1.0, 4, 7.5)
    assert by_name["code"].num_identical_images < 4
    assert by_name["there and back"].passes_per_batch == 4
    for method in result.methods:
        assert method.share_by_part["target"] > 0
    with pytest.raises(ValueError, match="methods must include 'plain'"):
        compare_methods(pipe, ["a"], {"code": PRESETS["code"]})  # type: ignore[dict-item]
