"""A weight file is refused by its header, before a tensor of it is read, with words that say what is wrong."""

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vargen.weight_files import TensorInfo, find_weight_files, read_header, validate_weights

_STEM = "diffusion_pytorch_model"
_SHAPES = {"a.weight": (4, 3), "b.bias": (5,), "scale": ()}


def _write(file: Path, **changes: tuple[int, ...] | None) -> None:
    shapes = {k: v for k, v in {**_SHAPES, **changes}.items() if v is not None}
    save_file({k: torch.zeros(v) for k, v in shapes.items()}, file)


def _refused(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _check(folder)


def _check(folder: Path) -> None:
    header = {name: info for file in find_weight_files(folder, _STEM) for name, info in read_header(file).items()}
    validate_weights(header, _SHAPES, str(folder))


def test_the_right_weights_pass(tmp_path: Path) -> None:
    file = tmp_path / f"{_STEM}.safetensors"
    _write(file)
    assert read_header(file) == {name: TensorInfo(shape, "F32") for name, shape in _SHAPES.items()}
    _check(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    _write(tmp_path / f"{_STEM.upper()}.safetensors", scale=None)
    _check(tmp_path)
    file.rename(tmp_path / f"{_STEM}.FP16.SafeTensors")
    assert find_weight_files(tmp_path, _STEM, "fp16") == [tmp_path / f"{_STEM}.FP16.SafeTensors"]


def test_only_the_header_is_read(tmp_path: Path) -> None:
    """A file of 4 GiB of holes is checked at once, and takes no memory."""
    size = 4 << 30
    header = json.dumps({"a": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    file = tmp_path / f"{_STEM}.safetensors"
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(8 + len(header) + size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_header(file) == {"a": TensorInfo((size // 4,), "F32")}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    _refused(tmp_path, rf"{_STEM}\.safetensors is missing$")
    _refused(tmp_path / "nowhere", rf"nowhere.{_STEM}\.safetensors is missing$")
    for name in ("model.pt", "model.bin", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    _refused(tmp_path, r"is missing; model\.bin, model\.pt may run code when opened .* convert it first")


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) - 1], lambda b: b[:20], lambda b: b"", lambda b: b"\x80\x02}q" * 50, lambda b: b + b"more"]
)
def test_a_damaged_file_is_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    file = tmp_path / f"{_STEM}.safetensors"
    _write(file)
    file.write_bytes(damage(file.read_bytes()))
    _refused(tmp_path, rf"{_STEM}\.safetensors is missing, damaged or not a safetensors file .*fetch it again")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b.bias": None}, r"missing: 1 \(b\.bias\)$"),
        ({"c": (1,)}, r"unexpected: 1 \(c\)$"),
        ({"a.weight": (3, 4)}, r"1 of another shape: a\.weight is \[3, 4\], expected \[4, 3\]$"),
        ({"scale": (1,)}, r"scale is \[1\], expected \[\]$"),
        ({"b.bias": None, "c": (2,), "a.weight": (4,)}, r"missing: 1 .*\. unexpected: 1 .*\. 1 of another shape: a"),
    ],
)
def test_weights_of_another_network_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    _write(tmp_path / f"{_STEM}.safetensors", **changes)
    _refused(tmp_path, rf"the weights in {tmp_path} do not fit the model\. .*{message}")


# -- shards --------------------------------------------------------------------------------------------------------


def _write_shards(folder: Path, weight_map: Any = None) -> Path:
    save_file({"a.weight": torch.zeros(4, 3)}, folder / "one.safetensors")
    save_file({"b.bias": torch.zeros(5), "scale": torch.zeros(())}, folder / "two.safetensors")
    places = {"a.weight": "one.safetensors", "b.bias": "two.safetensors", "scale": "two.safetensors"}
    index = folder / f"{_STEM}.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places if weight_map is None else weight_map}))
    return index


def test_shards_are_checked_together(tmp_path: Path) -> None:
    _write_shards(tmp_path)
    _check(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    _refused(tmp_path, r"two\.safetensors is missing")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    _write_shards(tmp_path).write_text(text)
    _refused(tmp_path, r"index\.json (is not an index of weight files|is not valid JSON|must hold a JSON object)")


@pytest.mark.parametrize("name", ["../two.safetensors", "/etc/passwd", "sub/two.safetensors"])
def test_an_index_may_not_point_elsewhere(name: str, tmp_path: Path) -> None:
    _write_shards(tmp_path, {"a.weight": "one.safetensors", "b.bias": name})
    _refused(tmp_path, rf"index\.json names '{name}', which is not a file beside it")
