"""The multi-scale tokenizer's trainer at tiny size: it learns, resumes, and keeps the laws of its codebook."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from rejects import rejects
from tiny_training import check_resumes

from recipes.emoji.dataset import EmojiDataset
from recipes.emoji_var import tokenizer as trainer
from recipes.emoji_var.codebook import ScaleCodebook, TokenPerturbation, quantize_scales
from recipes.emoji_var.tokenizer import MultiScaleTokenizerConfig
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.training import run
from vargen.training.augment import SamplingWeights
from vargen.training.config import Schedule

CPU = torch.device("cpu")
SHAPE = {
    "architecture": "hybrid", "codebook_size": 32, "codebook_embed_dim": 4, "ch": 16, "ch_mult": [1, 2], "num_res_blocks": 1,
    "transformer_blocks": 1, "patch_size": 2, "scales": [1, 2, 4], "scale_codes": [4, 8, 32], "scale_gains": True,
}  # fmt: skip


def data(count: int = 24, size: int = 16) -> EmojiDataset:
    random = np.random.default_rng(0)
    images = np.full((count, size, size, 3), 255, dtype=np.uint8)
    for image in images:
        y, x = random.integers(0, 8, 2)
        image[y : y + 7, x : x + 7] = random.integers(0, 255, 3)
    records = [
        {"style": ("3d", "flat", "noto", "twemoji")[i % 4], "split": "validation" if i < 4 else "train", "group": "objects"}
        for i in range(count)
    ]
    return EmojiDataset(images, records)


def recipe(**changes) -> MultiScaleTokenizerConfig:
    base = {
        "schedule": Schedule(steps=16, learning_rate=3e-3, warmup_steps=2), "batch_size": 4, "shift": 2, "autoencoder_steps": 4,
        "decoder_steps": 4, "revive_every": 3, "evaluate_every": 8, "checkpoint_every": 5,
    }  # fmt: skip
    return MultiScaleTokenizerConfig(model=SHAPE, **{**base, **changes})


def train(folder, changed=None):
    return trainer.train_multi_scale_tokenizer(changed or recipe(), data(), folder, CPU)


def a_model(**changes) -> MultiScaleVQModel:
    torch.manual_seed(0)
    return MultiScaleVQModel(**{**SHAPE, **changes})


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("killed_at", "checkpoint_every"), [(3, 2), (14, 13)])
def test_a_killed_run_resumes_to_the_same_weights(tmp_path, killed_at, checkpoint_every):
    """Before the codes are fitted, and in the decoder's phase."""
    check_resumes(lambda folder: train(folder, recipe(checkpoint_every=checkpoint_every)), tmp_path, killed_at, "vqvae")
    assert (tmp_path / "killed" / "reconstructions.png").is_file()


def test_training_lowers_the_loss_and_more_scales_show_more(tmp_path):
    schedule = Schedule(steps=100, learning_rate=5e-3, warmup_steps=2)
    figures = train(tmp_path / "run", recipe(schedule=schedule, autoencoder_steps=40, evaluate_every=100))
    losses = [r["reconstruction"] for r in map(json.loads, (tmp_path / "run" / "log.jsonl").open()) if "reconstruction" in r]
    assert losses[-1] < 0.5 * losses[0]
    assert figures["psnr"] == figures["psnr_2"] > figures["psnr_0"] + 1
    assert figures["explained_0"] < figures["explained_1"] < figures["explained_2"] <= 1
    assert all(0 < figures[f"use_{k}"] <= 1 for k in range(3)) and figures["entropy_2"] > 0.5


def test_the_last_steps_train_the_decoder_alone(tmp_path):
    schedule = Schedule(steps=20, learning_rate=3e-3, warmup_steps=2)
    train(tmp_path / "run", recipe(schedule=schedule, decoder_steps=0))
    first = MultiScaleVQModel.from_pretrained(tmp_path / "run" / "vqvae")
    train(tmp_path / "run", recipe(schedule=dataclasses.replace(schedule, steps=30), decoder_steps=10))
    second = MultiScaleVQModel.from_pretrained(tmp_path / "run" / "vqvae")
    old, new = first.state_dict(), second.state_dict()
    assert {name.split(".")[0] for name in old if not torch.equal(old[name], new[name])} == {"decoder"}


def test_the_decoder_of_a_trained_tokenizer_learns_further(tmp_path):
    train(tmp_path / "run")
    start, schedule = tmp_path / "run" / "vqvae", Schedule(steps=6, learning_rate=3e-3, warmup_steps=1)
    config = recipe(schedule=schedule, autoencoder_steps=0, checkpoint_every=2)

    def continue_run(folder):
        return trainer.train_multi_scale_tokenizer(config, data(), folder, CPU, start)

    check_resumes(continue_run, tmp_path, 3, "vqvae")
    old = MultiScaleVQModel.from_pretrained(start).state_dict()
    new = MultiScaleVQModel.from_pretrained(tmp_path / "whole" / "vqvae").state_dict()
    assert {name.split(".")[0] for name in old if not torch.equal(old[name], new[name])} == {"decoder"}


@pytest.mark.parametrize(("steps", "start"), [(0, None), (4, "start")])
def test_a_trained_tokenizer_is_for_the_decoder_alone(tmp_path, steps, start):
    config, start = recipe(autoencoder_steps=steps), start and tmp_path / start
    rejects(lambda: trainer.train_multi_scale_tokenizer(config, data(), tmp_path / "run", CPU, start), "init")
    assert not (tmp_path / "run").exists()


def test_training_in_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "preferred_dtype", lambda device: torch.float32)
    expected = train(tmp_path / "float32")
    monkeypatch.setattr(run, "preferred_dtype", lambda device: torch.bfloat16)
    figures = train(tmp_path / "bfloat16")
    assert figures["psnr"] == pytest.approx(expected["psnr"], rel=0.1) and figures["psnr"] != expected["psnr"]
    weights = MultiScaleVQModel.from_pretrained(tmp_path / "bfloat16" / "vqvae").state_dict()
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in weights.values())


def test_images_of_another_size_are_refused_before_anything_is_written(tmp_path):
    rejects(lambda: trainer.train_multi_scale_tokenizer(recipe(), data(size=32), tmp_path / "run", CPU), "scales")
    assert not (tmp_path / "run").exists()


# -- the codebook --------------------------------------------------------------------------------------------------


def test_codes_are_fitted_scale_after_scale():
    """Latents of few kinds: each scale's own codes hold what the scales before left, and nothing is left in the end."""
    model = a_model(scales=[1, 2], codebook_size=8, scale_codes=[4, 8])
    for phi in model.quantize.quant_resi["qresi_ls"]:
        torch.nn.init.dirac_(phi.weight)
        torch.nn.init.zeros_(phi.bias)
    means = torch.randn(4, 4, 1, 1, generator=seeded())
    details = 0.1 * torch.randn(4, 4, 2, 2, generator=seeded(1))
    details = details - details.mean((2, 3), keepdim=True)
    latents = means.expand(4, 4, 2, 2).repeat(50, 1, 1, 1)  # four flat pictures: the first scale holds them all
    book = ScaleCodebook(model, 0.9)
    book.fit_scales(latents, seeded())
    assert book.groups() == [(0, 4, [0]), (4, 8, [1])]
    out = quantize_scales(model, latents)
    assert out.errors(latents)[0] < 1e-6
    latents = (means + details).repeat(50, 1, 1, 1)
    book.fit_scales(latents, seeded())
    errors = quantize_scales(model, latents).errors(latents)
    assert errors[1] < 0.6 * errors[0] and model.quantize.gains[1] < 0.2 * model.quantize.gains[0]


def test_training_and_the_model_quantise_alike():
    model = a_model()
    f = torch.randn(3, 4, 4, 4, generator=seeded())
    book = ScaleCodebook(model, 0.9)
    book.fit_scales(f, seeded())
    out = quantize_scales(model, f)
    assert all(torch.equal(a, b) for a, b in zip(out.tokens, model.quantize_latent(f), strict=True))
    assert torch.allclose(out.sums[-1], model.accumulate_latents(out.tokens))
    assert all((tokens < codes).all() for tokens, codes in zip(out.tokens, (4, 8, 32), strict=True))


def test_codes_follow_their_latents_and_gains_the_size_of_what_is_left():
    model = a_model()
    f = 5 * torch.randn(16, 4, 4, 4, generator=seeded())
    book = ScaleCodebook(model, 0.5)
    book.fit_scales(f, seeded())
    before = quantize_scales(model, f).errors(f)[-1]
    model.quantize.gains.mul_(torch.tensor([2.0, 1.0, 3.0]))
    for _ in range(30):
        book.ema_update(quantize_scales(model, f))
    assert quantize_scales(model, f).errors(f)[-1] < before * 1.05
    sizes = [vectors.square().mean().sqrt() for vectors in quantize_scales(model, f).vectors]
    assert all(0.8 < size < 1.25 for size in sizes)
    assert (book.weight.norm(dim=-1) - 1).abs().max() > 0.1, "codes are not on a sphere"


def test_idle_codes_are_moved_to_latents_of_their_own_scales():
    model = a_model()
    f = torch.randn(16, 4, 4, 4, generator=seeded())
    book = ScaleCodebook(model, 0.9)
    book.fit_scales(f, seeded())
    book.counts[[1, 5, 20, 21]] = 0
    out = quantize_scales(model, f)
    assert book.replace_dead_codes_by_scale(out, seeded()) == 4
    for code, scale in ((1, 0), (5, 1), (20, 2), (21, 2)):
        assert (out.vectors[scale] - book.weight[code]).abs().sum(1).min() == 0


def test_perturbed_tokens_are_near_ones_in_a_share_of_the_images():
    model = a_model()
    tokens = [torch.randint(codes, (200, s, s), generator=seeded()) for s, codes in ((1, 4), (2, 8), (4, 32))]
    assert all(map(torch.equal, TokenPerturbation(model, 3)(tokens, 0.5, 0.0, seeded()), tokens))
    changed = TokenPerturbation(model, 3)(tokens, 0.5, 1.0, seeded())
    touched = (changed[2] != tokens[2]).flatten(1).any(1)
    assert 70 < touched.sum() < 130
    for old, new, codes in zip(tokens, changed, (4, 8, 32), strict=True):
        distance = torch.cdist(model.codebook[:codes], model.codebook[:codes])
        rank = distance.argsort(-1).argsort(-1)[old, new]
        assert rank.max() <= 3 and rank.float().max() > 0


# -- data ----------------------------------------------------------------------------------------------------------


def test_batches_are_functions_of_seed_and_step_on_white():
    a, b = (trainer.WholeImageBatches(data(), recipe()) for _ in range(2))
    assert np.array_equal(a(5), b(5)) and not np.array_equal(a(5), a(6))
    whole = trainer.WholeImageBatches(data(), recipe(shift=0, zoom=[1.0, 1.0]))(0)
    known = data().images[4:]
    assert all(any(np.array_equal(p, q) or np.array_equal(p, q[:, ::-1]) for q in known) for p in whole)
    small = trainer.WholeImageBatches(data(), recipe(batch_size=64, shift=0, zoom=[0.5, 0.5]))(0)
    assert 20 < sum((p[:4] == 255).all() and (p[12:] == 255).all() for p in small) <= 64


def test_focus_weighs_styles_groups_and_skin_tones():
    records = [
        {"style": "3d", "group": "objects"}, {"style": "noto", "group": "objects"},
        {"style": "3d", "group": "flags"}, {"style": "noto", "group": "people & body", "skin_tone": True},
    ]  # fmt: skip
    weights = SamplingWeights().weights(records)
    assert weights.sum() == pytest.approx(1) and np.allclose(weights / weights[0], [1, 0.2, 0.5, 0.2 * 0.5 * 0.05])
    rejects(lambda: SamplingWeights(styles={"3d": 0.0, "noto": 0.0}).weights(records), "sampling_weights")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zoom": [1.1, 0.8]}, "zoom"),
        ({"decoder_steps": 12}, "steps"),
        ({"truncated_fraction": -0.1}, "truncated_fraction"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_impossible_recipes_are_refused(changes, message):
    rejects(lambda: recipe(**changes), message)


def test_impossible_factors_are_refused():
    for wrong in ("much", True, -1.0, float("nan")):
        with pytest.raises(ValueError, match="styles"):
            SamplingWeights(styles={"3d": wrong})


def test_wavelet_loss_sees_edges_not_flat_errors():
    flat = torch.ones(1, 3, 8, 8)
    assert trainer.wavelet_loss(flat) == 0
    stripes = flat.clone()
    stripes[..., ::2] = -1
    assert trainer.wavelet_loss(stripes) == 1  # 2 at the finest level, 0 at the next
