"""Opening and describing models of any family by name or folder.

Importing this module registers the families of vargen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vargen.device import select_device
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.causal_video import CAUSAL_VIDEO
from vargen.pipelines.components import FAMILIES, STORED_VALUES
from vargen.pipelines.llamagen import LLAMAGEN
from vargen.pipelines.loading import default_dtype, find_model_folder, validate_model_folder
from vargen.pipelines.var import VAR

__all__ = [
    "CAUSAL_VIDEO",
    "FAMILIES",
    "LLAMAGEN",
    "VAR",
    "inspect_model",
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
        **options: passed to `VisualPipeline.from_pretrained`, such as `torch_dtype` or `quantization`.

    Raises:
        ValueError, TypeError: see `VisualPipeline.from_pretrained`; also for an invalid or unavailable device.
    """
    place = None if device is None else select_device(device)
    folder = find_model_folder(name, None, options)
    quantized = options.get("quantization") is not None or options.get("quantization_config") is not None
    if quantized and place is not None and place.type != "cpu":
        raise ValueError(f"quantization computes on a CPU, got device={str(place)!r}; leave one of the two out")
    if place is not None and not quantized and options.get("torch_dtype") is None and options.get("dtype") is None:
        options["torch_dtype"] = default_dtype(folder.path, place)
    pipe = folder.family.pipeline.from_pretrained(folder, **options)  # validates the rest of the folder
    return pipe if place is None else pipe.to(place)


@dataclass(frozen=True)
class ModelInfo:
    """Description of a model folder, available without loading weights.

    Attributes:
        folder: path of the folder.
        pipeline: name of the pipeline class.
        condition: `"text"` or `"class"`.
        vocab_size: vocabulary size V; 0 for video models.
        num_tokens: number of tokens N of an image; for video models, the number of frames of a video of default length.
        num_classes, id2label: number of classes, and their names by number (`"class"` only).
        components: names of the components in the folder, such as `"draft_transformer"`.
        num_baseline_passes: number of passes of the baseline, for an image or a video of default length.
        image_size: width and height in pixels of the source image of a call; None if calls take no image.
        fps: frames per second of video models; None for image models.
    """

    folder: Path
    pipeline: str
    condition: str
    vocab_size: int
    num_tokens: int
    num_classes: int
    id2label: dict[int, str]
    components: tuple[str, ...]
    num_baseline_passes: int
    image_size: int | None = None
    fps: int | None = None


def inspect_model(name: Any) -> ModelInfo:
    """Locate a model, validate its files, and describe it from its configuration. No weights are read.

    Raises:
        ValueError: see `vargen.pipelines.loading.validate_model_folder`.
    """
    folder = validate_model_folder(name)
    family, index = folder.family, folder.index
    with torch.device("meta"):  # fills in default values that the files omit
        networks = {
            part: component.network_class.from_config(component.network_class.load_config(folder.path / part))
            for part, component in family.components.items()
            if component.required
        }
        values = {key: index[key] for key in STORED_VALUES if index.get(key) is not None}
        pipe: VisualPipeline = family.pipeline(**networks, **values)
    return ModelInfo(
        folder.path,
        type(pipe).__name__,
        "class" if pipe.is_class_conditional else "text",
        pipe.vocab_size,
        pipe.num_tokens,
        pipe.transformer.config.get("num_classes", 0),
        pipe.class_names,
        tuple(part for part in family.components if (index.get(part) or [None])[0]),
        pipe.num_baseline_passes,
        pipe.image_size,
        pipe.fps,
    )
