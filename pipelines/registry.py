"""Opening and describing models of any family by name or folder, and the networks that benchmarks measure.

Importing this module registers the families of vargen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from vargen.decoding import DecodeOutput
from vargen.device import select_device
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.causal_video import CAUSAL_VIDEO
from vargen.pipelines.components import FAMILIES
from vargen.pipelines.llamagen import LLAMAGEN
from vargen.pipelines.loading import check_model_folder, default_dtype, find_model_folder
from vargen.pipelines.model_info import Decoder, ModelInfo
from vargen.pipelines.var import VAR

__all__ = [
    "CAUSAL_VIDEO",
    "FAMILIES",
    "LLAMAGEN",
    "VAR",
    "check_network",
    "describe",
    "open_network",
    "open_picture_network",
    "open_pipeline",
    "paradigm_of",
    "pipeline_class",
    "random_networks",
]


def pipeline_class(name: str) -> type[VisualPipeline]:
    """Return the pipeline class with this name."""
    return FAMILIES[name].pipeline


def paradigm_of(name: Any) -> str:
    """Return the paradigm of a model, such as `"next-token"`. Reads only its index.

    Raises:
        ValueError: see `vargen.pipelines.loading.find_model_folder`.
    """
    return find_model_folder(name).family.pipeline.paradigm


def open_pipeline(name: Any, *, device: str | torch.device | None = None, **options: Any) -> VisualPipeline:
    """Load a packaged model by name, a local folder, or a Hub model, of any family.

    Args:
        name: name of a packaged model, such as `"emoji"`; a folder with a `model_index.json`; or a Hub id `"owner/name"`.
        device: device such as `"cuda"`; `"auto"` selects a GPU if there is one. The default dtype is then the fastest of the
            device. None leaves the pipeline on the CPU.
        **options: passed to `VisualPipeline.from_pretrained`, such as `torch_dtype`.

    Raises:
        ValueError, TypeError: see `VisualPipeline.from_pretrained`; also for an invalid or unavailable device.
    """
    place = None if device is None else select_device(device)
    folder = find_model_folder(name, None, options)
    if place is not None and options.get("torch_dtype") is None and options.get("dtype") is None:
        options["torch_dtype"] = default_dtype(folder.path, place)
    pipe = folder.family.pipeline.from_pretrained(folder, **options)  # validates the rest of the folder
    return pipe if place is None else pipe.to(place)


def describe(name: Any) -> ModelInfo:
    """Locate a model, validate its files, and describe it from its configuration. No weights are read.

    Raises:
        ValueError: see `vargen.pipelines.loading.check_model_folder`.
    """
    folder = check_model_folder(name)
    return folder.family.pipeline.described(folder.path, folder.index)


class Network(Protocol):
    """A transformer to benchmark, with the sampling settings of its checkpoint.

    Attributes:
        baseline: name of the preset for sequential decoding.
        tokens: number of tokens of an image.
        weight_bytes: size of the parameters that every pass reads in full.
    """

    baseline: str

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
        """By width, a function that runs one pass of `width` tokens with half of an image in the cache."""

    def condition(self, batch: int) -> Any:
        """Return an arbitrary condition of the right shape."""

    def decoder(self, compile: bool = False) -> Decoder:
        """Return a decoder with the checkpoint's sampling settings; `compile` runs the passes through `torch.compile`."""


class PictureNetwork(Network, Protocol):
    """A network that can be benchmarked on whole images, against the sampling loop that its authors published."""

    def pixels(self, drawn: DecodeOutput) -> Tensor:
        """Decode the output of a decoder to pixels `[B, 3, Y, X]`."""

    def published(self, batch: int) -> tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]:
        """Return a function that runs the published float32 loop on a batch, and one that decodes its result to pixels."""

    def work(self, batch: int) -> list[tuple[int, int]]:
        """Return the bytes of weights read and the floating-point operations of each pass of the baseline."""

    def pixel_work(self, batch: int) -> int:
        """Floating-point operations of decoding the pixels."""


def random_networks() -> dict[str, Any]:
    """Return, by name, the modules that create networks of official sizes with random weights for benchmarks."""
    modules = [family.benchmark for family in FAMILIES.values() if family.benchmark]
    return {name: module for module in modules for name in module.RANDOM}


def check_network(name: str, pictures: bool = False) -> None:
    """Raise ValueError unless `open_network` can open `name`; reads no weight.

    Args:
        pictures: require a `PictureNetwork`, which can be benchmarked on whole images.
    """
    module = _module_of(name)
    if pictures and not hasattr(module.Network, "published"):
        able = [each for each, made_by in random_networks().items() if hasattr(made_by.Network, "published")]
        raise ValueError(f"model must be a next-scale one, such as {able[0]}, to compare with a published loop; got {name!r}")


def open_network(name: str, dtype: torch.dtype, device: torch.device) -> Network:
    """Load the transformer of a folder, a packaged or a Hub model, or create one of an official size with random weights.

    Raises:
        ValueError: for an unknown name; see `check_model_folder`.
    """
    module = _module_of(name)
    if name in random_networks():
        return module.random_network(name, dtype, device)
    return module.stored_network(name, check_model_folder(name).path, dtype, device)


def open_picture_network(name: str, dtype: torch.dtype, device: torch.device) -> PictureNetwork:
    """Like `open_network`, with the image tokenizer.

    Raises:
        ValueError: see `check_network`.
    """
    check_network(name, pictures=True)
    network: Any = open_network(name, dtype, device)
    return network


def _module_of(name: str) -> Any:
    """Return the module that opens the networks of a model."""
    random = random_networks()
    if name in random:
        return random[name]
    folder = check_model_folder(name)
    if folder.family.benchmark is None:
        kind = folder.family.pipeline.__name__
        raise ValueError(f"{folder.path} holds a model for {kind}, whose passes this benchmark does not measure")
    return folder.family.benchmark
