"""Settings are checked before anything is loaded."""

from itertools import pairwise

import pytest

from vargen.training.config import CONFIGS, Schedule, load_config
from vargen.training.heads import HeadConfig
from vargen.training.low_res import UpsamplerConfig
from vargen.training.next_token import NextTokenConfig


def test_a_file_and_its_overrides(tmp_path):
    (tmp_path / "mine.toml").write_text("batch_size = 3\nseed = 1\n[schedule]\nsteps = 7\n[model]\ndim = 32\n")
    recipe = load_config(tmp_path / "mine.toml", NextTokenConfig)
    assert (recipe.batch_size, recipe.schedule.steps, recipe.model) == (3, 7, {"dim": 32})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_sise = 3\n[model]\ndim = 3", "unknown key 'batch_sise'; did you mean 'batch_size'"),
        ("[schedule]\nstepz = 3\n[model]\ndim = 3", r"\[schedule\]: unknown key 'stepz'; did you mean 'steps'"),
        ("batch_size = 'many'\n[model]\ndim = 3", "batch_size must be .*int.*, got 'many'"),
        ("batch_size = true\n[model]\ndim = 3", "batch_size must be .*int.*, got True"),
        ("batch_size = 3", "missing model"),
        ("batch_size = 0\n[model]\ndim = 3", "mine.toml: batch_size must be at least 1, got 0"),
        ("evaluate_every = 0\n[model]\ndim = 3", "evaluate_every must be at least 1, got 0"),
        ("caption_dropout = -0.1\n[model]\ndim = 3", "caption_dropout"),
        ("[schedule]\nlearning_rate = nan\n[model]\ndim = 3", r"\[schedule\]: learning_rate must be at least 0, got nan"),
        ("token_noise = 1.5\n[model]\ndim = 3", "token_noise"),
        ("optimizer = 'sgd'\n[model]\ndim = 3", "optimizer must be 'muon' or 'adamw', got 'sgd'"),
        ("batch_size =", "not valid TOML"),
        ("wrong_starts = 0.1\n[model]\ndim = 3", "'wrong_starts' is now called 'wrong_prefix_probability'"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path / "mine.toml", NextTokenConfig)


def test_an_unknown_recipe_lists_the_packaged_ones():
    with pytest.raises(FileNotFoundError, match="eagle, low-res, medusa, upsampler"):
        load_config("low-rez", NextTokenConfig)


def test_schedule_warms_up_holds_and_decays_to_zero():
    schedule = Schedule(steps=100, warmup_steps=10, decay_fraction=0.3)
    factors = [schedule.factor(step) for step in range(101)]
    assert factors[0] == 0.1 and factors[9:70] == [1.0] * 61
    assert all(a >= b for a, b in pairwise(factors[70:])) and factors[100] == 0


def test_a_warm_up_is_cut_to_the_run_that_is_asked_for(tmp_path, caplog):
    caplog.set_level("WARNING", "vargen")
    (tmp_path / "mine.toml").write_text("[schedule]\nsteps = 7\nwarmup_steps = 40\n[model]\ndim = 32\n")
    assert load_config(tmp_path / "mine.toml", NextTokenConfig, 100).schedule.warmup_steps == 40 and not caplog.records
    assert load_config(tmp_path / "mine.toml", NextTokenConfig).schedule.warmup_steps == 7 and len(caplog.records) == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [("eagle", HeadConfig), ("medusa", HeadConfig), ("low-res", NextTokenConfig), ("upsampler", UpsamplerConfig)],
)
def test_packaged_settings_are_valid(name, kind):
    assert load_config(name, kind, 3).schedule.steps == 3
    assert {file.stem for file in CONFIGS.glob("*.toml")} == {"eagle", "medusa", "low-res", "upsampler"}


def test_single_settings_replace_those_of_the_file(tmp_path):
    (tmp_path / "mine.toml").write_text("[model]\ndim = 32\n")
    settings = {"batch_size": 3, "schedule.learning_rate": 0.5, "model.dim": 64}
    config = load_config(tmp_path / "mine.toml", NextTokenConfig, settings=settings)
    assert (config.batch_size, config.schedule.learning_rate, config.model["dim"]) == (3, 0.5, 64)
    for wrong, named in (({"batch_sise": 3}, "batch_sise"), ({"batch_size": "many"}, "batch_size"), ({"seed.x": 1}, "seed")):
        with pytest.raises(ValueError, match=named):
            load_config(tmp_path / "mine.toml", NextTokenConfig, settings={"seed": 1, **wrong})
