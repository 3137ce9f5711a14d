"""Still images in motion: what the words say is what the frames show, and training never shows the held-out combinations."""

import random

import numpy as np
import pytest
import torch
from tiny_clips import CPU, VAE, clip_latents_of, data
from tiny_stills import still, stills

from recipes.emoji_video.batches import PreparedAhead
from recipes.emoji_video.lora import LoRAConfig
from recipes.emoji_video.motions import MOTIONS, SPEEDS, is_held_out_motion, motion_caption, render, rest
from recipes.emoji_video.moving_stills import MixedBatches, MovingStills
from vargen.models.tokenizers.video_vae import CausalVideoVAE

SIDE, FRAMES, SIZE = 32, 24, 0.74


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vae")
    CausalVideoVAE(**VAE).save_pretrained(folder)
    return folder


def track(name: str, speed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Center in x and y (nan if nothing is visible), and area of what a motion shows, as fractions of the frame."""
    motion = MOTIONS[name]
    frames = render(still(), motion.poses(FRAMES, motion.rates[speed], SIZE), SIDE)
    dark = (frames.min(-1) < 128).astype(float)
    area = dark.sum((1, 2))
    with np.errstate(invalid="ignore"):
        x = (dark.sum(1) * np.arange(SIDE)).sum(1) / area / SIDE
        y = (dark.sum(2) * np.arange(SIDE)).sum(1) / area / SIDE
    return x, y, area / SIDE**2


def test_each_motion_moves_as_its_words_say():
    x, y, area = track("bounce")
    assert np.ptp(y) > 0.15 and np.ptp(x) < 0.05
    x, y, area = track("fall")
    assert (np.diff(y[:6]) > 0).all() and np.nanstd(x) < 0.05
    x, y, area = track("roll")
    assert (np.diff(x[:4]) > 0).all() and np.nanstd(y) < 0.05
    x, y, area = track("slide")
    assert x[0] != x[0] or x[0] < 0.2
    assert abs(x[-1] - 0.5) < 0.05 and (np.diff(x[2:]) > -1e-6).all()
    x, y, area = track("shake")
    assert np.ptp(x) > 0.1 and (np.diff(np.sign(np.diff(x))) != 0).sum() > 6
    x, y, area = track("pulse")
    assert area.max() > 3 * area.min() and np.ptp(x) < 0.05
    x, y, area = track("blink")
    shown = area > 0.1
    assert not shown[0] and shown[-8:].all() and (np.diff(shown.astype(int)) != 0).sum() >= 3
    for name in ("spin", "wave"):
        x, y, area = track(name)
        assert area.std() < 0.05 * area.mean()


def test_a_spinning_image_turns_clockwise_and_a_waving_one_swings_back():
    upright, quarter = render(still(), MOTIONS["spin"].poses(FRAMES, 1, SIZE), SIDE)[[0, 6]].astype(int)
    red, blue = (quarter[..., 0] - quarter[..., 2] > 100), (quarter[..., 2] - quarter[..., 0] > 100)
    columns = np.arange(SIDE)
    assert upright[10, 16, 0] > upright[10, 16, 2] and (red * columns).sum() / red.sum() > (blue * columns).sum() / blue.sum()
    angles = MOTIONS["wave"].poses(FRAMES, 1, SIZE).angle
    assert angles.max() > 20 and angles.min() < -20 and abs(angles[12]) < 1e-6


def test_what_loops_ends_where_it_begins():
    for motion in MOTIONS.values():
        if motion.loops:
            one, two = motion.poses(FRAMES, 1, SIZE), motion.poses(FRAMES + 1, (FRAMES + 1) / FRAMES, SIZE)
            assert np.allclose(two.x[-1], one.x[0]) and np.allclose(two.width[-1], one.width[0])


@pytest.mark.parametrize("size", [0.68, 0.8])
def test_a_motion_follows_an_image_at_rest_and_stays_in_the_frame(size):
    resting = rest(size)
    for motion in MOTIONS.values():
        poses = motion.poses(FRAMES, motion.rates[0], size)
        if motion.loops:
            for name in ("x", "y", "angle", "width", "height"):
                assert np.isclose(getattr(poses, name)[0], getattr(resting, name)[0]), motion.verb
        else:
            assert np.isclose(poses.width[-1], size) and np.isclose(poses.x[-1], 0) and poses.visible[-1]
    bouncing = MOTIONS["bounce"].poses(240, 1, size)
    assert (np.abs(bouncing.y) + bouncing.height / 2).max() < 0.5


def test_faster_is_faster():
    for motion in MOTIONS.values():
        assert list(motion.rates) == sorted(motion.rates)


def test_captions_read_well():
    rng = random.Random(0)
    bounce, slide = MOTIONS["bounce"], MOTIONS["slide"]
    texts = {motion_caption(bounce, "apple, 3d style", "an", "quickly", rng) for _ in range(200)}
    assert {
        "an apple bouncing quickly, 3d style",
        "a quickly bouncing apple, 3d style",
        "an apple that bounces quickly, 3d style",
    } <= texts
    assert not any("an bouncing" in text or "  " in text for text in texts)
    assert all("quickly" in text for text in texts), "a caption determines the speed"
    texts = {motion_caption(slide, "rice", "", "", rng) for _ in range(200)}
    assert texts == {"rice sliding in from the left", "rice slides in from the left"}
    assert len(SPEEDS) == 3


def test_training_never_shows_a_held_out_combination(monkeypatch):
    config = LoRAConfig(still_fraction=0.5)
    source = MovingStills(stills(), config, FRAMES, SIDE, 4)
    seen = []
    monkeypatch.setattr(source, "render_clip", lambda index, motion, rng: seen.append((str(index), motion)))
    source.examples(0, 600)
    named = {motion: name for name, motion in MOTIONS.items()}
    pairs = {(concept, named[motion]) for concept, motion in seen}
    every = {(str(i), name) for i in range(12) for name in MOTIONS}
    held_out = {pair for pair in every if is_held_out_motion(*pair)}
    assert held_out and not pairs & held_out and len(pairs) > 0.9 * len(every - held_out)


def test_a_batch_mixes_clips_and_moving_stills_as_a_function_of_its_step(vae):
    clips = data(frames=6, size=16)
    network = CausalVideoVAE.from_pretrained(vae)
    config = LoRAConfig(batch_size=4, still_fraction=0.5, caption_dropout=0.0, motion_label_probability=1.0)
    batches = MixedBatches(clips, stills(), clip_latents_of(vae, clips), network, config, 2, 2, CPU)
    batch, again, other = batches(1), batches(1), batches(2)
    assert torch.equal(batch.clean[2:], batches(0).clean[2:]), "moving stills are used in two steps"
    assert batch.clean.shape == (4, 6, 4, 2, 2) and batch.weights.shape == (4, 6, 1, 2, 2)
    assert torch.equal(batch.clean, again.clean) and batch.texts == again.texts and batch.texts != other.texts
    words = [word for motion in MOTIONS.values() for word in (motion.participle, motion.verb)]
    assert [any(word in text for word in words) for text in batch.texts] == [False, False, True, True]
    assert batch.motion.max() < 2


def test_a_batch_prepared_ahead_is_the_one_of_its_step():
    computed = []
    ahead = PreparedAhead(lambda step: computed.append(step) or step)  # type: ignore[arg-type,return-value]
    assert [ahead(step) for step in (3, 4, 5, 9, 2)] == [3, 4, 5, 9, 2], "also after a jump"
    ahead._pool.shutdown()
    assert sorted(computed) == [2, 3, 3, 4, 5, 6, 9, 10], "in a run of steps, none is computed twice"


def test_clips_follow_a_block_of_their_first_frame_without_loss(vae):
    clips = data(frames=6, size=16)
    config = LoRAConfig(batch_size=4, still_fraction=0.5)
    batch = MixedBatches(clips, stills(), clip_latents_of(vae, clips), CausalVideoVAE.from_pretrained(vae), config, 2, 2, CPU)(
        1
    )
    assert torch.equal(batch.clean[:, 0], batch.clean[:, 1]) and not batch.weights[:, :2].any()
    assert batch.weights[:, 2:].gt(0).all()


def test_a_fraction_of_stills_is_at_most_one():
    with pytest.raises(ValueError, match="still_fraction"):
        LoRAConfig(still_fraction=1.5)
