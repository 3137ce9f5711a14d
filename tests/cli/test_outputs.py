"""Names and files of pictures, and of runs, whose own files no output replaces."""

import random
import string
from pathlib import Path

import pytest
from PIL import Image

from vargen.cli.common import MAX_SLUG, OutputFile, check_outputs, resolve_outputs, save_image, slugify, validate_writable


def test_slugs_of_ordinary_and_hostile_prompts() -> None:
    assert slugify("A red apple!") == "a-red-apple"
    assert slugify("Crème brûlée") == "creme-brulee"
    assert slugify("../../etc/passwd") == "etc-passwd"
    assert slugify(".hidden") == "hidden"
    assert slugify("苹果") == slugify("...") == slugify("") == "image"
    assert slugify("CON") == "image-con"
    assert slugify("com1") == "image-com1"


def test_every_slug_is_a_safe_short_name() -> None:
    rng = random.Random(0)
    alphabet = string.printable + 'äßçñøÅ苹果🍎\x00\u202e/\\:*?"<>|.' * 4
    for _ in range(2000):
        name = slugify("".join(rng.choices(alphabet, k=rng.randrange(120))))
        assert 1 <= len(name) <= MAX_SLUG
        assert set(name) <= set(string.ascii_lowercase + string.digits + "-")
        assert not name.startswith("-") and not name.endswith("-")
        assert slugify(name) == name


def test_output_is_a_file_a_folder_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exists.d").mkdir()

    def paths(output: str | None, *stems: str) -> list[str]:
        return [target.path.as_posix() for target in resolve_outputs(output, list(stems))]

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
    assert save_image(image, OutputFile(path, explicit=False), {}) == tmp_path / "apple-7-2.png"
    assert save_image(image, OutputFile(path, explicit=False), {}) == tmp_path / "apple-7-3.png"
    assert path.read_text() == "mine"
    assert save_image(image, OutputFile(path, explicit=True), {}) == path
    with Image.open(path) as opened:
        assert opened.size == (2, 2)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(("suffix", "kind"), [("jpg", "JPEG"), ("jpeg", "JPEG"), ("webp", "WEBP"), ("PNG", "PNG")])
def test_the_suffix_decides_the_format(tmp_path: Path, suffix: str, kind: str) -> None:
    path = save_image(Image.new("RGB", (8, 8), "red"), OutputFile(tmp_path / f"a.{suffix}", explicit=True), {})
    with Image.open(path) as opened:
        assert opened.format == kind


def test_writable_is_tried_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    validate_writable(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="cannot be written"):
        validate_writable(tmp_path / "file" / "below")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="cannot be written"):
        validate_writable(tmp_path / "dangling")
    if Path("/proc").is_dir():  # read-only whoever asks, root included
        with pytest.raises(ValueError, match="cannot be written"):
            validate_writable(Path("/proc/vargen"))


def test_one_file_by_two_names_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "there.png"
    there.write_text("x")
    (tmp_path / "symbolic.png").symlink_to("there.png")
    (tmp_path / "dangling.png").symlink_to("new.png")
    (tmp_path / "folder").mkdir()
    (tmp_path / "way").symlink_to("folder")
    pairs = [
        ("a.png", tmp_path / "a.png"), ("there.png", "symbolic.png"), ("new.png", "dangling.png"),
        ("folder/a.png", "way/a.png"), ("a.png", "folder/../a.png"),
    ]  # fmt: skip
    for first, second in pairs:
        one, other = (OutputFile(Path(name)) for name in (first, second))
        with pytest.raises(ValueError, match="sheet"):
            check_outputs({}, {"output": [one], "other": [None], "sheet": [other]})
        for given in (Path(second), [Path(second)]):
            with pytest.raises(ValueError, match="overwrite the input"):
                check_outputs({"image": None, "images": given}, {"output": [one]})
    apart = {"output": ["a.png", "b.png"], "sheet": ["folder/a.png"], "other": ["a.json"]}
    check_outputs({"prompt_file": there}, {name: [OutputFile(Path(file)) for file in files] for name, files in apart.items()})


def test_made_up_names_give_way_and_given_ones_do_not(tmp_path: Path) -> None:
    made_up, given = (OutputFile(tmp_path / "a-1.png", explicit=named) for named in (False, True))
    derived = {"output": [made_up], "sheet": [OutputFile(tmp_path / "a-1.png", explicit=False)]}
    check_outputs({"prompt_file": made_up.path}, derived)
    for first, second in ((made_up, given), (given, made_up)):
        with pytest.raises(ValueError, match="sheet"):
            check_outputs({}, {"output": [first], "sheet": [second]})


MINE = '{"methods": {}, "subjects": [], "num": 1}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with a reference in it, and links to it from beside it."""
    folder = tmp_path / "run"
    for name in ("images/ar/000", "measurements/x"):
        (folder / name).mkdir(parents=True)
    (folder / "run.json").write_text(MINE)
    (folder / "measurements/x/0.npz").write_text("")
    (tmp_path / "to_run").symlink_to(folder, target_is_directory=True)
    (tmp_path / "link.json").symlink_to(folder / "run.json")
    return folder


NAMES = ["run/run.json", "run/deep/new.json", "to_run/run.json", "link.json", "run/images/../run.json"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_a_file_of_the_run_is_refused(name: str, folder: Path) -> None:
    params = {"as_json": str(folder.parent / name)}
    with pytest.raises(ValueError, match="run"):
        check_outputs(params, {})
    (folder / "run.json").unlink()  # of a run to be created
    with pytest.raises(ValueError, match="run"):
        check_outputs(params, {}, run=folder)
