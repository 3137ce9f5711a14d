"""ImageFile files are opened as pixels and nothing else: no program runs, nothing waits, nothing is too large."""

import ast
import os
import struct
import subprocess
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rejects import rejects

import vargen
from vargen.cli.inputs import read_source
from vargen.eval.run import UnreadableImageError, list_images, read_image
from vargen.image_metadata import read_parameters
from vargen.reading import FORMATS, ImageFileError, on_white, open_image, open_regular

ROOT = Path(vargen.__file__).resolve().parents[1]
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EndProlog\nshowpage\n%%EOF\n"


def huge_png(side: int) -> bytes:
    """The beginning of a PNG picture of so many pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + b"\0\0\0\0IDAT"


READERS = [read_image, lambda path: read_source(path, "image"), lambda path: list_images(path.parent)[0].text]


@pytest.mark.parametrize("reader", READERS)
def test_an_image_of_postscript_starts_no_program(tmp_path: Path, monkeypatch: Any, reader: Any) -> None:
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **_: started.append(words))
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", "gs", raising=False)
    (tmp_path / "x.png").write_bytes(EPS)
    try:
        reader(tmp_path / "x.png")
    except ValueError as error:
        assert "x.png" in str(error) and "\n" not in str(error)
    assert not started


def test_postscript_in_an_open_file_starts_none_either(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(EPS)
    with (tmp_path / "x").open("rb") as file, pytest.raises(ImageFileError, match="no image"), open_image(file):
        pass


def test_every_place_that_opens_images_does_so_here() -> None:
    folders = ("vargen", "pipelines", "kernels", "benchmarks", "examples")
    files = [ROOT / "app.py", *(file for folder in folders for file in (ROOT / folder).rglob("*.py"))]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Image.open":
                assert any(word.arg == "formats" for word in node.keywords), f"{file}:{node.lineno}: any format is opened"


@pytest.mark.parametrize("format", FORMATS)
def test_all_its_formats_are_read(tmp_path: Path, format: str) -> None:
    Image.new("RGB", (4, 4), "red").save(tmp_path / "picture", format)
    red = np.asarray(read_image(tmp_path / "picture"))
    assert red.shape == (4, 4, 3) and np.abs(red.astype(int) - (255, 0, 0)).max() < 4


@pytest.mark.parametrize("side", [9_000, 12_000, 60_000])
def test_too_many_pixels_are_refused_before_they_are_decoded(tmp_path: Path, side: int, recwarn: Any) -> None:
    (tmp_path / "large.png").write_bytes(huge_png(side))
    rejects(lambda: read_source(tmp_path / "large.png", "image"), "large.png", ImageFileError)
    rejects(lambda: read_image(tmp_path / "large.png"), "large.png", UnreadableImageError)
    assert not recwarn.list


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in the file system")
def test_pipes_devices_and_folders_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.png")
    for path, reason in (
        (tmp_path / "x.png", "not a regular file"),
        (Path(os.devnull), "not a regular file"),
        (tmp_path, "directory"),
    ):
        with pytest.raises(OSError, match=reason):
            open_regular(path)
        with pytest.raises(ImageFileError, match=f"image .* cannot be read: .*{reason}"):
            read_source(path, "image")
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with open_regular(tmp_path / "link") as opened:
        assert opened.read() == b"1"


def test_transparent_parts_are_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    image.save(tmp_path / "x.png")
    expected = [[[255, 255, 255], [10, 20, 30]]]
    assert np.asarray(read_image(tmp_path / "x.png")).tolist() == expected
    assert np.asarray(read_source(tmp_path / "x.png", "image")).tolist() == expected
    assert np.asarray(on_white(Image.new("L", (1, 1), 7))).tolist() == [[[7, 7, 7]]]


def test_deep_channels_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(tmp_path / "x.png")
    rejects(lambda: read_source(tmp_path / "x.png", "image"), "x.png", ImageFileError)


@pytest.mark.parametrize("length", [0, 5, 40, 60])
def test_damaged_files_are_named(tmp_path: Path, length: int) -> None:
    Image.effect_noise((32, 32), 50).save(tmp_path / "x.png")
    (tmp_path / "x.png").write_bytes((tmp_path / "x.png").read_bytes()[:length])
    rejects(lambda: read_source(tmp_path / "x.png", "image"), "x.png", ImageFileError)


def test_a_huge_part_of_a_png_is_not_read(tmp_path: Path) -> None:
    """A text of 3 GB before the pixels: Pillow would read it whole."""
    file, whole = tmp_path / "a.png", tmp_path / "whole.png"
    Image.new("RGB", (2, 2)).save(whole)
    data, size = whole.read_bytes(), 3 * 10**9
    with file.open("wb") as opened:
        opened.write(data[:33] + size.to_bytes(4, "big") + b"tEXtvargen\0")
        opened.truncate(33 + 12 + size)
        opened.seek(33 + 12 + size)
        opened.write(data[33:])
    tracemalloc.start()
    with pytest.raises(ValueError, match="not a readable PNG"):
        read_parameters(file)
    with pytest.raises(ImageFileError), open_image(file) as image:
        image.load()
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()
    with open_image(whole) as image:
        assert image.size == (2, 2)
