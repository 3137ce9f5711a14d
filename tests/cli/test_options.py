"""The sampling options come from one place."""

import inspect

from vargen.decoding import Sampling
from vargen.demo.request import RANGES
from vargen.options import OPTIONS
from vargen.pipelines.llamagen import LlamaGenPipeline


def test_the_pipeline_and_the_page_take_the_same_ones() -> None:
    assert set(OPTIONS) <= set(inspect.signature(LlamaGenPipeline.__call__).parameters)
    assert {"guidance_scale", *Sampling.__dataclass_fields__} == set(OPTIONS)
    for name, option in OPTIONS.items():
        assert RANGES[name] == (*option.slider[:2], option.range.is_integer, option.label)
