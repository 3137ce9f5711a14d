"""Recipes are checked before anything is loaded."""

from itertools import pairwise

import pytest

from vargen.training.recipe import PACKAGED, GeneratorRecipe, Schedule, TokenizerRecipe, load_recipe


@pytest.mark.parametrize("name", sorted(p.stem for p in PACKAGED.glob("*.toml")))
def test_packaged_recipes_are_valid(name):
    kind = TokenizerRecipe if "tokenizer" in name else GeneratorRecipe
    recipe = load_recipe(name, kind)
    assert recipe.model["codebook_size" if "tokenizer" in name else "vocab_size"] == 4096


def test_a_file_and_its_overrides(tmp_path):
    (tmp_path / "mine.toml").write_text("batch_size = 3\nseed = 1\n[schedule]\nsteps = 7\n[model]\ndim = 32\n")
    recipe = load_recipe(tmp_path / "mine.toml", GeneratorRecipe)
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
        ("caption_dropout = -0.1\n[model]\ndim = 3", "caption_dropout must be at least 0, got -0.1"),
        ("[schedule]\nlearning_rate = nan\n[model]\ndim = 3", r"\[schedule\]: learning_rate must be at least 0, got nan"),
        ("batch_size =", "not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_recipe(tmp_path / "mine.toml", GeneratorRecipe)


def test_an_unknown_recipe_lists_the_packaged_ones():
    with pytest.raises(FileNotFoundError, match="emoji-generator, emoji-generator-gpu"):
        load_recipe("emoji-generater", GeneratorRecipe)


def test_schedule_warms_up_holds_and_decays_to_zero():
    schedule = Schedule(steps=100, warmup_steps=10, decay_fraction=0.3)
    factors = [schedule.factor(step) for step in range(101)]
    assert factors[0] == 0.1 and factors[9:70] == [1.0] * 61
    assert all(a >= b for a, b in pairwise(factors[70:])) and factors[100] == 0
