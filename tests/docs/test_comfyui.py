"""examples/comfyui keeps ComfyUI's contract of nodes: loaded, asked for its inputs, validated and run as ComfyUI does it."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from generate_cases import janus
from rejects import rejects
from tiny_language_models import needs_janus

import vargen

KINDS = {"STRING": str, "INT": int, "FLOAT": float}
NODES = ("VargenEnable", "VargenImage", "VargenVideo")


@pytest.fixture(scope="module")
def package(repo_root: Path) -> Iterator[ModuleType]:
    """The folder as a package whose name is its path, which is how ComfyUI loads those in `custom_nodes`."""
    folder = repo_root / "examples/comfyui"
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for loaded in [each for each in sys.modules if each.startswith(name)]:
        del sys.modules[loaded]


def inputs_of(node: Any, **changed: Any) -> dict[str, Any]:
    """The values of the widgets when the node is placed, with changes."""
    return {name: options["default"] for name, (_, options) in node.INPUT_TYPES()["required"].items()} | changed


def validate(node: Any, inputs: dict[str, Any]) -> bool | str:
    names = inspect.signature(node.VALIDATE_INPUTS).parameters
    return node.VALIDATE_INPUTS(**{name: value for name, value in inputs.items() if name in names})


def run(node: Any, **changed: Any) -> tuple[Any, ...]:
    inputs = inputs_of(node, **changed)
    assert validate(node, inputs) is True
    with torch.inference_mode():
        outputs = getattr(node(), node.FUNCTION)(**inputs)
    assert isinstance(outputs, tuple) and len(outputs) == len(node.RETURN_TYPES)
    for kind, output in zip(node.RETURN_TYPES, outputs, strict=True):
        if kind == "IMAGE":
            assert output.dtype == torch.float32 and output.device.type == "cpu" and output.dim() == 4
            assert output.shape[-1] == 3 and 0 <= output.min() < output.max() <= 1
        else:
            assert isinstance(output, KINDS[kind])
    return outputs


def test_the_package_names_its_nodes(package: ModuleType) -> None:
    assert tuple(package.NODE_CLASS_MAPPINGS) == tuple(package.NODE_DISPLAY_NAME_MAPPINGS) == NODES


def test_the_image_is_that_of_the_pipeline(package: ModuleType) -> None:
    image, statistics = run(package.NODE_CLASS_MAPPINGS["VargenImage"], seed=7, method="gumbel")
    pipe = package.image_node.open_model("emoji", package.image_node.PARADIGMS)  # as the node opened it
    result = pipe("a red apple", accelerator="gumbel", generator=torch.Generator().manual_seed(7))
    assert np.array_equal((image[0].numpy() * 255).round().astype("uint8"), np.asarray(result.images[0]))
    assert statistics.startswith(f"gumbel: {result.stats.passes} passes, ") and statistics.endswith(", seed 7")


def test_a_prompt_names_a_class_where_the_model_has_classes(package: ModuleType, tiny_scale_model: Path) -> None:
    image, _ = run(package.NODE_CLASS_MAPPINGS["VargenImage"], model=str(tiny_scale_model), prompt="3")
    assert len(image) == 1
    node = package.NODE_CLASS_MAPPINGS["VargenImage"]
    rejects(lambda: node().generate(**inputs_of(node, model=str(tiny_scale_model), prompt="10")), "class label")


@needs_janus
def test_a_model_of_other_nodes_is_enabled_and_disabled(package: ModuleType) -> None:
    """Its socket connects with any type, and the other nodes generate as before, in inference mode."""
    node, case = package.NODE_CLASS_MAPPINGS["VargenEnable"], janus()
    assert (node.RETURN_TYPES[0] != "JANUS_MODEL") is False, "as ComfyUI compares"
    with torch.inference_mode():
        expected = case.generate()
        assert node().enable(case.model, "gumbel") == (case.model,)
        assert torch.equal(case.generate(), expected) and vargen.summary(case.model).calls == 1
        node().enable(case.model, "scd")
        assert vargen.summary(case.model).method.name == "scd"
        node().enable(case.model, "off")
    assert "generate" not in vars(case.model)


def test_frames_are_a_batch_of_images(package: ModuleType) -> None:
    frames, statistics, fps = run(package.NODE_CLASS_MAPPINGS["VargenVideo"], num_blocks=2, method="target")
    assert len(frames) > 2 and frames.shape[1:] == (64, 64, 3) and fps > 0
    assert statistics.startswith("target: 2 blocks, ") and "passes of target" in statistics


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("VargenImage", {"model": "emojis"}, "'emoji'"),
        ("VargenImage", {"model": "emoji-video"}, "'emoji-video' is a video model"),
        ("VargenVideo", {"model": "emoji"}, "'emoji' is a next-token model"),
        ("VargenImage", {"method": "gumble"}, "gumbel"),
        ("VargenImage", {"method": "code"}, "'code' is for next-scale models"),
        ("VargenVideo", {"method": "gumbel"}, "'gumbel' is for next-token models"),
    ],
)
def test_what_cannot_run_is_said_in_one_sentence_before_it_runs(
    package: ModuleType, name: str, changed: dict[str, Any], words: str
) -> None:
    node = package.NODE_CLASS_MAPPINGS[name]
    said = validate(node, inputs_of(node, **changed))
    assert isinstance(said, str) and words in said and "\n" not in said
