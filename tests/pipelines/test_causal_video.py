"""The video pipeline: a folder that package-video makes opens, bad calls are named before work, files are whole."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rejects import rejects
from tiny_video_folder import HOW, OWN, SHARED_FROM, video_folder

from vargen.pipelines import videos as video_files
from vargen.pipelines.causal_video import CausalVideoPipeline
from vargen.pipelines.loading import open_pipeline
from vargen.pipelines.videos import save_video
from vargen.scoring.frames import FrameScorer
from vargen.training.dataset import CaptionBank


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return video_folder(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def pipe(folder: Path) -> CausalVideoPipeline:
    opened = open_pipeline(folder)
    opened.set_progress_bar_config(disable=True)
    return opened


def brightness(images: Any, prompts: Any) -> torch.Tensor:
    return images.mean((1, 2, 3))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_call_is_its_stream(pipe: CausalVideoPipeline) -> None:
    options: dict[str, Any] = {"tau": 0.5, "scorer": brightness, "num_blocks": 4}
    whole = pipe("a waving cat", generator=seeded(3), output_type="pt", **options).frames[0]
    stream = pipe.stream("a waving cat", generator=seeded(3), **options)
    first = next(stream)
    assert first.frames.shape == (2, 3, 16, 16) and 0 <= float(first.frames.min()) <= float(first.frames.max()) <= 1
    assert torch.equal(torch.cat([first.frames, *(block.frames for block in stream)]), whole)
    images = pipe("a waving cat", generator=seeded(3), **options).frames[0]
    assert np.abs(np.stack([np.asarray(each) for each in images]) / 255 - whole.permute(0, 2, 3, 1).numpy()).max() < 0.003


def test_a_list_of_prompts_stops_as_a_whole(pipe: CausalVideoPipeline) -> None:
    calls = []

    def stop(pipeline: Any, step: int, block: int, inputs: Any) -> dict[str, bool]:
        calls.append((step, block))
        return {"stop": block == 1}

    result = pipe(["a", "b"], accelerator="target", generator=seeded(), callback_on_step_end=stop)
    assert [len(video) for video in result.frames] == [2, 0] and all(each.stopped for each in result.stats)
    assert calls[-1][1] == 1, "nothing runs after that"
    arrays = pipe(["a", "b"], accelerator="target", output_type="np", callback_on_step_end=stop).frames
    assert [len(video) for video in arrays] == [2, 0]


def test_the_packaged_scorer_scores_where_none_is_given(pipe: CausalVideoPipeline) -> None:
    stats = pipe("a red apple", num_blocks=2, generator=seeded()).stats
    assert math.isfinite(stats.blocks[1].score) and len(stats.blocks[1].scores) == 2 and not stats.failures


def test_scorers_are_asked_about_the_style_of_a_model_of_one(pipe: CausalVideoPipeline) -> None:
    assert pipe.config.prompt_styles == ["3d"] and pipe.scorer_prompt("a cat") == "a cat, 3d style"
    assert pipe.scorer_prompt("a 3D cat") == "a 3D cat" and pipe.scorer_prompt("a3d cat") == "a3d cat, 3d style"


def test_prompts_switch_between_blocks(pipe: CausalVideoPipeline) -> None:
    seen: list[str] = []

    def score(images: Any, prompts: Any) -> torch.Tensor:
        seen.append(prompts[0])
        return brightness(images, prompts)

    options: dict[str, Any] = {"scorer": score, "tau": -math.inf, "num_blocks": 4}
    plain = pipe("a cat", output_type="latent", generator=seeded(), **options).frames[0]
    assert seen == ["a cat, 3d style"] * 3, "this model draws one style"
    stream = pipe.stream("a cat", generator=seeded(), **options)
    live = [next(stream).latents, next(stream).latents]
    bound = pipe.resolve_frame_scorer(score).bind(pipe.scorer_prompt("a dog"))
    stream.change_prompt(pipe.encode_video_condition("a dog"), bound)
    changed = torch.cat([*live, *(block.latents for block in stream)])
    assert torch.equal(plain[:4], changed[:4]) and not torch.allclose(plain[4:], changed[4:])
    assert seen[3:] == ["a cat, 3d style", "a dog, 3d style", "a dog, 3d style"]


def test_a_video_starts_from_an_image(pipe: CausalVideoPipeline) -> None:
    red, blue = (Image.new("RGB", (16, 16), color) for color in ("red", "blue"))
    options: dict[str, Any] = {"accelerator": "target", "output_type": "pt"}
    a, b = (pipe("a cat", image=image, generator=seeded(), **options).frames for image in (red, blue))
    assert a.shape == (1, 7, 3, 16, 16) and not torch.allclose(a[:, 1:], b[:, 1:])
    latents = pipe("a cat", image=red, generator=seeded(), accelerator="target", output_type="latent").frames
    decoded = pipe.vae.decode(latents.to(a))[0] / 2 + 0.5
    torch.testing.assert_close(a[0], decoded.clamp(0, 1), atol=1e-4, rtol=0, msg="the image is part of the video")


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("draft_transformer", {"block_frames": 3}, "draft_transformer and transformer do not belong together"),
        ("draft_transformer", {"channels": 3}, "draft_transformer and transformer do not belong together"),
        ("draft_transformer", {"motion_levels": 0}, "motion_levels"),
        ("vae", {"latent_channels": 8}, "vae and transformer do not belong together"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(pipe, part: str, changes: dict[str, Any], message: str) -> None:
    parts = {name: getattr(pipe, name) for name in ("vae", "transformer", "draft_transformer")}
    shapes = {"draft_transformer": OWN, "vae": {"size": 16, "widths": (8, 16, 64), "transformer_blocks": 1}}
    parts[part] = type(parts[part])(**{**shapes[part], **changes})
    rejects(lambda: CausalVideoPipeline(**parts), message)


@pytest.mark.parametrize(
    "defaults",
    [{"levels": [0.5, 0.7]}, {"levels": []}, {"guidance": -1}, {"num_blocks": 0}, {"tau": math.nan}, {"euler": 1}, {"k": 3}]
    + [{"scored_frames": wrong} for wrong in (0, 1.5, "all")],
)
def test_defaults_that_a_call_could_not_use_are_refused(pipe, defaults: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"defaults|tau"):
        CausalVideoPipeline(pipe.vae, pipe.transformer, defaults=defaults)


def test_scorers_of_images_see_as_many_frames_of_a_block_as_the_checkpoint_says(pipe) -> None:
    seen = []

    def counting(images: torch.Tensor, prompts: list[str]) -> list[float]:
        seen.append(len(images))
        return [0.0] * len(images)

    frames = pipe.transformer.geometry.block_frames
    assert frames >= 2
    for said, expected in ((None, frames), (1, 1), (2, 2)):
        given = CausalVideoPipeline(
            pipe.vae, pipe.transformer, pipe.text_encoder, pipe.tokenizer, pipe.draft_transformer,
            defaults={**HOW, "scored_frames": said},
        )  # fmt: skip
        for scorer, count in ((counting, expected), (FrameScorer(counting), frames)):
            seen.clear()
            result = given("a cat", num_blocks=3, tau=-1.0, scorer=scorer, output_type="pt")
            assert seen and set(seen) == {count} and result.frames[0].shape[0] == 3 * frames


def test_drafts_are_scored_on_the_frames_of_a_given_decoder(pipe) -> None:
    seen: list[torch.Size] = []

    class Tiny:
        def decode_block(self, latents: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
            return latents[:, :1, :3].clamp(-1, 1), None

    def size_of(images: torch.Tensor, prompts: Any) -> torch.Tensor:
        seen.append(images.shape)
        return torch.zeros(len(images))

    options = {"num_blocks": 3, "tau": -1.0, "scorer": size_of, "output_type": "pt"}
    plain, other = (pipe("a cat", preview_decoder=each, generator=seeded(), **options) for each in (None, Tiny()))
    assert torch.equal(plain.frames, other.frames) and seen[0] != seen[-1] == (1, 3, 2, 2)
    again = pipe("a cat", preview_decoder=pipe.preview_decoder, generator=seeded(), **options)
    assert torch.equal(plain.frames, again.frames) and seen[-1] == seen[0]


def test_guidance_leads_away_from_the_empty_caption_of_training(pipe) -> None:
    defaults = {**HOW, "guidance": 2.0, "euler": True, "levels": [1.0, 0.5]}
    guided = CausalVideoPipeline(pipe.vae, pipe.transformer, pipe.text_encoder, pipe.tokenizer, defaults=defaults)
    guided.set_progress_bar_config(disable=True)
    bank = CaptionBank(SHARED_FROM, 20, torch.device("cpu"))([""])
    mine = guided.encode_empty_caption().caption_embeds
    assert torch.allclose(mine[0], bank.caption_embeds[0][bank.caption_mask[0]], atol=2e-3)
    assert len(guided("a cat", num_blocks=1).frames[0]) == 2
    text = guided.decoding_model().start(guided.encode_video_condition("a cat that waves"), 2).text
    hidden = text.bias[:, 0, 0].isinf().sum(1)
    assert hidden[0] == 0 and hidden[1] == text.keys[0].shape[2] - 1 - mine.shape[1], "rows that fill up are not seen"


# -- files


def frames(count: int = 5, size: tuple[int, int] = (18, 15)) -> list[Image.Image]:
    return [Image.new("RGB", size, (40 * i, 0, 255 - 40 * i)) for i in range(count)]


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".mp4"])
def test_a_file_holds_the_frames_and_their_rate(tmp_path: Path, suffix: str) -> None:
    if suffix == ".mp4":
        av = pytest.importorskip("av")
    file = save_video(frames(), tmp_path / f"a{suffix}", 12.5)
    if suffix == ".mp4":
        with av.open(str(file)) as container:
            stream = container.streams.video[0]
            shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
            assert abs(float(stream.average_rate) - 12.5) < 0.01
        shown = [each[:15, :18] for each in shown]
    else:
        with Image.open(file) as opened:
            shown = []
            for number in range(opened.n_frames):
                opened.seek(number)
                assert opened.convert("RGB") and opened.info["duration"] == 80 and opened.info["loop"] == 0
                shown.append(np.asarray(opened.convert("RGB")))
    assert len(shown) == 5
    for made, given in zip(shown, frames(), strict=True):
        assert np.abs(made.astype(float) - np.asarray(given)).mean() < 12


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_a_full_disk_leaves_the_old_file_as_it_was(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / f"a{suffix}"
    file.write_bytes(b"old")

    def fills_up(*given: Any, **_: Any) -> None:
        next(Path(each) for each in given if isinstance(each, str | Path)).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(video_files, "Mp4Writer", fills_up)
    monkeypatch.setattr(Image.Image, "save", fills_up)
    if suffix == ".mp4":
        pytest.importorskip("av")
    with pytest.raises(OSError, match="No space left"):
        save_video(frames(), file, 12)
    assert file.read_bytes() == b"old" and [each.name for each in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("given", "name", "fps", "message"),
    [
        ([], "a.gif", 12, "frames"),
        (frames(), "a.avi", 12, "must end in one of"),
        (frames(), "a.gif", 0, "fps"),
        ([*frames(1), *frames(1, (4, 4))], "a.gif", 12, "one size"),
        (np.full((2, 4, 4, 3), math.nan), "a.gif", 12, "finite"),
    ],
)
def test_bad_videos_are_named(tmp_path: Path, given: Any, name: str, fps: float, message: str) -> None:
    rejects(lambda: save_video(given, tmp_path / name, fps), message)
    assert not list(tmp_path.iterdir())
