"""Offloaded pipelines: every part, way and method generates what the pipeline generates without hooks, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rejects import rejects
from tiny_families import TINY, Tiny, made
from tiny_models import class_var_pipeline

from vargen.models.quantization import quantize_network

pytest.importorskip("accelerate")
from accelerate import cpu_offload, disk_offload

CPU = torch.device("cpu")


def shared_modulation() -> Any:
    """One modulation network for all blocks, whose offsets are parameters of the blocks; and scales with gains."""
    return class_var_pipeline(shared_aln=True, vq={"scale_gains": True})


FAMILIES = {
    **{name: tiny for name, tiny in TINY.items() if name != "next-token text"},  # whose parts the drafters have, too
    "next-scale shared": Tiny("VARPipeline", lambda _: shared_modulation(), {"plain": {}}, **{
        "conditions": [1, 2, 3], "argument": "class_labels"}),
}  # fmt: skip
WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "cpu": lambda network, _: cpu_offload(network, CPU),
    "disk, with buffers": lambda network, folder: disk_offload(network, str(folder), CPU, offload_buffers=True),
}


def generated(tiny: Tiny, pipe: Any) -> dict[str, torch.Tensor]:
    """What each method generates, and, from an image, a variation and an inpainted image."""
    found = {str(method): made(tiny.call(pipe, method=method)) for method in tiny.methods}
    side = tiny.side
    image, mask = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(1)), torch.zeros(side, side)
    if tiny.pipeline != "CausalVideoPipeline":
        found["tokens"] = pipe.encode_image(image)
    if pipe.paradigm == "next-scale":
        mask[:, 4:] = 1
        found["variation"] = made(tiny.call(pipe, image=image, strength=0.6))
        found["inpainted"] = made(tiny.call(pipe, image=image, mask_image=mask))
    if tiny.pipeline == "VARPipeline":
        with torch.no_grad():
            found["pixels"] = pipe.vqvae.decode(pipe.vqvae.encode(2 * image - 1))
    if tiny.pipeline == "CausalVideoPipeline":
        found["from an image"] = made(tiny.call(pipe, image=image))
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tiny, Any, Any]:
    tiny = FAMILIES[request.param]
    pipe = tiny.open(tmp_path_factory.mktemp("pipeline"))
    return tiny, pipe, generated(tiny, pipe)


def offload(pipe: Any, folder: Path, way: str, names: tuple[str, ...]) -> None:
    for name in names:
        WAYS[way](getattr(pipe, name), folder / name)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, images in expected.items():
        assert torch.allclose(found[name], images, atol=1e-6), name


@pytest.mark.parametrize("way", WAYS)
def test_offloaded_pipelines_generate_the_same(family: tuple[Tiny, Any, Any], way: str, tmp_path: Path) -> None:
    tiny, plain, expected = family
    names = tuple(plain._networks())
    for offloaded in (names, *((name,) for name in names if way == "cpu")):
        pipe = copy.deepcopy(plain)
        offload(pipe, tmp_path, way, offloaded)
        assert all(next(getattr(pipe, name).parameters()).is_meta for name in offloaded)
        if offloaded == names:
            assert_same(generated(tiny, pipe), expected)
        else:
            method = list(tiny.methods)[-1]
            assert_same({str(method): made(tiny.call(pipe, method=method))}, {str(method): expected[str(method)]})


def test_offloaded_weights_are_saved_whole_or_not_at_all(family: tuple[Tiny, Any, Any], tmp_path: Path) -> None:
    tiny, plain, expected = family
    pipe = copy.deepcopy(plain)
    offload(pipe, tmp_path, "cpu", tuple(plain._networks()))
    method = str(next(iter(tiny.methods)))
    for call in (
        lambda: pipe.save_pretrained(tmp_path / "out"),
        lambda: pipe.to("cpu"),
        lambda: pipe.to(torch.bfloat16),
        lambda: pipe.transformer.save_pretrained(tmp_path / "out"),
    ):
        rejects(call, "offloaded", ValueError)
    assert not (tmp_path / "out").exists()
    for each in (copy.deepcopy(pipe), pipe):
        assert_same({method: made(tiny.call(each))}, {method: expected[method]})
    pipe.remove_all_hooks()
    pipe.save_pretrained(tmp_path / "out")
    again = type(pipe).from_pretrained(tmp_path / "out", torch_dtype=torch.float32)
    for name, network in plain._networks().items():
        for other in (getattr(pipe, name), getattr(again, name)):
            found = other.state_dict()
            assert all(torch.equal(found[key], weight) for key, weight in network.state_dict().items()), name
            assert not any(weight.is_inference() for weight in other.parameters()), "they can still be trained"


@pytest.mark.parametrize("name", ["next-token class", "next-scale class"])
def test_offloaded_networks_of_int8_are_refused(name: str, tmp_path: Path) -> None:
    """Their passes are one function over the weights, which runs no hooks."""
    tiny = TINY[name]
    pipe = tiny.open(tmp_path)
    pipe.register_modules(transformer=quantize_network(pipe.transformer, "int8"))
    expected = made(tiny.call(pipe))
    cpu_offload(pipe.transformer, CPU)
    rejects(lambda: tiny.call(pipe), "quantization='int8'", ValueError)
    pipe.remove_all_hooks()
    assert torch.equal(made(tiny.call(pipe)), expected)
