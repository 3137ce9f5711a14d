"""The clips of the video data set: cut so that they move and loop, held out by concept, built again after a stop."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image
from rejects import rejects

from recipes.emoji.sources import Source
from recipes.emoji_video import clips as video_data
from recipes.emoji_video.animation import FPS, read_animation, select_clip
from recipes.emoji_video.clips import (
    FRAMES,
    VideoDataset,
    build_video_dataset,
    load_video_dataset,
    motion_weights,
    window_frames,
)

SIDE = 16


def swinging(count: int, period: int, size: int = SIDE) -> np.ndarray:
    """A square that swings to and fro once in `period` frames: uint8 `[count, size, size, 3]`."""
    frames = np.full((count, size, size, 3), 255, dtype=np.uint8)
    for i, frame in enumerate(frames):
        x = round((size - 6) / 2 * (1 - np.cos(2 * np.pi * i / period)))
        frame[5:11, x : x + 6] = (200, 30, 30)
    return frames


def webp(frames: np.ndarray, milliseconds: int = 42, kind: str = "WEBP") -> bytes:
    file = io.BytesIO()
    images = [Image.fromarray(frame) for frame in frames]
    images[0].save(file, kind, save_all=True, append_images=images[1:], duration=milliseconds, lossless=True)
    return file.getvalue()


def tarball(path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


@pytest.fixture
def packages(tmp_path):
    """Two packages of animations, one emoji in both, and names; with their real sums."""
    import hashlib

    entries = [
        {"hexcode": "1F980", "label": "crab", "tags": ["zodiac"], "group": 3},
        {"hexcode": "1F44B", "label": "waving hand", "tags": ["wave"], "group": 1, "skins": [{"hexcode": "1F44B-1F3FB"}]},
        {"hexcode": "1F600", "label": "grinning face", "tags": ["smile"], "group": 0},
    ]
    groups = [{"order": i, "message": f"group {i}"} for i in range(4)]
    moving, still = webp(swinging(48, 48)), webp(swinging(1, 48))
    contents = {
        "anim-a": {"assets/1f980.webp": moving, "assets/1f44b-1f3fb.webp": moving, "assets/1f600.webp": still},
        "anim-b": {"assets/1f44b.webp": webp(swinging(30, 97)), "assets/1f980.webp": moving},
        "": {"en/data.json": json.dumps(entries).encode(), "en/messages.json": json.dumps({"groups": groups}).encode()},
    }
    folder = tmp_path / "cache" / "npm"
    folder.mkdir(parents=True)
    sources = []
    for style, files in contents.items():
        source = Source(f"pack{style}", "1.0.0", "", style)
        tarball(folder / source.tarball, files)
        digest = hashlib.sha256((folder / source.tarball).read_bytes()).hexdigest()
        sources.append(Source(source.name, "1.0.0", digest, style))
    return tmp_path / "cache", tuple(sources)


def test_a_clip_holds_each_whole_animation_once_with_its_name(packages):
    cache, sources = packages
    built = build_video_dataset(cache=cache, size=SIDE, progress=False, sources=sources)
    assert [record["label"] for record in built.records] == ["crab", "waving hand"]
    assert built.frames.shape == (2, FRAMES, SIDE, SIDE, 3)
    assert built.report == {"still": 1, "skin_tones": 1, "duplicates": 1, "loops": 1}
    crab, wave = built.records
    assert crab["loops"] and not wave["loops"] and crab["style"] == "3d" and crab["motion"] > 1
    assert not list(cache.glob(".*-parts"))
    again = load_video_dataset(cache / f"emoji-video-{SIDE}")
    assert again.records == built.records and np.array_equal(again.frames, built.frames)


def test_a_build_goes_on_with_the_package_it_was_at(packages, monkeypatch):
    cache, sources = packages
    expected = build_video_dataset(cache / "other", cache=cache, size=SIDE, progress=False, sources=sources)
    clips, made = video_data._clips, []

    def kill(source, *rest):
        if source.style == "anim-b" and len(made) == 1:
            made.append("killed")
            raise KeyboardInterrupt
        made.append(source.style)
        return clips(source, *rest)

    monkeypatch.setattr(video_data, "_clips", kill)
    with pytest.raises(KeyboardInterrupt):
        build_video_dataset(cache=cache, size=SIDE, progress=False, sources=sources)
    assert not (cache / f"emoji-video-{SIDE}").exists()
    built = build_video_dataset(cache=cache, size=SIDE, progress=False, sources=sources)
    assert made == ["anim-a", "killed", "anim-b"]
    assert built.records == expected.records and np.array_equal(built.frames, expected.frames)


@pytest.mark.parametrize("size", [0, 12, 20, 64.0, True])
def test_a_size_that_cannot_be_is_refused_before_anything_is_fetched(tmp_path, size):
    rejects(lambda: build_video_dataset(cache=tmp_path, size=size), "size")
    assert not list(tmp_path.iterdir())


def test_damage_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m recipes emoji-video-data"):
        load_video_dataset(tmp_path)
    (tmp_path / "records.json").write_text("[{}]")
    np.save(tmp_path / "frames.npy", np.zeros((2, 24, 8, 8, 3), np.uint8))
    with pytest.raises(ValueError, match="does not fit 1 records"):
        load_video_dataset(tmp_path)
    (tmp_path / "frames.npy").write_bytes(b"no array")
    rejects(lambda: load_video_dataset(tmp_path), "damaged")


@pytest.mark.parametrize("period", [24, 36, 48, 72])
def test_a_loop_is_cut_as_a_loop_that_moves(period):
    frames = swinging(72, period)
    cut = select_clip(frames, 3.0, FRAMES)
    assert cut.loops and cut.motion > 2 and 0.5 <= cut.speed <= 1.6
    assert len(cut.positions) == FRAMES and cut.positions.max() < 72


def test_what_does_not_come_back_does_not_loop():
    frames = swinging(72, 145)
    assert not select_clip(frames, 3.0, FRAMES).loops


def test_what_stays_still_has_no_motion():
    assert select_clip(np.repeat(swinging(1, 9), 72, 0), 3.0, FRAMES).motion == 0
    assert select_clip(swinging(1, 9), 0.0, FRAMES).motion == 0


def test_an_animation_that_rests_for_most_of_its_time_is_cut_where_it_moves():
    moving, resting = swinging(48, 48), np.repeat(swinging(1, 48), 96, 0)
    frames = np.concatenate([resting, moving])
    cut = select_clip(frames, len(frames) / 24, FRAMES)
    assert cut.loops and (cut.positions >= 90).mean() > 0.9


def test_a_file_is_generated_on_white_with_its_length():
    clear = np.zeros((3, 8, 8, 4), np.uint8)
    clear[:, 2:6, 2:6] = (10, 20, 30, 255)
    clear[1, 2:6, 2:6, 0] = 200
    clear[2, 2:6, 2:6, 1] = 200
    frames, seconds = read_animation(webp(clear, 50, "PNG"), 8)  # of which Pillow writes transparency for small pictures, too
    assert frames.shape == (3, 8, 8, 3) and seconds == pytest.approx(0.15)
    assert (frames[0, 0, 0] == 255).all() and tuple(frames[0, 4, 4]) == (10, 20, 30)
    assert FPS == 12


def test_windows_go_round_loops_and_stop_at_ends():
    assert window_frames({"loops": True}, 5, 3, 4).tolist() == [3, 4, 0, 1]
    assert window_frames({"loops": False}, 5, 1, 4).tolist() == [1, 2, 3, 4]
    assert window_frames({"loops": False}, 5, 3, 4).max() == 4 and len(window_frames({"loops": False}, 5, 3, 4)) == 4
    assert window_frames({"loops": False}, 3, 7, 5).tolist() == [0, 1, 2, 2, 2]


def test_clips_are_generated_by_the_root_of_their_motion_and_still_ones_never():
    records = [{"motion": m} for m in (0.0, 1.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)]
    weights = motion_weights(records)
    assert weights.sum() == pytest.approx(1) and weights[0] == 0 and weights[2] == pytest.approx(2 * weights[1])
    assert motion_weights([{"motion": 0.0}] * 4).tolist() == [0.25] * 4


def test_unknown_splits_are_refused():
    rejects(lambda: VideoDataset(np.zeros((0, 1, 8, 8, 3), np.uint8), []).indices("test"), "test")
