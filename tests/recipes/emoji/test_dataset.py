"""The emoji data set: joining names with pictures, the split, and builds that fail cleanly."""

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rejects import rejects

from recipes.emoji import sources as emoji_sources
from recipes.emoji.dataset import (
    SOURCES,
    STYLES,
    Source,
    build_emoji_dataset,
    fetch_sources,
    load_emoji_dataset,
    normalize_hexcode,
    plan_records,
    split_of,
)

_TONED = ("1F3FB", "1F3FE")
_ENTRIES: list[dict[str, Any]] = [
    {"label": "red apple", "hexcode": "1F34E", "tags": ["apple", "fruit", "red", "diet"], "group": 4},
    {
        "label": "waving hand",
        "hexcode": "1F44B",
        "tags": ["hello", "hand"],
        "group": 1,
        "skins": [{"label": "", "hexcode": f"1F44B-{tone}"} for tone in _TONED],
    },
    {
        # The pair is one code point; its two-tone variants are spelled with other base code points.
        "label": "women holding hands",
        "hexcode": "1F46D",
        "tags": ["couple"],
        "group": 1,
        "skins": [{"label": "", "hexcode": "1F469-1F3FB-200D-1F91D-200D-1F469-1F3FE"}],
    },
    {"label": "red heart", "hexcode": "2764-FE0F", "tags": ["love"], "group": 8},
    {"label": "dark skin tone", "hexcode": "1F3FF", "tags": [], "group": 2},
    {"label": "skier", "hexcode": "26F7", "tags": ["ski"], "group": 1},
    *[{"label": f"thing {i}", "hexcode": f"1F{i:03X}", "tags": [], "group": 7} for i in range(256)],
]
_GROUPS = ["smileys & emotion", "people & body", "component", "animals & nature", "food & drink"]
_GROUPS += ["travel & places", "activities", "objects", "symbols", "flags"]


def _svg(color: str) -> bytes:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 10 10">'
        f'<rect x="0" y="0" width="10" height="5" fill="{color}"/></svg>'
    ).encode()


def _webp(color: tuple[int, int, int, int]) -> bytes:
    image = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    image.paste(color, (0, 0, 64, 32))
    out = io.BytesIO()
    image.save(out, "WEBP", lossless=True)
    return out.getvalue()


@pytest.fixture
def packages() -> dict[str, dict[str, bytes]]:
    names = {
        "en/data.json": json.dumps(_ENTRIES).encode(),
        "en/messages.json": json.dumps({"groups": [{"order": i, "message": name} for i, name in enumerate(_GROUPS)]}).encode(),
    }
    icons = {name: {"body": _svg("#0000ff").decode()} for name in ("heart", "pickle", "old-heart")}
    icons["odd-sign-dark-skin-tone"] = icons["heart"]
    chars = {"2764": "heart", "1fadd": "pickle", "1faf9-1f3ff": "odd-sign-dark-skin-tone"}
    return {
        "": names,
        "3d": {
            "assets/1f34e.webp": _webp((255, 0, 0, 255)),
            "assets/1f44b-1f3fe.webp": _webp((0, 255, 0, 128)),
            "assets/2764-fe0f.webp": _webp((255, 0, 0, 255)),
            "assets/2764.webp": _webp((255, 0, 0, 255)),
        },
        "twemoji": {
            "1f34e.svg": _svg("#ff0000"),
            "1f44b.svg": _svg("#00ff00"),
            "1f469-1f3fb-200d-1f91d-200d-1f469-1f3fe.svg": _svg("#00ff00"),
            "1f3ff.svg": _svg("#00ff00"),
            "26f7-1f3fb.svg": _svg("#00ff00"),
            "e50a.svg": _svg("#00ff00"),
            **{f"1f{i:03x}.svg": _svg("#000") for i in range(0, 256, 32)},
        },
        "noto": {
            "chars.json": json.dumps(chars).encode(),
            "icons.json": json.dumps({"icons": icons, "width": 128, "height": 128}).encode(),
        },
    }


def _pack(folder: Path, packages: dict[str, dict[str, bytes]]) -> tuple[Source, ...]:
    """Write the packages as npm tarballs into a cache and return the sources that describe them."""
    (folder / "npm").mkdir(parents=True)
    sources = []
    for style, files in packages.items():
        source = Source(f"@fake/{style or 'names'}", "1.0.0", "", style)
        path = folder / "npm" / source.tarball
        with tarfile.open(path, "w:gz") as archive:
            for name, data in files.items():
                info = tarfile.TarInfo(f"package/{name}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        sources.append(Source(source.name, source.version, digest, style))
    return tuple(sources)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1f34e", "1F34E"),
        ("2764-fe0f", "2764"),
        ("23-fe0f-20e3", "0023-20E3"),
        ("0023-20E3", "0023-20E3"),
        ("1f3f4-e0067_e0062", "1F3F4-E0067-E0062"),
        ("1F3F4-E0067-E007F", "1F3F4-E0067"),
    ],
)
def test_hexcodes_are_normalized(text: str, expected: str) -> None:
    assert normalize_hexcode(text) == expected
    assert normalize_hexcode(expected) == expected


@pytest.mark.parametrize("text", ["", "readme", "1f34e-", "1f34e--200d"])
def test_other_names_are_no_hexcodes(text: str) -> None:
    rejects(lambda: normalize_hexcode(text), "code-point")


def test_split_is_fixed_and_near_five_percent() -> None:
    codes = [f"{i:04X}" for i in range(4000)]
    splits = [split_of(code) for code in codes]
    assert splits == [split_of(code) for code in codes]
    assert 0.04 < splits.count("validation") / 4000 < 0.06
    # The published checkpoint was evaluated on these; the rule must not drift.
    assert split_of("1F984") == "validation"
    assert split_of("1F34E") == "train"


def test_records_join_names_with_images(packages: dict[str, dict[str, bytes]]) -> None:
    records, blobs, report = plan_records(packages)
    by_key = {(r["style"], r["hexcode"]): r for r in records}
    assert len(records) == len(blobs) == len(by_key)
    assert report["dropped"] == ["twemoji/e50a.svg"]
    assert dict(report["duplicates"]) == {"3d": 1}
    assert dict(report["named_by_file"]) == {"noto": 2}
    apple = by_key["3d", "1F34E"]
    assert apple["label"] == "red apple" and apple["group"] == "food & drink" and apple["weight"] == 1.0
    assert apple["synonyms"] == ["fruit", "diet"]  # words of the label are no other name for it
    wave = by_key["3d", "1F44B-1F3FE"]
    assert (wave["concept"], wave["tones"], wave["weight"]) == ("1F44B", ["medium-dark"], 0.25)
    pair = by_key["twemoji", "1F469-1F3FB-200D-1F91D-200D-1F469-1F3FE"]
    assert (pair["concept"], pair["tones"]) == ("1F46D", ["light", "medium-dark"])
    swatch = by_key["twemoji", "1F3FF"]
    assert swatch["concept"] == "1F3FF" and not swatch["skin_tone"]
    # A variant that the list of names lacks still finds its base emoji.
    assert by_key["twemoji", "26F7-1F3FB"]["label"] == "skier"
    assert by_key["noto", "1FADD"]["label"] == "pickle"
    odd = by_key["noto", "1FAF9-1F3FF"]
    assert (odd["label"], odd["concept"], odd["tones"]) == ("odd sign", "1FAF9", ["dark"])


def test_no_concept_is_in_both_splits(packages: dict[str, dict[str, bytes]]) -> None:
    records, _, _ = plan_records(packages)
    for record in records:
        assert record["split"] == split_of(record["concept"])
        assert "1F3FB" not in record["concept"] and "1F3FE" not in record["concept"]


def test_build(tmp_path: Path, packages: dict[str, dict[str, bytes]]) -> None:
    pytest.importorskip("resvg_py")
    sources = _pack(tmp_path / "cache", packages)
    built = build_emoji_dataset(tmp_path / "a", tmp_path / "cache", 16, progress=False, sources=sources)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "cache"]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["images.npy", "records.json"]
    assert built.images.shape == (len(built.records), 16, 16, 3) and built.images.dtype == np.uint8
    colors = {"1F34E": (255, 0, 0), "1F44B-1F3FE": (127, 255, 127), "2764": (255, 0, 0)}
    for image, record in zip(built.images, built.records, strict=True):
        assert (image[10:] >= 250).all()  # transparent parts are white; shrinking rings a little
        if record["style"] == "3d":
            assert np.abs(image[3, 3].astype(int) - colors[record["hexcode"]]).max() <= 2
    assert set(built.indices("train")) | set(built.indices("validation")) == set(range(len(built.records)))
    rejects(lambda: built.indices("test"), "test")
    build_emoji_dataset(tmp_path / "b", tmp_path / "cache", 16, progress=False, sources=sources)
    for name in ("images.npy", "records.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    with pytest.raises(ValueError, match="at least 8"):
        build_emoji_dataset(tmp_path / "c", tmp_path / "cache", 4)


def test_an_undrawable_image_leaves_the_old_data_set(tmp_path: Path, packages: dict[str, dict[str, bytes]]) -> None:
    pytest.importorskip("resvg_py")
    build_emoji_dataset(tmp_path / "out", tmp_path / "good", 16, progress=False, sources=_pack(tmp_path / "good", packages))
    before = (tmp_path / "out/images.npy").read_bytes()
    packages["twemoji"]["1f34e.svg"] = b"<svg"
    sources = _pack(tmp_path / "bad", packages)
    with pytest.raises(ValueError, match="twemoji/1F34E"):
        build_emoji_dataset(tmp_path / "out", tmp_path / "bad", 16, progress=False, sources=sources)
    assert (tmp_path / "out/images.npy").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad", "good", "out"]


def test_a_wrong_checksum_leaves_nothing(
    tmp_path: Path, packages: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = _pack(tmp_path / "cache", packages)
    tarball = tmp_path / "cache/npm" / sources[1].tarball
    tarball.write_bytes(tarball.read_bytes() + b"x")
    with pytest.raises(ValueError, match=r"SHA-256.*@fake/3d@1\.0\.0"):
        build_emoji_dataset(tmp_path / "out", tmp_path / "cache", 16, progress=False, sources=sources)
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]

    def fake_npm(command: list[str], **_: Any) -> Any:
        (Path(command[-1]) / sources[1].tarball).write_bytes(b"something else")
        return emoji_sources.subprocess.CompletedProcess(command, 0, "", "")

    tarball.unlink()
    monkeypatch.setattr(emoji_sources.shutil, "which", lambda name: name)
    monkeypatch.setattr(emoji_sources.subprocess, "run", fake_npm)
    rejects(lambda: fetch_sources(tmp_path / "cache", sources), "SHA-256")
    assert sorted(p.name for p in tarball.parent.iterdir()) == sorted(s.tarball for s in sources if s is not sources[1])


def test_npm_failures_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emoji_sources.shutil, "which", lambda name: None)
    rejects(lambda: fetch_sources(tmp_path), "npm", OSError)

    def failing(command: list[str], **_: Any) -> Any:
        return emoji_sources.subprocess.CompletedProcess(command, 1, "", "404 not found")

    monkeypatch.setattr(emoji_sources.shutil, "which", lambda name: name)
    monkeypatch.setattr(emoji_sources.subprocess, "run", failing)
    with pytest.raises(OSError, match="status 1: 404 not found"):
        fetch_sources(tmp_path)
    assert list((tmp_path / "npm").iterdir()) == []


def test_loading_checks_the_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="python -m recipes emoji-data"):
        load_emoji_dataset(tmp_path)
    np.save(tmp_path / "images.npy", np.zeros((2, 8, 8, 3), np.uint8))
    (tmp_path / "records.json").write_text("[]")
    with pytest.raises(ValueError, match=r"images\.npy .*0 records"):
        load_emoji_dataset(tmp_path)


def test_sources_are_pinned() -> None:
    assert [source.style for source in SOURCES] == [*STYLES, ""]
    assert all(len(source.sha256) == 64 for source in SOURCES)
    assert SOURCES[0].tarball == "lobehub-fluent-emoji-3d-1.1.0.tgz"


@pytest.mark.parametrize("damage", ["images.npy", "records.json"])
def test_a_damaged_data_set_is_named(tmp_path, damage):
    np.save(tmp_path / "images.npy", np.zeros((2, 8, 8, 3), np.uint8))
    (tmp_path / "records.json").write_text("[{}, {}]")
    whole = (tmp_path / damage).read_bytes()
    for content in (b"", whole[:-1], b"\x93NUMPY" + b"x" * 200, np.array([{}]).dumps()):
        (tmp_path / damage).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{damage} is damaged .*python -m recipes emoji-data") as caught:
            load_emoji_dataset(tmp_path)
        assert "pickle" not in str(caught.value)
