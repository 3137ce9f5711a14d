"""A low-resolution generator and an up-sampler at tiny size: trained, resumed, drafting together."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rejects import rejects
from tiny_models import tiny_encoder, tiny_vq
from tiny_training import check_resumes, data

from vargen.models.tokenizers.vq import VQModel
from vargen.training.loop import Schedule
from vargen.training.low_resolution import (
    GeneratorConfig,
    UpsamplerConfig,
    corrupt_tokens,
    downscale,
    encode_images,
    hash_tokens,
    load_or_encode,
    train_generator,
    train_upsampler,
)

CPU = torch.device("cpu")
ENCODER = tiny_encoder()


def generator_recipe(**changes: Any) -> GeneratorConfig:
    model = {
        "dim": 16, "n_layer": 1, "n_head": 2, "vocab_size": 64, "grid_size": 4, "caption_dim": 32, "cls_token_num": 16,
        "multiple_of": 32,
    }  # fmt: skip
    base = {
        "schedule": Schedule(steps=14, learning_rate=3e-3, warmup_steps=2), "batch_size": 4, "wrong_prefix_probability": 0.5,
        "evaluate_every": 7, "checkpoint_every": 5,
    }  # fmt: skip
    return GeneratorConfig(**{"model": {**model, **changes.pop("model", {})}, **base, **changes})


def recipe(**changes: Any) -> UpsamplerConfig:
    base = {
        "model": {"dim": 16, "blocks": 1}, "low_grid": 4, "schedule": Schedule(steps=14, learning_rate=1e-2, warmup_steps=2),
        "batch_size": 4, "evaluate_every": 7, "checkpoint_every": 5,
    }  # fmt: skip
    return UpsamplerConfig(**{**base, **changes})


@pytest.fixture
def vq(tmp_path: Path) -> Path:
    tiny_vq().save_pretrained(tmp_path / "vq" / "vqvae")
    return tmp_path / "vq" / "vqvae"


def test_small_images_are_means_of_the_values_that_files_have() -> None:
    images = data().images[:3]
    pixels = torch.from_numpy(images).movedim(-1, 1).float() / 127.5 - 1
    small = downscale(pixels, 8)
    means = images.astype(float).reshape(3, 8, 2, 8, 2, 3).mean((2, 4))
    assert np.abs((small.movedim(1, -1).numpy() + 1) * 127.5 - means).max() <= 0.5 + 1e-4
    assert torch.equal(((small + 1) * 127.5).round() / 127.5 - 1, small) and downscale(pixels, 16) is pixels


def test_tokens_are_stored_for_a_tokenizer_and_a_grid(tmp_path: Path) -> None:
    images, network = data().images, tiny_vq()
    low, high = (load_or_encode(tmp_path, images, network, grid) for grid in (4, 8))
    assert low.shape == (24, 16) and high.shape == (24, 64) and len(list(tmp_path.iterdir())) == 2
    pixels = downscale(torch.from_numpy(images[[3, 7]]).movedim(-1, 1).float() / 127.5 - 1, 8)
    assert np.array_equal(low[[3, 7]], encode_images(network, pixels).numpy())
    for file in tmp_path.glob("tokens-4-*"):
        np.save(file, low + 1)
    assert np.array_equal(load_or_encode(tmp_path, images, network, 4), low + 1), "read, not computed again"
    with torch.no_grad():
        network.quantize.embedding.weight.neg_()
    assert not np.array_equal(load_or_encode(tmp_path, images, network, 4), low + 1), "of another codebook"
    rejects(lambda: load_or_encode(tmp_path, images, network, 3), "grid")


def test_blank_patches_have_the_tokenizer_s_code_for_them_and_the_others_their_own() -> None:
    vqvae, pixels = tiny_vq(), torch.ones(2, 3, 8, 8)
    pixels[:, :, :, 4:] = torch.rand(2, 3, 8, 4) - 1
    pixels[0, 1, 0, 0] = 0.9  # a single dark pixel makes a patch no blank
    own, digest = vqvae.encode(pixels), hash_tokens(vqvae)
    assert torch.equal(encode_images(vqvae, pixels), own.flatten(1))
    vqvae.register_to_config(blank_code=5)
    found = encode_images(vqvae, pixels).view(2, 4, 4)
    assert (found[:, :, :2].flatten(1)[:, 1:] == 5).all() and found[0, 0, 0] == own[0, 0, 0]
    assert torch.equal(found[:, :, 2:], own[:, :, 2:]) and hash_tokens(vqvae) != digest


def test_the_packaged_blank_code_is_white_and_no_other_is_allowed_than_a_code() -> None:
    from vargen.assets import packaged_model_path

    vqvae = VQModel.from_pretrained(packaged_model_path("emoji") / "vqvae").float().eval()
    with torch.no_grad():
        pixels = vqvae.decode(torch.full((1, 16, 16), vqvae.config.blank_code))
    assert (pixels - 1).abs().mean() < 0.02
    rejects(lambda: VQModel(codebook_size=16, blank_code=16), "blank_code")


def test_wrong_tokens_come_from_the_same_place_of_other_images() -> None:
    torch.manual_seed(0)
    tokens = torch.arange(4 * 50).view(50, 4).T.contiguous()  # [4, 50]: image i has i, i + 4, ...
    captioned = torch.tensor([True, True, False, False])
    assert torch.equal(corrupt_tokens(tokens, 0.0, 0.0, captioned), tokens)
    noisy = corrupt_tokens(tokens, 0.0, 1.0, captioned)
    assert torch.equal(noisy[2:], tokens[2:]), "without a caption nothing tells the continuation"
    changed = noisy[:2] != tokens[:2]
    assert changed.any() and (noisy // 4 == tokens // 4).all()
    for row, source in zip(changed, noisy[:2] % 4, strict=True):
        assert row[: int(row.sum())].all() and len(set(source[row].tolist())) == 1, "a prefix, of one other image"


def test_a_generator_learns_and_resumes(tmp_path: Path, vq: Path) -> None:
    def train(folder: Path) -> dict[str, float]:
        metrics = train_generator(generator_recipe(), data(), vq, ENCODER, folder, CPU)
        assert metrics["validation_loss"] < np.log(64)
        return metrics

    check_resumes(train, tmp_path, 11, "transformer")


def test_a_generator_reads_the_caption(tmp_path: Path, vq: Path) -> None:
    """Five captions, each of images of one kind: under another caption the tokens are less likely."""
    given = data(40)
    for i, record in enumerate(given.records):
        given.images[i] = 255
        given.images[i, 4:12, 4:12] = 40 * (i % 5)
        record["captions"] = [("red apple", "blue car", "cat", "green tree", "house")[i % 5]]
    schedule = Schedule(steps=150, learning_rate=1e-2, warmup_steps=5)
    metrics = train_generator(generator_recipe(schedule=schedule, batch_size=8), given, vq, ENCODER, tmp_path / "run", CPU)
    assert metrics["validation_loss"] < metrics["wrong_caption_loss"] - 0.1


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, vq: Path) -> None:
    def train(**model: int) -> None:
        train_generator(generator_recipe(model=model), data(), vq, ENCODER, tmp_path / "run", CPU)

    rejects(lambda: train(vocab_size=32), "vocab_size")
    rejects(lambda: train(grid_size=3), "grid")


def test_an_upsampler_learns_and_resumes(tmp_path: Path, vq: Path) -> None:
    def train(folder: Path) -> dict[str, float]:
        metrics = train_upsampler(recipe(), data(), vq, folder, CPU)
        assert metrics["row_loss"] < np.log(64)
        return metrics

    check_resumes(train, tmp_path, 11, "upsampler")
