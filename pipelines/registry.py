"""Models by name or folder, whatever their family."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.description import Decoder, Description
from vargen.pipelines.families import FAMILIES
from vargen.pipelines.loading import checked_folder


def pipeline_class(name: str) -> type[VisualPipeline]:
    """The class that an index names; see `FAMILIES`."""
    return getattr(import_module(FAMILIES[name].module), name)


def open_pipeline(name: Any, **options: Any) -> VisualPipeline:
    """Open a packaged model by name, a folder, or a model of the hub, of any family.

    Args:
        name: `"emoji"`, say; a folder with a `model_index.json`; or `"owner/name"`.
        **options: of `VisualPipeline.from_pretrained`, such as `torch_dtype`.

    Raises:
        ValueError: see `VisualPipeline.from_pretrained`.
    """
    folder = checked_folder(name, None, options)
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    return pipeline_class(index["_class_name"]).from_pretrained(folder, **options)


def describe(name: Any) -> Description:
    """Find a model, check its files, and read its configuration; no weight is read.

    Raises:
        ValueError: see `vargen.pipelines.loading.checked_folder`.
    """
    folder = checked_folder(name, None, {})
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    return pipeline_class(index["_class_name"]).described(folder, index)


class Network(Protocol):
    """A transformer to measure, and the sampling that its checkpoint asks for.

    Attributes:
        tokens: of a picture. weight_bytes: of the parameters that every pass reads in full.
    """

    @property
    def name(self) -> str: ...

    @property
    def transformer(self) -> Any: ...

    @property
    def guidance_scale(self) -> float: ...

    @property
    def tokens(self) -> int: ...

    @property
    def weight_bytes(self) -> int: ...

    def passes(self, rows: int, widths: Sequence[int]) -> dict[int, Callable[[], Any]]:
        """By width, a function that runs one pass of so many tokens over half a picture."""

    def condition(self, batch: int) -> Any:
        """A condition of the right shape."""

    def decoder(self, compile: bool = False) -> Decoder:
        """With the checkpoint's sampling; `compile` runs the passes through `torch.compile`."""


def random_networks() -> dict[str, str]:
    """Networks of official sizes with random weights, to measure: the module that makes each, by name."""
    modules = [family.networks_module for family in FAMILIES.values() if family.networks_module]
    return {name: module for module in modules for name in import_module(module).RANDOM}


def check_network(name: str) -> None:
    """Raise ValueError unless `open_network` can open `name`; reads no weight."""
    if name not in random_networks():
        _network_module(checked_folder(name, None, {}))


def open_network(name: str, dtype: torch.dtype, device: torch.device) -> Network:
    """The transformer of a pipeline folder, a packaged or a hub model; or one of an official size with random weights.

    Raises:
        ValueError: if it is none of these; see `checked_folder`.
    """
    random = random_networks()
    if name in random:
        return import_module(random[name]).random_network(name, dtype, device)
    folder = checked_folder(name, None, {})
    return import_module(_network_module(folder)).stored_network(name, folder, dtype, device)


def _network_module(folder: Path) -> str:
    kind = json.loads((folder / "model_index.json").read_text("utf-8"))["_class_name"]
    module = FAMILIES[kind].networks_module
    if module is None:
        raise ValueError(f"{folder} holds a model for {kind}, whose passes this benchmark does not measure")
    return module
