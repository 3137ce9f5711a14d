"""Recipes are checked before anything is loaded."""

from itertools import pairwise

import pytest

from recipes.emoji_var.config import NextScaleConfig
from recipes.emoji_var.tokenizer_config import MultiScaleTokenizerConfig
from recipes.emoji_video.config import AutoencoderConfig, PreviewConfig, VideoConfig
from vargen.training.config import PACKAGED, NextTokenConfig, Schedule, ScorerConfig, TokenizerConfig, load_config
from vargen.training.heads_config import HeadConfig
from vargen.training.upsampler import UpsamplerConfig


def kind_of(name):
    """The kind of a packaged recipe, and a setting of every model of that kind."""
    told = {
        "video-vae": (AutoencoderConfig, "latent_channels"),
        "video-preview": (PreviewConfig, "latent_channels"),
        "video": (VideoConfig, "dim"),
        "upsampler": (UpsamplerConfig, "blocks"),
        "var-tokenizer": (MultiScaleTokenizerConfig, "codebook_size"),
        "tokenizer": (TokenizerConfig, "codebook_size"),
        "scorer": (ScorerConfig, "widths"),
        "var": (NextScaleConfig, "depth"),
        "eagle": (HeadConfig, "above"),
        "medusa": (HeadConfig, "heads"),
        "": (NextTokenConfig, "vocab_size"),
    }
    return next(found for part, found in told.items() if part in name)


@pytest.mark.parametrize("name", sorted(p.stem for p in PACKAGED.glob("*.toml")))
def test_packaged_recipes_are_valid(name):
    kind, setting = kind_of(name)
    value = load_config(name, kind).model[setting]
    assert value == 4096 or setting not in ("codebook_size", "vocab_size")


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
        ("caption_dropout = -0.1\n[model]\ndim = 3", "caption_dropout must be a share from 0 to 1, got -0.1"),
        ("[schedule]\nlearning_rate = nan\n[model]\ndim = 3", r"\[schedule\]: learning_rate must be at least 0, got nan"),
        ("token_noise = 1.5\n[model]\ndim = 3", "token_noise must be a share from 0 to 1, got 1.5"),
        ("optimizer = 'sgd'\n[model]\ndim = 3", "optimizer must be 'muon' or 'adamw', got 'sgd'"),
        ("batch_size =", "not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path / "mine.toml", NextTokenConfig)


def test_focus_is_part_of_a_multi_scale_recipe(tmp_path):
    text = "[model]\nch = 32\n[schedule]\nsteps = 500\n[focus]\nskin_tones = 0.5\nstyles = {noto = 2}\n"
    (tmp_path / "mine.toml").write_text(text)
    focus = load_config(tmp_path / "mine.toml", MultiScaleTokenizerConfig).focus
    assert (focus.skin_tones, focus.styles) == (0.5, {"noto": 2})
    (tmp_path / "mine.toml").write_text("[model]\nch = 32\n[focus]\nstyles = {noto = -2}\n")
    with pytest.raises(ValueError, match=r"\[focus\]: styles must be factors of at least 0, got -2 for 'noto'"):
        load_config(tmp_path / "mine.toml", MultiScaleTokenizerConfig)


def test_an_unknown_recipe_lists_the_packaged_ones():
    with pytest.raises(FileNotFoundError, match="emoji-generator, emoji-generator-gpu"):
        load_config("emoji-generater", NextTokenConfig)


def test_schedule_warms_up_holds_and_decays_to_zero():
    schedule = Schedule(steps=100, warmup_steps=10, decay_fraction=0.3)
    factors = [schedule.factor(step) for step in range(101)]
    assert factors[0] == 0.1 and factors[9:70] == [1.0] * 61
    assert all(a >= b for a, b in pairwise(factors[70:])) and factors[100] == 0


@pytest.mark.parametrize("name", sorted(p.stem for p in PACKAGED.glob("*.toml")))
def test_every_recipe_takes_or_refuses_a_run_of_one_step(name, caplog):
    """A tokenizer has parts that need their steps; a generator's warm-up is cut, and that is said."""
    caplog.set_level("WARNING", "vargen")
    kind, _ = kind_of(name)
    if "tokenizer" in name:
        with pytest.raises(ValueError, match=r"toml: steps must be at least \d+, got 1: autoencoder_steps \(\d+\) before"):
            load_config(name, kind, 1)
        whole = load_config(name, kind)
        least = whole.autoencoder_steps + whole.decoder_steps + 1
        assert load_config(name, kind, least).schedule.steps == least
    else:
        recipe = load_config(name, kind, 1)
        assert (recipe.schedule.steps, recipe.schedule.warmup_steps) == (1, 1) and recipe.schedule.factor(0) == 1
        assert "warm-up of" in caplog.text and "is cut to the run's 1" in caplog.text


def test_a_warm_up_is_cut_to_the_run_that_is_asked_for(tmp_path, caplog):
    caplog.set_level("WARNING", "vargen")
    (tmp_path / "mine.toml").write_text("[schedule]\nsteps = 7\nwarmup_steps = 40\n[model]\ndim = 32\n")
    assert load_config(tmp_path / "mine.toml", NextTokenConfig, 100).schedule.warmup_steps == 40 and not caplog.records
    assert load_config(tmp_path / "mine.toml", NextTokenConfig).schedule.warmup_steps == 7 and len(caplog.records) == 1


def test_steps_of_a_tokenizer_must_hold_its_parts():
    for autoencoder, decoder, steps in ((5, 5, 10), (0, 1, 1), (3, 0, 3)):
        with pytest.raises(ValueError, match=f"steps must be at least {autoencoder + decoder + 1}, got {steps}"):
            TokenizerConfig({}, Schedule(steps=steps), autoencoder_steps=autoencoder, decoder_steps=decoder)
    for wrong in ("autoencoder_steps", "decoder_steps"):
        with pytest.raises(ValueError, match=f"{wrong} must be at least 0, got -1"):
            TokenizerConfig({}, **{wrong: -1})
