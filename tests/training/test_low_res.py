"""A low-resolution generator and an up-sampler at tiny size: trained, resumed, packaged, drafting."""

import json

import numpy as np
import pytest
import torch
from rejects import rejects
from tiny_models import tiny_encoder, tiny_transformer, tiny_vq
from tiny_training import check_resumes, data, generator_recipe

from recipes.package import package_emoji
from recipes.package_components import package_low_res
from vargen import LlamaGenPipeline
from vargen.training.config import Schedule
from vargen.training.low_res import TwoResolutionTokens, UpsamplerConfig, downscale_dataset, train_upsampler
from vargen.training.next_token import train_next_token
from vargen.training.token_cache import BackgroundTokenizer

CPU = torch.device("cpu")
ENCODER = tiny_encoder()
SMALL = {"grid_size": 4, "dim": 16, "n_layer": 1, "cls_token_num": 32}


def recipe(**changes) -> UpsamplerConfig:
    base = {
        "model": {"dim": 16, "blocks": 1}, "low_grid": 4, "schedule": Schedule(steps=14, learning_rate=1e-2, warmup_steps=2),
        "batch_size": 4, "shift_variants": 1, "recolor_probability": 0.3, "evaluate_every": 7, "checkpoint_every": 5,
    }  # fmt: skip
    return UpsamplerConfig(**{**base, **changes})


@pytest.fixture
def vq(tmp_path):
    tiny_vq().save_pretrained(tmp_path / "vq" / "vqvae")
    return tmp_path / "vq" / "vqvae"


def low_recipe():
    given = generator_recipe()
    return generator_recipe().__class__(**{**vars(given), "model": {**given.model, **SMALL}})


def test_small_images_are_means():
    images, asked = data(size=16), low_recipe()
    small = downscale_dataset(images, asked, downsampling=2)
    assert small.images.shape == (24, 8, 8, 3) and small.records is images.records
    mean = images.images[5].astype(float).reshape(8, 2, 8, 2, 3).mean((1, 3))
    assert np.abs(small.images[5] - mean).max() <= 0.5
    assert downscale_dataset(images, generator_recipe(), downsampling=2) is images


def test_a_grid_that_does_not_divide_the_images_is_refused():
    given = low_recipe()
    three = given.__class__(**{**vars(given), "model": {**given.model, "grid_size": 3}})
    rejects(lambda: downscale_dataset(data(size=16), three, downsampling=2), "grid_size")


def test_pairs_are_tokens_of_an_image_at_both_sizes(tmp_path):
    images, network = data(size=16), tiny_vq()
    store = TwoResolutionTokens(tmp_path, images.images, network, recipe(), CPU, 2)
    low, high = store([3, 7], [0, 0])
    assert low.shape == (2, 4, 4) and high.shape == (2, 64)
    small = downscale_dataset(images, low_recipe(), downsampling=2).images[[3, 7]]
    expected = BackgroundTokenizer(network)(torch.from_numpy(small).movedim(-1, 1).float() / 127.5 - 1)
    assert torch.equal(low.flatten(1), expected)
    again, _ = TwoResolutionTokens(tmp_path, images.images, network, recipe(), CPU, 2)([3, 7], [0, 0])
    assert torch.equal(low, again)


def test_an_upsampler_learns_and_resumes(tmp_path, vq):
    def train(folder):
        metrics = train_upsampler(recipe(), data(), vq, folder, CPU)
        assert metrics["row_loss"] < np.log(64)
        return metrics

    check_resumes(train, tmp_path, 11, "upsampler")


def test_finished_runs_become_parts_of_their_model(tmp_path, vq):
    with pytest.raises(FileNotFoundError, match="finish the training run first"):
        package_low_res(tmp_path / "low", tmp_path / "up", tmp_path / "model")
    generator, tokenizer = tmp_path / "generator", vq.parent
    tiny_transformer("text", cls_token_num=32, grid_size=8, caption_dim=32).save_pretrained(generator / "transformer")
    reported = {"step": 40, "seconds": 60.0, "final_held_out_loss": 4.25, "final_entropy": 3.5}
    (generator / "log.jsonl").write_text(json.dumps(reported) + "\n")
    (tokenizer / "log.jsonl").write_text(json.dumps({**reported, "psnr": 25.5, "codebook_use": 0.5, "perplexity": 9.0}) + "\n")
    folder = package_emoji(tokenizer, generator, ENCODER, tmp_path / "model")
    assert not (json.loads((folder / "model_index.json").read_text()).get("low_res") or [None])[0]
    small = downscale_dataset(data(), low_recipe(), downsampling=2)
    train_next_token(low_recipe(), small, folder / "vqvae", ENCODER, tmp_path / "low", CPU)
    train_upsampler(recipe(), data(), folder / "vqvae", tmp_path / "up", CPU)
    report = package_low_res(tmp_path / "low", tmp_path / "up", folder, note="On a slow machine.")
    assert report["upsampler"]["row_loss"] > 0 and "On a slow machine." in (folder / "upsampler" / "README.md").read_text()
    pipe = LlamaGenPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    assert pipe("a red apple", accelerator="mulo", output_type="latent").stats.passes < 64
    assert not [file for file in folder.rglob("*.json") if str(tmp_path) in file.read_text()], "no folder of this machine"

    other = tmp_path / "other"
    with torch.no_grad():
        network = tiny_vq()
        network.quantize.embedding.weight[0] += 1
    network.save_pretrained(other)
    train_upsampler(recipe(), data(), other, tmp_path / "up-other", CPU)
    rejects(lambda: package_low_res(tmp_path / "low", tmp_path / "up-other", folder), "tokenizer")
