"""The video autoencoder's trainer at tiny size: it learns, resumes, tells flicker from motion."""

import dataclasses

import numpy as np
import pytest
import torch
from rejects import rejects
from tiny_training import check_resumes

from recipes.emoji_video import autoencoder as trainer
from recipes.emoji_video.autoencoder import AutoencoderConfig
from recipes.emoji_video.clips import VideoDataset
from recipes.runner import load_settings
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.training.config import Schedule

CPU = torch.device("cpu")
SHAPE = {"size": 16, "widths": [8, 16, 32], "transformer_blocks": 1}


def data(count: int = 12, frames: int = 8, size: int = 16) -> VideoDataset:
    """Squares that go round."""
    random = np.random.default_rng(0)
    clips = np.full((count, frames, size, size, 3), 255, dtype=np.uint8)
    records = []
    for i, clip in enumerate(clips):
        color, phase = random.integers(0, 255, 3), random.integers(frames)
        for t, frame in enumerate(clip):
            angle = 2 * np.pi * (t + phase) / frames
            y, x = round(5 + 4 * np.sin(angle)), round(5 + 4 * np.cos(angle))
            frame[y : y + 6, x : x + 6] = color
        records.append({"split": "validation" if i < 3 else "train", "loops": True, "motion": 5.0})
    return VideoDataset(clips, records)


def recipe(**changes) -> AutoencoderConfig:
    base = {
        "schedule": Schedule(steps=10, learning_rate=3e-3, warmup_steps=2), "batch_size": 4, "frames": 3, "shift": 1,
        "evaluate_every": 4, "checkpoint_every": 3,
    }  # fmt: skip
    return AutoencoderConfig(model=SHAPE, **{**base, **changes})


def train(folder, changed=None):
    return trainer.train_autoencoder(changed or recipe(), data(), folder, CPU)


def test_a_killed_run_resumes_to_the_same_weights(tmp_path):
    check_resumes(train, tmp_path, 7, "vae")


def test_it_learns_and_its_latents_are_standardised(tmp_path):
    longer = recipe(schedule=Schedule(steps=60, learning_rate=5e-3, warmup_steps=2), evaluate_every=100, checkpoint_every=100)
    found = train(tmp_path / "run", longer)
    assert found["psnr"] > 12 and found["seen_psnr"] > 12
    vae = CausalVideoVAE.from_pretrained(tmp_path / "run" / "vae")
    clips = data()
    z = vae.encode(trainer.to_video(clips.frames[clips.indices("train")][:, ::4], CPU)).movedim(2, 0).flatten(1)
    assert z.mean(1).abs().max() < 1e-3 and (z.std(1, unbiased=False) - 1).abs().max() < 1e-3
    assert (tmp_path / "run" / "strips.png").is_file()


class Fake(CausalVideoVAE):
    """Gives back what it is told to."""

    change = staticmethod(lambda pixels: pixels)

    def encode(self, pixels):
        return pixels

    def decode(self, latents):
        return self.change(latents)


def figures_of(change) -> dict[str, float]:
    model = Fake(**SHAPE)
    model.change = change
    return trainer.evaluate_video_vae(model, data().frames, CPU)


def test_figures_tell_a_frozen_video_from_one_that_flickers():
    perfect = figures_of(lambda p: p)
    assert perfect["motion"] == pytest.approx(1) and perfect["motion_error"] < 1e-9 and perfect["flicker"] < 1e-6
    frozen = figures_of(lambda p: p[:, :1].expand_as(p))
    assert frozen["motion"] < 1e-6 and frozen["motion_error"] == pytest.approx(1) and frozen["psnr"] < perfect["psnr"]
    noise = torch.randn(12, 8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    flickering = figures_of(lambda p: p + 0.1 * noise[: len(p)])
    assert flickering["flicker"] > 0.01 and flickering["motion"] > 1


def test_batches_are_of_seed_and_step_alone_and_hold_no_held_out_clip():
    clips = data()
    clips.frames[clips.indices("validation")] = 7
    batches = trainer.WindowBatches(clips, recipe())
    assert np.array_equal(batches(3), trainer.WindowBatches(clips, recipe())(3)) and not np.array_equal(batches(3), batches(4))
    assert batches(0).shape == (4, 3, 16, 16, 3)
    assert all(((batch := batches(step)) != 7).any((1, 2, 3, 4)).all() and batch.max() == 255 for step in range(8))


def test_frames_of_another_size_are_refused(tmp_path):
    rejects(lambda: train(tmp_path, dataclasses.replace(recipe(), model={**SHAPE, "size": 64})), "size")


@pytest.mark.parametrize(("change", "message"), [({"frames": 1}, "frames"), ({"zoom": [1.1, 0.8]}, "zoom")])
def test_recipes_that_cannot_be_are_refused(change, message):
    rejects(lambda: recipe(**change), message)


def test_the_packaged_recipe_is_of_the_data_sets_frames():
    packaged = load_settings("emoji-video-vae")
    assert CausalVideoVAE(**packaged.model).latent_side == 8
