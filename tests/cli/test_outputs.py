"""Names and files of pictures."""

import json
import random
import string
from pathlib import Path

import pytest
from PIL import Image

from vargen.cli.outputs import LONGEST_SLUG, Target, check_writable, save_image, slug, targets


def test_slugs_of_ordinary_and_hostile_prompts() -> None:
    assert slug("A red apple!") == "a-red-apple"
    assert slug("Crème brûlée") == "creme-brulee"
    assert slug("../../etc/passwd") == "etc-passwd"
    assert slug(".hidden") == "hidden"
    assert slug("苹果") == slug("...") == slug("") == "image"
    assert slug("CON") == "image-con"
    assert slug("com1") == "image-com1"


def test_every_slug_is_a_safe_short_name() -> None:
    draw = random.Random(0)
    alphabet = string.printable + 'äßçñøÅ苹果🍎\x00\u202e/\\:*?"<>|.' * 4
    for _ in range(2000):
        name = slug("".join(draw.choices(alphabet, k=draw.randrange(120))))
        assert 1 <= len(name) <= LONGEST_SLUG
        assert set(name) <= set(string.ascii_lowercase + string.digits + "-")
        assert not name.startswith("-") and not name.endswith("-")
        assert slug(name) == name


def test_output_is_a_file_a_folder_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exists.d").mkdir()

    def paths(output: str | None, *stems: str) -> list[str]:
        return [target.path.as_posix() for target in targets(output, list(stems))]

    assert paths(None, "a-1") == ["a-1.png"]
    assert paths("x.PNG", "a-1") == ["x.PNG"]
    assert paths("x.webp", "a-1", "b-2") == ["x-1.webp", "x-2.webp"]
    assert paths("new/", "a-1", "b-2") == ["new/a-1.png", "new/b-2.png"]
    assert paths("new", "a-1") == ["new/a-1.png"]
    assert paths("new.png/", "a-1") == ["new.png/a-1.png"]
    assert paths("exists.d", "a-1") == ["exists.d/a-1.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["exists.d"]  # nothing is made by asking


def test_a_given_name_is_overwritten_and_a_made_up_one_never(tmp_path: Path) -> None:
    image = Image.new("RGB", (2, 2))
    path = tmp_path / "apple-7.png"
    path.write_text("mine")
    assert save_image(image, Target(path, named=False), {}) == tmp_path / "apple-7-2.png"
    assert save_image(image, Target(path, named=False), {}) == tmp_path / "apple-7-3.png"
    assert path.read_text() == "mine"
    assert save_image(image, Target(path, named=True), {}) == path
    with Image.open(path) as opened:
        assert opened.size == (2, 2)
    assert len(list(tmp_path.iterdir())) == 3


def test_png_carries_its_parameters(tmp_path: Path) -> None:
    given = {"prompt": "a “red” apple 🍎\n", "seed": 2**63 - 1, "top_k": None}
    path = save_image(Image.new("RGB", (2, 2)), Target(tmp_path / "a.png", named=True), given)
    with Image.open(path) as opened:
        assert json.loads(opened.info["vargen"]) == given


@pytest.mark.parametrize(("suffix", "kind"), [("jpg", "JPEG"), ("jpeg", "JPEG"), ("webp", "WEBP"), ("PNG", "PNG")])
def test_the_suffix_decides_the_format(tmp_path: Path, suffix: str, kind: str) -> None:
    path = save_image(Image.new("RGB", (8, 8), "red"), Target(tmp_path / f"a.{suffix}", named=True), {})
    with Image.open(path) as opened:
        assert opened.format == kind


def test_writable_is_tried_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_writable(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="is not a folder"):
        check_writable(tmp_path / "file" / "below")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is not a folder"):
        check_writable(tmp_path / "dangling")
    if Path("/proc").is_dir():  # read-only whoever asks, root included
        with pytest.raises(ValueError, match="cannot be written"):
            check_writable(Path("/proc/vargen"))
