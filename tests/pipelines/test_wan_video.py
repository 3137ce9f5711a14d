"""A model of the official layout, from its files to a video: Self-Forcing's pair, Wan's autoencoder and text encoder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rejects import rejects
from tiny_families import brightness, seeded
from tiny_video import randomised
from tiny_wan import SIZE, TARGET, VAE_22, official_files, save_self_forcing, save_wan, transformer_state

from vargen import open_pipeline
from vargen.convert.causal_video import convert_causal_video
from vargen.decoding import PRESETS
from vargen.pipelines.loading import inspect_model

from diffusers import AutoencoderKLWan  # isort: skip  (after the torchvision guard)

VIDEO: dict[str, Any] = {"num_blocks": 3, "output_type": "pt", "scorer": brightness}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return official_files(tmp_path_factory.mktemp("official"))


@pytest.fixture(scope="module")
def folder(files: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_causal_video(output=tmp_path_factory.mktemp("converted") / "model", **files)


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Any:
    return open_pipeline(folder)


@pytest.fixture(scope="module")
def framewise(files: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A pair of one frame a block and one step."""
    place = tmp_path_factory.mktemp("framewise")
    target = save_self_forcing(place / "framewise-1step.pt", transformer_state())
    return open_pipeline(convert_causal_video(**{**files, "transformer": [target], "output": place / "model"}))


def frames(pipe: Any, method: Any, **options: Any) -> torch.Tensor:
    return pipe("a cat", accelerator=method, generator=seeded(5)[0], **{**VIDEO, **options}).frames[0]


def test_official_files_become_an_mp4(pipe: Any, tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    result = pipe("a cat", generator=seeded(0)[0], tau=0.0, num_blocks=2, scorer=brightness)
    assert len(result.frames[0]) == 1 + 5 * 4 and result.frames[0][0].size == SIZE[::-1] and result.fps == 16
    assert result.stats.accelerator == "sdvg" and result.stats.sources == ("target", "draft")
    assert [sum(block.passes.values()) for block in result.stats.blocks] == [4, 5], (
        "the target's cache waits for its next block"
    )
    file = pipe.save_video(result.frames[0], tmp_path / "cat.mp4")
    with av.open(str(file)) as container:
        assert sum(1 for _ in container.decode(container.streams.video[0])) == 21
        assert float(container.streams.video[0].average_rate) == 16


def test_a_folder_says_what_it_is(folder: Path, pipe: Any) -> None:
    said = inspect_model(folder)
    assert (type(said), said.fps, said.num_tokens, said.num_baseline_passes) == (type(pipe), 16, 81, 7 * 5 - 1)
    assert pipe.decoding_model().levels == pytest.approx((1, 0.9375, 5 / 6, 0.625))


def test_prompts_are_cleaned_as_for_wan(pipe: Any) -> None:
    embeds = [pipe.encode_prompt(text)[0] for text in ("a cat &amp;amp; a dog", "  a  cat &\na dog ")]
    assert torch.equal(*embeds) and pipe.normalize_prompt("a\u00a0cat &lt;3").text == "a cat <3"


def test_an_image_is_the_first_frame_where_the_checkpoint_allows(pipe: Any, framewise: Any) -> None:
    red = Image.new("RGB", (64, 64), "red")
    rejects(lambda: frames(pipe, "target", image=red), "image")
    latents = frames(framewise, "target", image=red, output_type="latent")
    assert latents.shape == (4, 16, 2, 4) and framewise.setting("num_blocks") == 21
    shape = frames(framewise, "target", image=red).shape
    assert shape == (13, 3, *SIZE), "four frames a block, after the image"
    assert not torch.allclose(latents[1:], frames(framewise, "target", output_type="latent"), atol=1e-3)


def test_latents_of_wan_22_become_frames_of_its_rate(files: dict[str, Any], tmp_path: Path) -> None:
    wan, target = save_wan(tmp_path / "Wan2.2-TI2V-5B-Diffusers", **VAE_22), tmp_path / "model.pt"
    vae = randomised(AutoencoderKLWan(**VAE_22), 3, 0.2)
    save_self_forcing(target, transformer_state(channels=48))
    given = {"transformer": [target], "wan": wan, "n_head": TARGET["num_heads"], "size": (32, 64)}
    large = open_pipeline(convert_causal_video(output=tmp_path / "out", **given))
    assert large.fps == 24 and large.transformer.geometry.spatial_stride == 16
    found, latents = (frames(large, "target", num_blocks=2, output_type=kind) for kind in ("pt", "latent"))
    assert found.shape == (1 + 5 * 4, 3, 32, 64) and latents.shape == (6, 48, 2, 4)
    whole = vae.decode((latents * 0.9 + 0.1)[None].transpose(1, 2)).sample[0].transpose(0, 1)
    torch.testing.assert_close(found, whole / 2 + 0.5, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=r"they have 48 and 16 latent channels, of which Wan2.1 has 16"):
        convert_causal_video(**{**files, "wan": wan, "output": tmp_path / "other"})


def test_the_target_drafts_with_fewer_steps(files: dict[str, Any], tmp_path: Path) -> None:
    folder = convert_causal_video(**{**files, "draft": [], "output": tmp_path / "out"}, draft_steps="1000,500")
    ladder = open_pipeline(folder)
    assert ladder.resolve_method(None).name == "sdvg" and ladder.draft_transformer is None
    model = ladder.decoding_model()
    assert model.draft_model.transformer is model.transformer and len(model.draft_model.levels) == 2
    inspect_model(folder).validate_method(PRESETS["sdvg"])
    stats = ladder("a cat", generator=seeded(0)[0], tau=-math.inf, **VIDEO).stats
    assert [block.passes for block in stats.blocks][1]["draft"] == 3, "a cache update and two steps"
