"""The sampling options come from one place."""

import inspect

import pytest
from typer.main import get_command

from vargen.cli.main import app
from vargen.decoding import Sampling
from vargen.demo.request import RANGES
from vargen.options import OPTIONS
from vargen.pipelines.llamagen import LlamaGenPipeline


@pytest.mark.parametrize("verb", ["generate", "compare"])
def test_verbs_offer_every_option_with_its_help(verb: str) -> None:
    offered = {parameter.name: parameter for parameter in get_command(app).commands[verb].params}
    for name, option in OPTIONS.items():
        assert option.help in offered[name].help and offered[name].default is None


def test_the_pipeline_and_the_page_take_the_same_ones() -> None:
    assert set(OPTIONS) <= set(inspect.signature(LlamaGenPipeline.__call__).parameters)
    assert {"guidance_scale", *Sampling.__dataclass_fields__} == set(OPTIONS)
    for name, option in OPTIONS.items():
        assert RANGES[name] == (*option.slider[:2], option.range.is_integer, option.label)
