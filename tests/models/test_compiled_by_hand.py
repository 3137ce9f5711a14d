"""`torch.compile(pipe.transformer)` by a user's hand, or of its blocks, generates the same images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import class_pipeline, class_var_pipeline, infinity_pipeline

from vargen.kernels import dispatch

MAKERS = {
    "next-scale": lambda depth: class_var_pipeline(draft=False, vq={"scales": (1, 2, 3)}, scales=(1, 2, 3), depth=depth),
    "next-scale bits": lambda depth: infinity_pipeline(draft=False, depth=depth, num_scales=3),
    "next-token": lambda depth: class_pipeline(n_layer=depth, grid_size=2),
}


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(network: Any) -> Any:
    """With symbolic sizes. The backend runs what was traced: building kernels takes minutes, and sizes are dynamo's part."""
    return torch.compile(network, dynamic=True, backend="eager")


def generate(pipe: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    subject: dict[str, Any] = {"class_labels": 3} if pipe.is_class_conditional else {"prompt": "a red apple"}
    return pipe(**subject, accelerator=pipe.baseline, generator=generator, output_type="pt").images


@pytest.mark.parametrize("family", MAKERS)
def test_a_block_is_compiled_once_for_all_layers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "EAGER_CPU", False)  # takes the passes of a GPU
    pipe, graphs = MAKERS[family](3), []
    expected = generate(pipe)
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    assert torch.allclose(generate(pipe), expected, atol=1e-5)
    most = 3 if family == "next-scale bits" else 2  # and one for the last scale, whose keys are not kept
    assert 1 <= len(graphs) <= most, "one for the sizes of the first pass, one for symbolic sizes"


@pytest.mark.slow
@pytest.mark.parametrize("family", MAKERS)
def test_a_transformer_compiled_with_dynamic_shapes_generates_the_same_image(family: str) -> None:
    pipe: Any = MAKERS[family](1)
    expected = generate(pipe)
    pipe.transformer = compiled(pipe.transformer)
    assert torch.allclose(generate(pipe), expected, atol=1e-5)
