"""The sampling options come from one place, and old names of options and commands still work."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from vargen.cli import bench_distribution, compare, evaluate, generate, score, verify
from vargen.cli.console import accept_old_names
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
        assert RANGES[name] == (*option.slider[:2], option.is_integer, option.label)


COMMANDS = {
    bench_distribution.distribution: bench_distribution.RENAMED,
    compare.compare: compare.RENAMED,
    evaluate.evaluate: evaluate.RENAMED,
    generate.generate: generate.RENAMED,
    score.score: score.RENAMED,
    verify.verify: verify.RENAMED,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_old_names_of_options_mean_new_ones(command: Any) -> None:
    options, renamed = inspect.signature(command).parameters, COMMANDS[command]
    assert {new.replace("-", "_") for new in renamed.values()} <= set(options)
    assert not {old.replace("-", "_") for old in renamed} & set(options)


def test_an_old_name_gives_one_warning(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    normalize = accept_old_names({"num": "num-images"})["token_normalize_func"]
    assert [normalize(name) for name in ("num", "seed")] == ["num-images", "seed"]
    assert capsys.readouterr().err.count("warning: --num is deprecated") == 1
    done = run("verify", "ar", "--chains", 10)
    assert done.exit_code == 2 and done.stderr.splitlines()[0].startswith("warning: --chains is deprecated")
    assert len(done.stderr.splitlines()) == 2 and "sample must be" in done.stderr


@pytest.mark.parametrize(("words", "new"), [(("draw", "-o", "out"), "eval --generate-only"), (("bench", "ar"), "baseline")])
def test_old_commands_give_a_warning(run: Any, words: tuple[str, ...], new: str) -> None:
    done = run(*words, "--model", "no-such-model")
    assert done.exit_code == 2 and "unknown model" in done.stderr
    assert done.stderr.splitlines()[0].startswith(f"warning: {words[-1] if 'bench' in words else 'draw'} is deprecated")
    assert new in done.stderr and not list(Path().iterdir())
