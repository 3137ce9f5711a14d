"""Every tensor of the official sizes: names, shapes and parameter counts, on the meta device."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from vargen.models.llamagen.network import SIZES, LlamaGenTransformer
from vargen.models.tokenizers.vq import VQModel

_MANIFEST: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).resolve().parent.parent / "golden" / "llamagen_manifest.json").read_text()
)
_CONDITIONS = {"c2i": "class", "t2i": "text"}
_MULTIPLIERS = {"VQ-16": (1, 1, 2, 2, 4), "VQ-8": (1, 2, 2, 4)}


def test_every_released_size_is_in_the_manifest() -> None:
    assert {name.split("/")[0][4:] for name in _MANIFEST if name.startswith("GPT-")} == SIZES.keys()
    assert _MULTIPLIERS.keys() <= _MANIFEST.keys()


@cache
def _build(size: str, kind: str, grid: int) -> Any:
    with torch.device("meta"):
        if size in _MULTIPLIERS:
            return VQModel(encoder_ch_mult=_MULTIPLIERS[size], decoder_ch_mult=_MULTIPLIERS[size])
        return LlamaGenTransformer(_CONDITIONS[kind], grid_size=grid, **SIZES[size[4:]])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", _MANIFEST)
def test_tensors_and_parameters_are_the_official_ones(name: str) -> None:
    size, kind, _ = (*name.split("/"), "", "")[:3]
    model = _build(size, kind, 16)  # one for all grids, on which no tensor depends: see below
    found = {key: list(value.shape) for key, value in model.state_dict().items()}
    assert found == _MANIFEST[name]["tensors"]
    assert sum(parameter.numel() for parameter in model.parameters()) == _MANIFEST[name]["params"]


@pytest.mark.parametrize("grid", [16, 24, 32])
def test_the_grid_is_in_no_tensor_of_the_file(grid: int) -> None:
    model = _build("GPT-B", "c2i", grid)
    assert model.tokens == grid**2 and model.rotary.shape == (grid**2, 32, 2)
    assert model.state_dict().keys() == _MANIFEST["GPT-B/c2i/256"]["tensors"].keys()


def test_names_tell_the_downsampling() -> None:
    assert {name: f"VQ-{_build(name, '', 0).downsampling}" for name in _MULTIPLIERS} == {k: k for k in _MULTIPLIERS}
