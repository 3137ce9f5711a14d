"""Quantization by torchao: what runs on a GPU, as far as a CPU can show it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from rejects import rejects
from tiny_models import class_pipeline, class_var_pipeline
from tiny_video import transformer

from vargen import open_pipeline
from vargen.adapters import cost_key
from vargen.models import gpu_quantization
from vargen.models.quantization import linear_layers, quantize_network, validate_quantization
from vargen.models.weight_storage import QuantizedStorageMixin
from vargen.pipelines.quantization import gpu_quantized_components, resolve_quantization
from vargen.pipelines.registry import find_model_folder

NETWORKS: dict[str, Callable[[], Any]] = {
    "llamagen": lambda: class_pipeline().transformer,
    "var": lambda: class_var_pipeline().transformer,
    "video": lambda: copy.deepcopy(transformer()),
}
CUDA = torch.device("cuda")
with_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao; make test-latest installs it")


def test_formats_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rejects(lambda: validate_quantization("float8"), "quantization must be 'int8', or None on a CPU, got 'float8'; on a GPU")
    rejects(lambda: validate_quantization("int4", CUDA), "quantization must be 'int8', 'float8', or None on a GPU, got 'int4'")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(gpu_quantization, "find_spec", lambda name: object())
    rejects(lambda: validate_quantization("float8", CUDA), "needs an NVIDIA GPU of compute capability 8.9 or higher, got 8.0")
    validate_quantization("int8", CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    validate_quantization("float8", CUDA)
    monkeypatch.setattr(gpu_quantization, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs torchao: pip install torchao"):
        validate_quantization("int8", CUDA)


@with_torchao
def test_the_configurations_of_torchao_name_the_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Int8DynamicActivationInt8WeightConfig

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert resolve_quantization(None, Float8DynamicActivationFloat8WeightConfig(), CUDA) == "float8"
    assert resolve_quantization(None, Int8DynamicActivationInt8WeightConfig(), CUDA) == "int8"
    rejects(lambda: resolve_quantization(None, Float8DynamicActivationFloat8WeightConfig()), "quantization must be 'int8'")


@with_torchao
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_quantized_by_torchao(name: str, tmp_path: Path) -> None:
    network: QuantizedStorageMixin = NETWORKS[name]()
    layers, before = linear_layers(network), cost_key(network)
    x = {each: torch.randn(5, layer.in_features) for each, layer in layers.items()}
    expected = {each: layer(x[each]) for each, layer in layers.items()}
    gpu_quantization.quantize_for_gpu(network, set(layers), "int8")
    for each in layers:
        layer = network.get_submodule(each)
        assert type(layer.weight).__name__ == "Int8Tensor"
        out = layer(x[each])
        assert (out - expected[each]).norm() < 0.02 * expected[each].norm()
        assert torch.equal(out, torch.cat([layer(row[None]) for row in x[each]])), "a row depends on those beside it"
    others = {
        each for each, module in network.named_modules() if type(getattr(module, "weight", None)).__name__ == "Int8Tensor"
    }
    assert others == set(layers)
    assert cost_key(network) != before
    rejects(lambda: network.save_pretrained(tmp_path), "quantization='int8' on a GPU cannot be saved")
    assert not list(tmp_path.iterdir())


@with_torchao
def test_a_quantized_pipeline_generates_images() -> None:
    pipe = class_pipeline()
    pipe.set_progress_bar_config(disable=True)
    call: dict[str, Any] = {"class_labels": [1, 2], "output_type": "latent"}
    plain = pipe(**call, generator=torch.Generator().manual_seed(0)).images
    gpu_quantization.quantize_for_gpu(pipe.transformer, set(linear_layers(pipe.transformer)), "int8")
    for method in ("ar", "gumbel", "scd"):
        found = pipe(**call, accelerator=method, generator=torch.Generator().manual_seed(0)).images
        assert found.shape == plain.shape and found.min() >= 0 and found.max() < pipe.vocab_size


def test_folders_are_checked_before_weights_are_read(tmp_path: Path) -> None:
    pipe = class_pipeline()
    pipe.save_pretrained(tmp_path / "float")
    assert gpu_quantized_components(find_model_folder(tmp_path / "float"), "float8", {}) == ["transformer"]
    quantize_network(pipe.transformer)
    pipe.save_pretrained(tmp_path / "int8")
    folder = find_model_folder(tmp_path / "int8")
    rejects(lambda: gpu_quantized_components(folder, "int8", {}), "device must be 'cpu' for int8, whose transformer was saved")
    opened = open_pipeline(tmp_path / "int8")
    rejects(lambda: opened.transformer.to("meta").to(torch.bfloat16), "open_pipeline(..., device='cuda', quantization='int8')")
