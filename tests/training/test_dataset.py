"""What training is given is checked before anything is loaded: settings, and a data set of anyone's captioned images."""

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from rejects import rejects
from tiny_models import tiny_encoder

from vargen.training.dataset import CaptionBank, CaptionedImages, load_captioned_images
from vargen.training.heads import HeadConfig
from vargen.training.loop import CONFIGS, Schedule, load_config
from vargen.training.low_resolution import GeneratorConfig, UpsamplerConfig


def write(folder: Path, *lines: object, size: int = 4) -> Path:
    np.save(folder / "images.npy", np.zeros((len(lines), size, size, 3), np.uint8))
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "captions.jsonl").write_text("\n".join(texts) + "\n")
    return folder


def test_captions_splits_and_further_fields_are_read(tmp_path: Path) -> None:
    lines = [{"caption": f"thing {i}"} for i in range(40)]
    lines[3] = {"captions": ["a cat", "a black cat"], "style": "photo"}  # type: ignore[dict-item]
    lines[4]["split"] = "validation"
    data = load_captioned_images(write(tmp_path, *lines))
    assert data.indices("validation").tolist() == [4, 19, 39]
    assert data.captions(3) == ["a cat", "a black cat"] and data.captions(0) == ["thing 0"]
    assert {data.sample_caption(3, random.Random(seed)) for seed in range(20)} == {"a cat", "a black cat"}


@pytest.mark.parametrize(
    "line", ["", "[]", '{"text": "a"}', '{"caption": ""}', '{"captions": [1]}', '{"caption": "a", "split": "dev"}']
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ValueError, match="line 2"):
        load_captioned_images(write(tmp_path, {"caption": "a"}, line))


def test_files_that_are_missing_or_do_not_fit_are_named(tmp_path: Path) -> None:
    rejects(lambda: load_captioned_images(tmp_path), "images.npy", FileNotFoundError)
    write(tmp_path, {"caption": "a"}, {"caption": "b"})
    (tmp_path / "captions.jsonl").write_text('{"caption": "a"}\n')
    rejects(lambda: load_captioned_images(tmp_path), "images.npy")
    (tmp_path / "images.npy").write_bytes(b"no array")
    rejects(lambda: load_captioned_images(tmp_path), "images.npy")
    (tmp_path / "captions.jsonl").unlink()
    rejects(lambda: load_captioned_images(tmp_path), "captions.jsonl", FileNotFoundError)


def test_methods_may_be_overridden_for_captions_of_another_kind() -> None:
    class Named(CaptionedImages):
        def captions(self, i: int) -> list[str]:
            return [f"a {self.records[i]['name']}"]

    data = Named(np.zeros((1, 4, 4, 3), np.uint8), [{"name": "cat", "split": "train"}])
    assert data.sample_caption(0, random.Random(0)) == "a cat"


def test_caption_features_in_a_batch_equal_those_of_the_caption() -> None:
    bank = CaptionBank(tiny_encoder(), 8, torch.device("cpu"))
    texts = ["a red apple", "cat", "a red apple", "a black cat with a very long tail on a wall", "", "cat"]
    found = bank(texts)
    assert found.caption_embeds is not None and found.caption_mask is not None
    for text, rows, mask in zip(texts, found.caption_embeds, found.caption_mask, strict=True):
        encoded = bank.tokenizer([text], truncation=True, max_length=8, return_tensors="pt")
        count = encoded.input_ids.shape[1]
        assert mask.tolist() == [True] * count + [False] * (8 - count)
        with torch.no_grad():
            expected = bank.encoder(encoded.input_ids, encoded.attention_mask)[0]
        torch.testing.assert_close(rows[:count], expected, rtol=2e-3, atol=2e-3)
        assert not rows[count:].any()


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
