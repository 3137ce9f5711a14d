"""Opening and describing models of any family by name or folder.

Importing this module registers the families of vargen.
"""

from __future__ import annotations

from typing import Any

import torch

from vargen.device import select_device
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.causal_video import CAUSAL_VIDEO
from vargen.pipelines.components import FAMILIES
from vargen.pipelines.llamagen import LLAMAGEN
from vargen.pipelines.loading import check_model_folder, default_dtype, find_model_folder
from vargen.pipelines.model_info import ModelInfo
from vargen.pipelines.var import VAR

__all__ = [
    "CAUSAL_VIDEO",
    "FAMILIES",
    "LLAMAGEN",
    "VAR",
    "describe",
    "open_pipeline",
    "paradigm_of",
    "pipeline_class",
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
