"""Settings are checked before anything is loaded."""

from itertools import pairwise

import pytest
from rejects import rejects

from vargen.training.config import CONFIGS, Schedule, load_config
from vargen.training.generator import GeneratorConfig
from vargen.training.heads import HeadConfig
from vargen.training.upsampler import UpsamplerConfig


def test_a_file_and_its_overrides(tmp_path):
    (tmp_path / "mine.toml").write_text("batch_size = 3\nseed = 1\n[schedule]\nsteps = 7\n[model]\ndim = 32\n")
    recipe = load_config(tmp_path / "mine.toml", GeneratorConfig)
    assert (recipe.batch_size, recipe.schedule.steps, recipe.model) == (3, 7, {"dim": 32})


@pytest.mark.parametrize(("text", "named"), [
    ("batch_sise = 3\n[model]\ndim = 3", "batch_sise"), ("[schedule]\nstepz = 3\n[model]\ndim = 3", "stepz"),
    ("batch_size = 3", "model"), ("batch_size = 0\n[model]\ndim = 3", "batch_size"),
    ("caption_dropout = -0.1\n[model]\ndim = 3", "caption_dropout"),
    ("[schedule]\nlearning_rate = nan\n[model]\ndim = 3", "learning_rate"), ("batch_size =", "mine.toml"),
])  # fmt: skip
def test_mistakes_are_named(tmp_path, text, named):
    (tmp_path / "mine.toml").write_text(text)
    rejects(lambda: load_config(tmp_path / "mine.toml", GeneratorConfig), named, ValueError)


def test_schedule_warms_up_holds_and_decays_to_zero():
    schedule = Schedule(steps=100, warmup_steps=10, decay_fraction=0.3)
    factors = [schedule.factor(step) for step in range(101)]
    assert factors[0] == 0.1 and factors[9:70] == [1.0] * 61
    assert all(a >= b for a, b in pairwise(factors[70:])) and factors[100] == 0


def test_a_warm_up_is_cut_to_the_run():
    assert Schedule(steps=4, warmup_steps=40, decay_fraction=0).factor(3) == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [("eagle", HeadConfig), ("medusa", HeadConfig), ("low-res", GeneratorConfig), ("upsampler", UpsamplerConfig)],
)
def test_packaged_settings_are_valid(name, kind):
    assert load_config(name, kind, 3).schedule.steps == 3
    assert {file.stem for file in CONFIGS.glob("*.toml")} == {"eagle", "medusa", "low-res", "upsampler"}
