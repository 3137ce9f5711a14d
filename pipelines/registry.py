"""Opening and describing models of any family by name or folder."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import torch

from vargen.device import select_device
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.components import FAMILIES
from vargen.pipelines.loading import check_model_folder, default_dtype, read_model_index
from vargen.pipelines.model_info import ModelInfo


def pipeline_class(name: str) -> type[VisualPipeline]:
    """Return the pipeline class with this name; see `FAMILIES`."""
    return getattr(import_module(FAMILIES[name].module), name)


def paradigm_of(name: Any) -> str:
    """Return the paradigm of a model, such as `"next-token"`. Reads only its index.

    Raises:
        ValueError: see `vargen.pipelines.loading.read_model_index`.
    """
    return pipeline_class(read_model_index(name, None, {})[1]["_class_name"]).paradigm


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
    folder, index = read_model_index(name, None, options)
    if place is not None and options.get("torch_dtype") is None and options.get("dtype") is None:
        options["torch_dtype"] = default_dtype(folder, place)
    pipe = pipeline_class(index["_class_name"]).from_pretrained(folder, **options)  # validates the rest of the folder
    return pipe if place is None else pipe.to(place)


def describe(name: Any) -> ModelInfo:
    """Locate a model, validate its files, and describe it from its configuration. No weights are read.

    Raises:
        ValueError: see `vargen.pipelines.loading.check_model_folder`.
    """
    folder = check_model_folder(name, None, {})
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    return pipeline_class(index["_class_name"]).described(folder, index)
