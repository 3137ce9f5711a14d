"""Images that a call is given as numbers: uint8 is scaled, and other numbers than those of an image are refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import class_pipeline, class_var_pipeline
from tiny_video_folder import video_folder

from vargen import open_pipeline

Call = Callable[[Any], torch.Tensor]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, int, Call]]:
    """By use: the argument, the side of the image in pixels, and a call with an image."""
    token, scale, video = class_pipeline(), class_var_pipeline(), open_pipeline(video_folder(tmp_path_factory.mktemp("runs")))
    for pipe in (token, scale, video):
        pipe.set_progress_bar_config(disable=True)
    generated: Any = {"class_labels": 3, "output_type": "latent"}
    made: Any = {"num_blocks": 1, "accelerator": "target", "output_type": "latent"}
    return {
        "next-scale": ("image", 8, lambda image: scale(image=image, strength=0.4, generator=seeded(), **generated).images),
        "video": ("image", 16, lambda image: video("a cat", image=image, generator=seeded(), **made).frames),
        "next-token tokens": ("images", 8, token.encode_image),
        "next-scale tokens": ("images", 8, scale.encode_image),
    }


USES = ["next-scale", "video", "next-token tokens", "next-scale tokens"]


@pytest.mark.parametrize("use", USES)
def test_whole_numbers_of_a_byte_are_scaled(calls: dict[str, tuple[str, int, Call]], use: str) -> None:
    _, side, call = calls[use]
    array = np.random.default_rng(0).integers(0, 256, (1, side, side, 3), dtype=np.uint8)
    scaled = torch.from_numpy(array).permute(0, 3, 1, 2) / 255
    expected = call(scaled)
    assert not torch.equal(expected, call(torch.ones_like(scaled)))
    for given in (array, torch.from_numpy(array).permute(0, 3, 1, 2), scaled.permute(0, 2, 3, 1).numpy(), scaled.double()):
        assert torch.equal(call(given), expected)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("factor", [255.0, -1.0, float("nan"), float("inf")])
def test_numbers_outside_of_the_range_are_refused(calls: dict[str, tuple[str, int, Call]], use: str, factor: float) -> None:
    name, side, call = calls[use]
    for given in (torch.full((1, 3, side, side), factor), np.full((1, side, side, 3), factor)):
        with pytest.raises(ValueError, match=rf"^{name} must hold numbers from 0 to 1, or be uint8 from 0 to 255"):
            call(given)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.int8])
def test_numbers_of_other_types_are_refused(calls: dict[str, tuple[str, int, Call]], dtype: torch.dtype) -> None:
    for name, side, call in calls.values():
        with pytest.raises(TypeError, match=rf"^{name} must hold .*{dtype}"):
            call(torch.ones(1, 3, side, side, dtype=dtype))


def test_an_image_file_is_what_its_numbers_are(calls: dict[str, tuple[str, int, Call]], tmp_path: Path) -> None:
    from PIL import Image

    for _, side, call in calls.values():
        array = np.random.default_rng(1).integers(0, 256, (side, side, 3), dtype=np.uint8)
        assert torch.equal(call(Image.fromarray(array)), call(array[None]))
