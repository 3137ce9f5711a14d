"""The video models' trainer at tiny size: it learns, resumes, distils, and its batches and losses are what they say."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from rejects import rejects
from tiny_clips import SHAPE, VAE, Bank, clip_latents_of, data, recipe
from tiny_training import check_resumes

from recipes.emoji_video import transformer as trainer
from recipes.emoji_video.batches import (
    EMPTY_CAPTION,
    ClipBatches,
    clip_latents,
    motion_levels,
    place_weights,
    validate_same_encoder,
)
from recipes.emoji_video.generate import VideoEvaluation, euler_levels, make_block_noise, sample_latents, sampling_settings
from recipes.emoji_video.losses import VideoLoss
from recipes.emoji_video.preview import PreviewConfig, train_video_preview
from recipes.runner import load_settings
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.training.config import Schedule

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_a_text_encoder(monkeypatch):
    monkeypatch.setattr(trainer, "CaptionBank", Bank)


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vae")
    CausalVideoVAE(**VAE).save_pretrained(folder)
    return folder


def train(folder, vae, changed=None, **more):
    return trainer.train_video(changed or recipe(), data(), vae, vae, folder, CPU, **more)


def weights(folder) -> dict[str, torch.Tensor]:
    return CausalVideoTransformer.from_pretrained(folder / "transformer").state_dict()


@pytest.fixture(scope="module")
def flow(tmp_path_factory, vae):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "CaptionBank", Bank)
        folder = tmp_path_factory.mktemp("flow")
        return folder, train(folder, vae)


def test_a_killed_run_resumes_to_the_same_weights(tmp_path, vae):
    """In its second part, of clean and generated contexts."""
    check_resumes(lambda folder: train(folder, vae), tmp_path, 4, "transformer")


def test_it_learns_what_its_clips_are(tmp_path, vae, flow):
    longer = recipe(
        schedule=Schedule(steps=60, learning_rate=2e-2, warmup_steps=2), self_rollout_probability=0.0, ema_decay=0.9,
        adamw_learning_rate=2e-2,
        evaluate_every=1000, checkpoint_every=1000,
    )  # fmt: skip
    found = train(tmp_path, vae, longer)
    assert found["loss_seen"] < 0.8 * flow[1]["loss_seen"]
    assert {"motion", "static_fraction", "recall", "held_out_motion", "loss_held_out"} <= found.keys()
    assert (tmp_path / "samples.png").is_file()
    assert json.loads((tmp_path / trainer.SAMPLING).read_text())["euler"] is True


def test_few_steps_are_learned_from_a_teacher(tmp_path, vae, flow):
    teacher = flow[0] / "transformer"
    few = recipe(objective="consistency")
    found = train(tmp_path / "few", vae, few, teacher_folder=teacher)
    assert all(np.isfinite(list(found.values())))
    how = json.loads((tmp_path / "few" / trainer.SAMPLING).read_text())
    assert how == {"levels": pytest.approx([1, 2 / 3]), "euler": False, "guidance": 1.0}
    start = weights(flow[0])
    small = recipe(objective="consistency", model={**SHAPE, "dim": 12})
    train(tmp_path / "small", vae, small, teacher_folder=teacher)
    kept = recipe(objective="consistency", schedule=Schedule(steps=1, learning_rate=0.0), adamw_learning_rate=0.0)
    train(tmp_path / "kept", vae, kept, teacher_folder=teacher)
    assert all(torch.allclose(value, start[name]) for name, value in weights(tmp_path / "kept").items())


def test_consistency_has_nothing_to_learn_where_the_model_already_goes_to_one_point(vae):
    """A flow whose every path is a straight line to zero is its own few-step model: x - s v = 0 at all levels for v = x / s."""

    class Straight(torch.nn.Module):
        device = CPU
        geometry = CausalVideoTransformer(**SHAPE).geometry

        def forward(self, noisy, timestep, text, context=None):
            return noisy / (timestep / 1000).clamp_min(1e-6)[..., None, None, None]

        def text_cache(self, *given):
            return None

        config = CausalVideoTransformer(**SHAPE).config

    model = Straight()
    losses = VideoLoss(model, model, Bank(), recipe(objective="consistency", self_rollout_probability=0.0), model)
    losses.dtype = torch.float32
    clips = data()
    latents = clip_latents_of(vae, clips)
    batch = ClipBatches(clips, latents, recipe(), 2, 2, CPU)(0)
    loss, metrics = losses(0, batch)
    assert loss < 1e-4 and metrics["consistency_error"] < 1e-4


def test_latents_are_computed_once_for_an_encoder(tmp_path, vae, monkeypatch):
    clips, network = data(), CausalVideoVAE.from_pretrained(vae)
    made = clip_latents(tmp_path, clips, network, CPU)
    assert made.shape == (10, 6, 4, 2, 2) and made.dtype == np.float16
    with monkeypatch.context() as patch:
        patch.setattr(CausalVideoVAE, "encode", lambda *a: pytest.fail("encoded again"))
        assert np.array_equal(clip_latents(tmp_path, clips, network, CPU), made)
    validate_same_encoder(tmp_path, network, tmp_path)
    network.latent_std.fill_(2.0)
    rejects(lambda: validate_same_encoder(tmp_path, network, tmp_path), "latents")
    assert not np.array_equal(clip_latents(tmp_path, clips, network, CPU), made)


def test_batches_roll_loops_only_and_do_not_learn_what_is_given(vae):
    clips = data()
    latents = np.arange(10 * 6 * 4 * 2 * 2, dtype=np.float16).reshape(10, 6, 4, 2, 2)
    batches = ClipBatches(
        clips,
        latents,
        recipe(batch_size=40, loop_shift_probability=0.5, caption_dropout=0.25, motion_label_probability=0.5),
        2,
        2,
        CPU,
    )
    batch, again = batches(3), batches(3)
    assert torch.equal(batch.clean, again.clean) and batch.texts == again.texts
    first = batch.clean[:, 0, 0, 0, 0].numpy() / 16
    index, start = (first // 6).astype(int), (first % 6).astype(int)
    assert set(index) <= set(clips.indices("train")) and set(start) == {0, 2, 4}
    assert all(clips.records[i]["loops"] for i, s in zip(index, start, strict=True) if s)
    given = (batch.weights[:, :2] == 0).all((1, 2, 3, 4)).numpy()
    assert np.array_equal(given, start > 0) and (batch.weights[:, 2:] > 0).all()
    assert 0 < batch.texts.count(EMPTY_CAPTION) < 40 and set(batch.motion.tolist()) == {0, 1, 2}
    assert np.bincount(motion_levels(clips, 2)[clips.indices("train")]).tolist() == [4, 4]


def test_places_that_move_count_more():
    clip = np.zeros((6, 4, 2, 2), np.float32)
    clip[1::2, :, 0, 0] = 1
    weights = place_weights(clip, 3.0)
    assert weights.mean() == pytest.approx(1) and weights[1, 0, 0, 0] > 5 * weights[1, 0, 1, 1]
    assert np.array_equal(place_weights(clip, 3.0, 2)[2:], weights[2:]) and not place_weights(clip, 3.0, 2)[:2].any()


def test_sampling_is_of_the_seed_and_each_block_of_its_own_noise(flow):
    model = CausalVideoTransformer.from_pretrained(flow[0] / "transformer")
    text = model.text_cache(Bank()(["a", "b"]).caption_embeds)
    null = model.text_cache(Bank()(["", ""]).caption_embeds)
    generated = sample_latents(model, text, 3, [1.0, 0.5], seed=4)
    assert generated.shape == (2, 6, 4, 2, 2) and torch.equal(generated, sample_latents(model, text, 3, [1.0, 0.5], seed=4))
    assert torch.allclose(generated[:, :4], sample_latents(model, text, 2, [1.0, 0.5], seed=4), atol=1e-5)
    assert not torch.allclose(generated, sample_latents(model, text, 3, [1.0, 0.5], seed=5), atol=1e-2)
    plain = sample_latents(model, text, 2, [1.0, 0.5], null=null, guidance=1.0)
    assert torch.equal(plain, sample_latents(model, text, 2, [1.0, 0.5]))
    assert not torch.allclose(plain, sample_latents(model, text, 2, [1.0, 0.5], null=null, guidance=4.0), atol=1e-4)
    given = torch.ones(2, 2, 4, 2, 2)
    assert torch.equal(sample_latents(model, text, 2, [1.0], first=given)[:, :2], given)
    noises = [make_block_noise(s, b, k, (4,), CPU) for s in (0, 1) for b in (0, 1) for k in (0, 1)]
    assert len({tuple(noise.tolist()) for noise in noises}) == 8


def test_a_sampled_block_sees_clean_ones(flow):
    """What the cache holds of an earlier block is of a clean pass, not of its last noisy step."""
    model = CausalVideoTransformer.from_pretrained(flow[0] / "transformer")
    text = model.text_cache(Bank()(["a", "b"]).caption_embeds)
    generated = sample_latents(model, text, 2, [1.0, 0.5], seed=3)
    cache = model.new_cache(2, 4)
    cache.begin_block()
    model(generated[:, :2], torch.zeros(2), text, cache)
    cache.commit()
    cache.begin_block()
    x = make_block_noise(3, 1, 0, (2, 2, 4, 2, 2), CPU)
    x = x - model(x, torch.full((2,), 1000.0), text, cache)
    x = 0.5 * x + 0.5 * make_block_noise(3, 1, 1, x.shape, CPU)
    x = x - 0.5 * model(x, torch.full((2,), 500.0), text, cache)
    assert torch.allclose(x, generated[:, 2:], atol=1e-5)


def test_euler_steps_follow_a_straight_flow_to_its_end():
    """For the velocity of one point, every sampler ends there."""

    class Point(torch.nn.Module):
        def forward(self, x, timestep, text, cache):
            level = (timestep / 1000).clamp_min(1e-6)[:, None, None, None, None]
            return (x - 0.7) / level

    real = CausalVideoTransformer(**SHAPE)
    model = Point()
    model.geometry, model.new_cache = real.geometry, real.new_cache
    text = real.text_cache(torch.zeros(1, 2, 8))
    for euler in (True, False):
        levels = euler_levels(recipe()) if euler else [1.0, 0.6]
        assert torch.allclose(sample_latents(model, text, 2, levels, euler=euler), torch.tensor(0.7), atol=1e-4)


def test_a_frozen_video_is_distinguished_from_one_that_moves(vae, flow, monkeypatch):
    clips, network = data(), CausalVideoVAE.from_pretrained(vae)
    evaluation = VideoEvaluation(clips, clip_latents_of(vae, clips), network, Bank(), recipe(), CPU)
    model = CausalVideoTransformer.from_pretrained(flow[0] / "transformer")
    from recipes.emoji_video.autoencoder import to_video

    monkeypatch.setattr(evaluation, "generate_clips", lambda m, members: to_video(clips.frames[members], CPU))
    real = evaluation.metrics(model, None)
    assert real["motion"] == pytest.approx(1) and real["static_fraction"] == 0 and real["recall"] > 50
    monkeypatch.setattr(evaluation, "generate_clips", lambda m, members: to_video(clips.frames[members][:, [0] * 6], CPU))
    frozen = evaluation.metrics(model, None)
    assert frozen["motion"] == 0 and frozen["static_fraction"] == 1 and frozen["recall"] > 50


def test_a_preview_is_trained_and_resumed(tmp_path, vae):
    made = PreviewConfig(
        model={"latent_channels": 4, "widths": [8, 8], "stride": 8}, batch_size=8, evaluate_every=20, checkpoint_every=10,
        schedule=Schedule(steps=30, learning_rate=1e-2, warmup_steps=1),
    )  # fmt: skip
    found = train_video_preview(made, data(), vae, tmp_path / "run", CPU)
    assert found["psnr"] > 8 and train_video_preview(made, data(), vae, tmp_path / "run", CPU) == found
    with pytest.raises(ValueError, match="stride"):
        train_video_preview(dataclasses.replace(made, model={**made.model, "stride": 4}), data(), vae, tmp_path / "b", CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"height": 4}, "height"), ({"block_frames": 4}, "block_frames"),
     ({"temporal_stride": 4}, "temporal_stride"), ({"channels": 16}, "channels")],
)  # fmt: skip
def test_networks_that_do_not_fit_are_refused(tmp_path, vae, change, message):
    rejects(lambda: train(tmp_path / "run", vae, recipe(model={**SHAPE, **change})), message)
    assert not (tmp_path / "run").exists()


def test_a_teacher_is_given_for_consistency_and_for_nothing_else(tmp_path, vae, flow):
    rejects(lambda: train(tmp_path / "run", vae, recipe(objective="consistency")), "teacher")
    rejects(lambda: train(tmp_path / "run", vae, teacher_folder=flow[0] / "transformer"), "teacher")
    with pytest.raises(ValueError, match="init"):
        train(tmp_path / "run", vae, recipe(model={**SHAPE, "dim": 12}), init_folder=flow[0] / "transformer")


@pytest.mark.parametrize(
    ("change", "message"),
    [({"objective": "gan"}, "objective"), ({"self_rollout_probability": 1.5}, "self_rollout_probability"),
     ({"levels": [500, 1000]}, "steps"), ({"optimizer": "sgd"}, "optimizer"), ({"euler_steps": 0}, "euler_steps")],
)  # fmt: skip
def test_recipes_that_cannot_be_are_refused(change, message):
    rejects(lambda: recipe(**change), message)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("target", 5e6, 8e6), ("target-steps", 5e6, 8e6), ("drafter", 1e6, 2e6), ("drafter-steps", 1e6, 2e6)],
)
def test_packaged_recipes_are_of_the_promised_sizes(name, least, most):
    packaged = load_settings(f"emoji-video-{name}")
    with torch.device("meta"):
        model = CausalVideoTransformer(**packaged.model)
    assert least <= sum(p.numel() for p in model.parameters()) <= most
    assert (packaged.objective == "consistency") == name.endswith("steps")
    assert packaged.max_caption_tokens == model.config.text_len, "longer padding costs time, and is not seen"
    assert sampling_settings(packaged)["euler"] is (packaged.objective == "flow") and model.geometry.block_tokens == 64
