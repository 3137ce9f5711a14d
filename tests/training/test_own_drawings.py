"""A generator that is shown what its starting weights draw."""

import dataclasses

import numpy as np
import pytest
import torch
from tiny_models import tiny_vq
from tiny_training import data, generator_recipe

import vargen.assets
from vargen.decoding import Sampling, decode
from vargen.models.llamagen import LlamaGenTransformer
from vargen.pipelines.llamagen_tokens import LlamaGenTokens
from vargen.training import generator, own_drawings
from vargen.training.caption_bank import CaptionBank
from vargen.training.emoji import captions
from vargen.training.generator_data import TokenStore, left_padded
from vargen.training.own_drawings import OwnDrawings
from vargen.training.recipe import OwnStarts, Schedule
from vargen.training.variants import Looks

CPU = torch.device("cpu")
ENCODER = vargen.assets.packaged_model_path("emoji")
OWN = OwnStarts(pictures=6, share=1.0, guidance_scale=1.5, temperature=0.8)


class Killed(BaseException):
    pass


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(own_drawings, "_AT_ONCE", 4)


@pytest.fixture(scope="module")
def bank():
    return CaptionBank(ENCODER, 16, CPU)


def model() -> LlamaGenTransformer:
    torch.manual_seed(3)
    return LlamaGenTransformer(condition="text", **generator_recipe().model).eval()


def own(folder, bank, recipe=OWN, made_of="these weights") -> OwnDrawings:
    pictures = data()
    store = TokenStore(folder / "tokens", pictures.images, tiny_vq(), generator_recipe(), CPU)
    return OwnDrawings(folder, made_of, Looks(pictures, store, generator_recipe()), bank, recipe, 0, 64)


def test_drawings_are_those_of_the_weights_at_the_recipes_sampling(tmp_path, bank):
    found, network = own(tmp_path, bank), model()
    found.draw(network)
    assert len(found.indices) == len(set(found.indices)) == 6
    assert all(data().records[i]["split"] == "train" for i in found.indices)
    seeds = torch.tensor([(1 << 43) + i for i in found.indices[:4]])
    texts = [captions(data().records[i]) for i in found.indices[:4]]
    (first,) = {tuple(row) for row in found.tokens[:1].tolist()}
    drawn = [
        decode(LlamaGenTokens(network, 1.5), left_padded(bank([text])), seeds[:1], "ar", Sampling(0.8)).tokens[0].tolist()
        for text in texts[0]
    ]
    assert list(first) in drawn  # by one of its captions


def test_drawing_goes_on_where_it_was_killed_and_needs_no_weights_when_done(tmp_path, bank, monkeypatch):
    whole = own(tmp_path / "whole", bank)
    whole.draw(model())
    killed, files = own(tmp_path / "killed", bank), []
    draw = OwnDrawings._draw

    def dies(self, network, start):
        if files:
            raise Killed
        files.append(start)
        draw(self, network, start)

    monkeypatch.setattr(OwnDrawings, "_draw", dies)
    with pytest.raises(Killed):
        killed.draw(model())
    monkeypatch.setattr(OwnDrawings, "_draw", draw)
    resumed = own(tmp_path / "killed", bank)
    resumed.draw(model())
    assert np.array_equal(resumed.tokens, whole.tokens)
    again = own(tmp_path / "whole", bank)
    again.draw(None)
    assert np.array_equal(again.tokens, whole.tokens)


def test_drawings_of_other_weights_are_refused(tmp_path, bank):
    own(tmp_path, bank).draw(model())
    with pytest.raises(ValueError, match=r"was drawn by these weights, .*and this run is of others"):
        own(tmp_path, bank, made_of="others").draw(model())


def test_what_begins_with_an_own_drawing(tmp_path, bank):
    found = own(tmp_path, bank)
    found.draw(model())
    (i, j), other = found.indices[:2], next(n for n in range(24) if n not in found.indices)
    given = torch.full((5, 64), 99)
    captioned = torch.tensor([True, True, False, True, True])
    lengths = set()
    for seed in range(20):
        torch.manual_seed(seed)
        made = found.started(given, [i, j, i, other, j], [0, 0, 0, 0, 1], captioned)
        assert (made[2:] == 99).all()  # no caption, no drawing, another variant
        for row, picture in ((made[0], i), (made[1], j)):
            drawn = int((row != 99).sum())
            assert row[:drawn].tolist() == found.tokens[found.place[picture]][:drawn].tolist()
            assert (row[drawn:] == 99).all()
            lengths.add(drawn)
    assert 64 in lengths and len(lengths) > 8
    never = dataclasses.replace(found.recipe, share=0.0)
    found.recipe = never
    assert (found.started(given, [i] * 5, [0] * 5, captioned) == 99).all()


def train(folder, recipe, init=None):
    vq = folder.parent / "vq"
    if not vq.exists():
        tiny_vq().save_pretrained(vq)
    return generator.train_generator(recipe, data(), vq, ENCODER, folder, CPU, init)


def test_a_killed_run_ends_with_the_weights_of_an_unbroken_one(tmp_path, monkeypatch):
    monkeypatch.setattr(generator, "fast_dtype", lambda device: torch.float32)
    model().save_pretrained(tmp_path / "start")
    recipe = generator_recipe(own_starts=OWN, schedule=Schedule(8, 3e-3, 2), checkpoint_every=3, evaluate_every=99)
    train(tmp_path / "whole", recipe, tmp_path / "start")
    step = generator._Trainer.step

    def dies(self, number):
        if number == 5:
            raise Killed
        return step(self, number)

    monkeypatch.setattr(generator._Trainer, "step", dies)
    with pytest.raises(Killed):
        train(tmp_path / "killed", recipe, tmp_path / "start")
    monkeypatch.setattr(generator._Trainer, "step", step)
    train(tmp_path / "killed", recipe, tmp_path / "start")
    one, two = (LlamaGenTransformer.from_pretrained(tmp_path / name / "transformer") for name in ("whole", "killed"))
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    train(tmp_path / "without", dataclasses.replace(recipe, own_starts=OwnStarts()), tmp_path / "start")
    three = LlamaGenTransformer.from_pretrained(tmp_path / "without" / "transformer")
    assert not torch.equal(one.output.weight, three.output.weight)


def test_own_starts_need_weights_of_this_grid(tmp_path):
    recipe = generator_recipe(own_starts=OWN)
    with pytest.raises(ValueError, match="own_starts needs weights that draw already: give init"):
        train(tmp_path / "run", recipe)
    LlamaGenTransformer(condition="text", **{**recipe.model, "grid_size": 4}).save_pretrained(tmp_path / "start")
    with pytest.raises(ValueError, match="own_starts needs an init of grid_size 8, got 4"):
        train(tmp_path / "run", recipe, tmp_path / "start")


@pytest.mark.parametrize(("field", "value", "message"), [
    ("pictures", -1, "pictures must be at least 0"),
    ("share", 1.5, r"share must be from 0 to 1, got 1\.5"),
    ("temperature", -0.1, "temperature must be at least 0"),
])  # fmt: skip
def test_bad_numbers(field, value, message):
    with pytest.raises(ValueError, match=message):
        OwnStarts(**{field: value})
