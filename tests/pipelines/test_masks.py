"""A mask means the same in every form: as a file, an image of any mode, an array or a tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vargen.cli.inputs import read_source
from vargen.pipelines.images import read_mask, validate_source

SIDE = 8
AREA = np.zeros((SIDE, SIDE), dtype=bool)
AREA[2:5, 4:] = True
LEVELS = AREA.astype(np.uint8)


def palette_image(background: tuple[int, int, int], *colors: tuple[int, int, int]) -> Image.Image:
    """The background where the image is kept, and each color in a part of the area."""
    image = Image.fromarray(np.where(AREA, 1 + np.arange(SIDE) % len(colors), 0).astype(np.uint8), "P")
    image.putpalette([level for color in (background, *colors) for level in color])
    return image


def with_alpha(color: Any, alpha: np.ndarray) -> Image.Image:
    image = Image.new("RGBA", (SIDE, SIDE), color)
    image.putalpha(Image.fromarray(alpha.astype(np.uint8)))
    return image


def noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))


def photo_with_hole(alpha: np.ndarray) -> Image.Image:
    image = noise()
    image.putalpha(Image.fromarray(alpha.astype(np.uint8)))
    return image


MASKS: dict[str, Image.Image] = {
    "white on black": Image.fromarray(255 * LEVELS),
    "gray levels 0 and 1": Image.fromarray(LEVELS),
    "soft": Image.fromarray(np.where(AREA, 128, 127).astype(np.uint8)),
    "bits": Image.fromarray(AREA),
    "float": Image.fromarray(LEVELS.astype(np.float32)),
    "float up to 255": Image.fromarray(255 * LEVELS.astype(np.float32)),
    "int32": Image.fromarray(LEVELS.astype(np.int32)),
    "16 bits": Image.fromarray(65535 * LEVELS.astype(np.uint16)),
    "RGB": Image.fromarray(255 * LEVELS).convert("RGB"),
    "RGB of 0 and 1": Image.fromarray(LEVELS).convert("RGB"),
    "red on black": Image.merge("RGB", [Image.fromarray(level * LEVELS) for level in (255, 0, 0)]),
    "blue on black": Image.merge("RGB", [Image.fromarray(level * LEVELS) for level in (0, 0, 255)]),
    "JPEG's colors": Image.fromarray(255 * LEVELS).convert("RGB").convert("YCbCr"),
    "opaque RGBA": Image.fromarray(255 * LEVELS).convert("RGBA"),
    "opaque LA": Image.fromarray(255 * LEVELS).convert("LA"),
    "palette, white": palette_image((0, 0, 0), (255, 255, 255)),
    "palette, gray levels 0 and 1": palette_image((0, 0, 0), (1, 1, 1)),
    "palette, soft": palette_image((127, 127, 127), (128, 128, 128), (255, 255, 255)),
    "palette, dark red": palette_image((0, 0, 0), (128, 0, 0)),
    "hole in a photo": photo_with_hole(np.where(AREA, 0, 255)),
    "soft hole in a photo": photo_with_hole(np.where(AREA, 127, 128)),
    "hole in white": with_alpha("white", np.where(AREA, 0, 255)),
    "hole in alpha of 1": with_alpha("black", 1 - LEVELS),
    "hole in gray": with_alpha("black", np.where(AREA, 0, 255)).convert("LA"),
}


def hole_in_palette() -> Image.Image:
    image = palette_image((9, 9, 9), (7, 7, 7))
    image.info["transparency"] = 1
    return image


MASKS["hole in a palette"] = hole_in_palette()


@pytest.mark.parametrize("name", MASKS)
def test_every_image_of_the_area_is_that_area(name: str) -> None:
    assert (read_mask(MASKS[name]) == AREA).all()


IN_FILES = [name for name, mask in MASKS.items() if mask.mode in ("1", "L", "LA", "P", "RGB", "RGBA")]


@pytest.mark.parametrize("name", IN_FILES)
def test_a_file_is_read_as_the_image_that_it_holds(name: str, tmp_path: Path) -> None:
    noise().save(tmp_path / "image.png")
    MASKS[name].save(tmp_path / "mask.png")
    mask = read_source(tmp_path / "mask.png", "mask_image", keep_alpha=True)
    assert (read_mask(mask) == AREA).all() and read_source(tmp_path / "image.png", "image").mode == "RGB"


def test_a_warning_names_the_file_of_the_mask(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("L", (SIDE, SIDE), 0).save("black.png")
    validate_source(noise(), read_source(Path("black.png"), "mask_image", keep_alpha=True), None, SIDE, processor())
    assert "mask_image 'black.png' regenerates nothing" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64])
def test_arrays_and_tensors_hold_0_and_1(dtype: torch.dtype) -> None:
    values = torch.from_numpy(LEVELS).to(dtype)
    given: list[Any] = [values, values.numpy(), values[None], values[None, None]]
    for mask in given + ([255 * values, 200 * values.numpy()] if dtype == torch.uint8 else []):
        found = validate_source(noise(), mask, None, SIDE, processor())
        assert found is not None and found.mask is not None and (found.mask[0, 0].numpy() == AREA).all()


def processor() -> Any:
    from diffusers.image_processor import VaeImageProcessor

    return VaeImageProcessor(vae_scale_factor=1)


@pytest.mark.parametrize(
    ("mask", "line"),
    [
        (Image.new("L", (SIDE, SIDE), 0), "mask_image regenerates nothing"),
        (Image.new("L", (SIDE, SIDE), 255), "mask_image regenerates the whole image"),
        (Image.new("RGBA", (SIDE, SIDE), (0, 0, 0, 0)), "mask_image regenerates the whole image"),
        (torch.zeros(SIDE, SIDE), "mask_image regenerates nothing"),
        ([MASKS["bits"], Image.new("L", (SIDE, SIDE), 0)], "mask_image regenerates nothing"),
        (MASKS["hole in white"], "mask_image is white on transparent"),
    ],
)
def test_doubtful_masks_are_used_with_a_warning(mask: Any, line: str, caplog: pytest.LogCaptureFixture) -> None:
    images = [noise()] * (len(mask) if isinstance(mask, list) else 1)
    assert validate_source(images, mask, None, SIDE, processor()) is not None
    (record,) = caplog.records
    assert line in record.getMessage() and record.levelname == "WARNING"
    caplog.clear()
    validate_source(noise(), MASKS["hole in a photo"], None, SIDE, processor())
    assert not caplog.records
