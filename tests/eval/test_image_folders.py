"""Every reader of a folder of images has one order, leaves out the same files, and sees photos as they were taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from vargen.cli.inputs import read_source
from vargen.eval.features import to_uint8_array
from vargen.eval.measurement import MetricModels
from vargen.eval.run import list_images, read_image
from vargen.eval.score import load_reference
from vargen.pipelines.images import preprocess_images
from vargen.reading import on_white
from vargen.scoring.protocol import to_pil, to_tensor

ORIENTATION = 0x0112  # the EXIF tag


def gray_images(folder: Path, levels: Sequence[int], name: str = "{}.png") -> Path:
    """Write an image of each gray level, under a name with that number."""
    folder.mkdir(parents=True, exist_ok=True)
    for level in levels:
        Image.new("L", (8, 8), level).save(folder / name.format(level))
    return folder


@pytest.mark.parametrize(
    "names",
    [
        [f"{i}.png" for i in (0, 1, 2, 9, 10, 11, 100)],
        ["a.png", "a1.png", "a2b3.png", "a2b10.png", "a10.jpg", "b.png"],
        ["2/1.png", "2/10.png", "10/2.png", "x.png"],
        ["007.png", "08.png", "9.png"],
    ],
)
def test_images_come_in_natural_order(tmp_path: Path, names: list[str]) -> None:
    for name in reversed(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (4, 4)).save(tmp_path / name)
    found = list_images(tmp_path, [f"prompt of {name}" for name in names])
    assert [(Path(each.file).relative_to(tmp_path).as_posix(), each.text) for each in found] == [
        (name, f"prompt of {name}") for name in names
    ]
    assert [each.index for each in found] == list(range(len(names)))


def test_hidden_files_thumbnails_and_empty_files_are_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = gray_images(tmp_path / ".cache" / "theirs", [1, 2, 3])  # hidden folders above do not matter
    assert len(list_images(folder)) == 3 and not caplog.records
    skipped = ["._1.png", "__MACOSX/theirs/._2.png", "__MACOSX/3.png", ".thumbnails/1.png", "@eaDir/1.png/THUMB.jpg", "2b.png"]
    for name in skipped:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"" if name == "2b.png" else b"\0\5\26\7 AppleDouble")
    found = list_images(folder, ["1", "2", "empty", "3"])  # an empty file has its line of the prompts, too
    assert [(Path(each.file).name, each.text) for each in found] == [("1.png", "1"), ("2.png", "2"), ("3.png", "3")]
    (line,) = {record.getMessage() for record in caplog.records}
    assert "skipped 6 " in line and "._1.png" in line and "\n" not in line
    with pytest.raises(ValueError, match=r"prompts must be one for each of 4 images .* 1 are empty files, got 3"):
        list_images(folder, ["1", "2", "3"])
    models = MetricModels(extractor="tiny_measures:net")
    assert load_reference(folder, models).count == 3
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "._1.png").write_bytes(b"1")
    with pytest.raises(ValueError, match="holds no images"):
        list_images(tmp_path / "hidden")


def open_lazily(file: Path) -> Image.Image:
    return Image.open(file, formats=["PNG"])


READERS: dict[str, Callable[[Path], Any]] = {
    "read_image": read_image,
    "read_source": lambda file: read_source(file, "image"),
    "features": lambda file: to_uint8_array(open_lazily(file)),
    "scorers": lambda file: to_tensor([open_lazily(file)])[0].permute(1, 2, 0) * 255,
    "scorers of PIL": lambda file: to_pil([open_lazily(file)])[0],
    "image=": lambda file: (
        (preprocess_images(open_lazily(file), VaeImageProcessor(vae_scale_factor=1), (4, 6))[0].permute(1, 2, 0) + 1) * 127.5
    ),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("orientation", "sensor"), [(1, lambda a: a), (3, lambda a: a[::-1, ::-1]), (6, np.rot90)])
def test_photos_are_seen_upright(tmp_path: Path, reader: str, orientation: int, sensor: Callable[[Any], Any]) -> None:
    upright = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    Image.fromarray(np.ascontiguousarray(sensor(upright))).save(tmp_path / "photo.png", exif=exif)
    seen = np.asarray(READERS[reader](tmp_path / "photo.png"))
    assert seen.shape == upright.shape and np.abs(seen.astype(float) - upright).max() < 0.01


def test_damaged_exif_data_is_ignored_and_damaged_pixels_are_not(tmp_path: Path) -> None:
    image = Image.effect_noise((32, 32), 50)
    image.save(tmp_path / "x.jpg", exif=b"Exif\0\0 no TIFF header")
    with open_jpeg(tmp_path / "x.jpg") as opened:
        assert on_white(opened).size == (32, 32)
    image.save(tmp_path / "y.jpg")
    (tmp_path / "y.jpg").write_bytes((tmp_path / "y.jpg").read_bytes()[:-200])
    with open_jpeg(tmp_path / "y.jpg") as opened, pytest.raises(OSError, match="truncated"):
        on_white(opened)


def open_jpeg(file: Path) -> Image.Image:
    return Image.open(file, formats=["JPEG"])
