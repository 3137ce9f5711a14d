"""Networks stored as int8: what is read back, and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rejects import rejects
from safetensors.torch import load_file, save_file
from tiny_models import tiny_multi_scale_vq, tiny_transformer, tiny_var, tiny_vq
from tiny_video import transformer as video_transformer

from vargen.folders.networks import NetworkFolder
from vargen.models.quantization import quantized_layers

MAKERS: dict[str, Callable[[], Any]] = {
    "VQModel": tiny_vq,
    "LlamaGenTransformer": tiny_transformer,
    "MultiScaleVQModel": tiny_multi_scale_vq,
    "VARTransformer": tiny_var,
    "CausalVideoTransformer": lambda: copy.deepcopy(video_transformer()),
}
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(
    params=[
        (name, weight_format)
        for name in MAKERS
        for weight_format in ("int8", "int6")
        if name != "MiniLMTextEncoder" or weight_format == "int8"
    ],
    ids="-".join,
)
def network(request: pytest.FixtureRequest) -> Any:
    made = MAKERS[request.param[0]]()
    made.register_to_config(weight_format=request.param[1])
    return made


def test_what_is_read_is_what_was_written_to_within_half_a_scale(network: Any, tmp_path: Path) -> None:
    network.save_pretrained(tmp_path)
    stored = load_file(tmp_path / WEIGHTS)
    integers = [value for value in stored.values() if value.dtype == torch.int8]
    assert max(int(value.abs().max()) for value in integers) == {"int8": 127, "int6": 31}[network.config.weight_format]
    read = type(network).from_pretrained(tmp_path)
    assert not read.training and read.dtype == torch.float32
    for name, value in network.state_dict().items():
        scale = stored.get(f"{name}.scale")
        far = (read.state_dict()[name].float() - value.float()).abs().max()
        assert far <= (0 if scale is None else scale.max() / 2 * 1.0001), name
        if name.endswith(network.unquantized_suffixes) and network.unquantized_suffixes:
            assert scale is None and stored[name].dtype == torch.float32


def test_writing_it_again_writes_the_same(network: Any, tmp_path: Path) -> None:
    network.save_pretrained(tmp_path / "once")
    type(network).from_pretrained(tmp_path / "once").save_pretrained(tmp_path / "again")
    for name in (WEIGHTS, "config.json"):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_it_is_checked_by_its_header_and_loaded_in_another_dtype(network: Any, tmp_path: Path) -> None:
    network.save_pretrained(tmp_path)
    assert NetworkFolder(tmp_path, type(network)).config["weight_format"] == network.config.weight_format
    half = type(network).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    stored = load_file(tmp_path / WEIGHTS)
    matrix = next(name for name, value in stored.items() if value.dtype == torch.int8)
    save_file({**stored, matrix: stored[matrix].float()}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=f"{matrix} is F32, expected I8"):
        type(network).from_pretrained(tmp_path)
    del stored[matrix]
    save_file(stored, tmp_path / WEIGHTS)
    rejects(lambda: type(network).from_pretrained(tmp_path), "missing")


QUANTIZABLE = {"LlamaGenTransformer": tiny_transformer, "VARTransformer": tiny_var, "CausalVideoTransformer": video_transformer}


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_a_network_that_computes_in_int8_is_stored_as_it_is(name: str, tmp_path: Path) -> None:
    made = QUANTIZABLE[name]()
    made.save_pretrained(tmp_path / "float")
    opened = type(made).from_pretrained(tmp_path / "float", quantization="int8")
    opened.save_pretrained(tmp_path / "once")
    assert NetworkFolder(tmp_path / "once", type(made)).config["quantization"] == "int8"
    again = type(made).from_pretrained(tmp_path / "once")
    again.save_pretrained(tmp_path / "again")
    state, found = opened.state_dict(), again.state_dict()
    assert state.keys() == found.keys() and all(torch.equal(value, found[key]) for key, value in state.items())
    assert (tmp_path / "once" / WEIGHTS).read_bytes() == (tmp_path / "again" / WEIGHTS).read_bytes()
    layers = quantized_layers(opened)
    assert layers and all(layer.weight.dtype == torch.int8 for layer in layers.values())
    floats = made.state_dict()
    for key, layer in layers.items():
        error = floats[f"{key}.weight"].float() - layer.weight.float() * layer.weight_scale[:, None]
        assert (error.abs().amax(1) <= layer.weight_scale * 0.5001).all()
    with pytest.raises(ValueError, match="quantization must be 'int8', 'float8' or None, got 'int3'"):
        type(made).from_pretrained(tmp_path / "float", quantization="int3")


def test_without_a_format_it_is_stored_as_it_is(tmp_path: Path) -> None:
    network = tiny_transformer().half()
    network.save_pretrained(tmp_path)
    assert all(value.dtype == torch.float16 for value in load_file(tmp_path / WEIGHTS).values() if value.is_floating_point())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "weight_format": "int4"}))
    with pytest.raises(ValueError, match="unknown weight_format 'int4'"):
        NetworkFolder(tmp_path, type(network))
