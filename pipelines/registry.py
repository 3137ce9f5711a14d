"""Opening and describing models of any family by name or folder.

Importing this module registers the families of vargen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vargen.compat import without_autocast
from vargen.device import select_device
from vargen.models.quantization import validate_quantization
from vargen.pipelines.base import VisualPipeline
from vargen.pipelines.causal_video import CAUSAL_VIDEO
from vargen.pipelines.components import FAMILIES, STORED_VALUES
from vargen.pipelines.llamagen import LLAMAGEN
from vargen.pipelines.loading import (
    ModelFolder,
    check_options,
    default_dtype,
    find_model_folder,
    locate_folder,
    validate_model_folder,
)
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

_LANGUAGE_MODEL = "LanguageModelPipeline"  # imported when needed: it imports transformers
# Beside those of diffusers.
_LANGUAGE_MODEL_OPTIONS = ("draft_model", "size", "negative_format", "attn_implementation", "quantization_config")


def pipeline_class(name: str) -> type[VisualPipeline]:
    """Return the pipeline class with this name."""
    if name == _LANGUAGE_MODEL:
        from vargen.pipelines.language_model import LanguageModelPipeline

        return LanguageModelPipeline
    return FAMILIES[name].pipeline


def paradigm_of(name: Any) -> str:
    """Return the paradigm of a model, such as `"next-token"`. Reads only its index."""
    folder, of_transformers = _locate(name)
    if of_transformers:
        return pipeline_class(_LANGUAGE_MODEL).paradigm
    return find_model_folder(folder).family.pipeline.paradigm


def _locate(name: Any, options: Mapping[str, Any] | None = None) -> tuple[Any, bool]:
    """Return the folder of a model, fetched once from the hub, and whether transformers wrote it."""
    if isinstance(name, ModelFolder):
        return name, False
    options = options or {}
    known = {component for family in FAMILIES.values() for component in family.components}
    check_options({key: value for key, value in options.items() if key not in _LANGUAGE_MODEL_OPTIONS}, known)
    folder = locate_folder(name, options)
    return folder, (folder / "config.json").is_file() and not (folder / "model_index.json").is_file()


@without_autocast
def open_pipeline(name: Any, *, device: str | torch.device | None = None, **options: Any) -> VisualPipeline:
    """Load a packaged model by name, a local folder, or a Hub model, of any family.

    Args:
        name: name of a packaged model, such as `"emoji"`; a folder with a `model_index.json`, or of transformers with an image
            language model; or a Hub id `"owner/name"`.
        device: device such as `"cuda"`; `"auto"` selects a GPU if there is one. The default dtype is then the fastest of the
            device. None leaves the pipeline on the CPU.
        **options: passed to `VisualPipeline.from_pretrained`, such as `torch_dtype` or `quantization`; for a model of
            transformers, to `vargen.open_language_model`.

    Raises:
        ValueError, TypeError: see `VisualPipeline.from_pretrained`; also for an invalid or unavailable device.
    """
    place = None if device is None else select_device(device)
    located, of_transformers = _locate(name, options)
    if of_transformers:
        from vargen.pipelines.language_model_folders import open_language_model

        if options.get("quantization") is None:
            options.pop("quantization", None)
        return open_language_model(located, device=place, **options)
    folder = find_model_folder(located, None, options)
    validate_quantization(options.get("quantization"), place)
    chosen = any(options.get(name) is not None for name in ("torch_dtype", "dtype", "quantization"))
    if place is not None and not chosen:
        options["torch_dtype"] = default_dtype(folder.path, place)
    pipe = folder.family.pipeline.from_pretrained(folder, **options)  # validates the rest of the folder
    if place is not None:
        pipe.to(place)
    return pipe


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
        makes_images: False if another pipeline decodes the tokens.
        defaults: the settings that the folder stores.
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
    makes_images: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)


def inspect_model(name: Any) -> ModelInfo:
    """Locate a model, validate its files, and describe it from its configuration. No weights are read.

    Raises:
        ValueError: see `vargen.pipelines.loading.validate_model_folder`.
    """
    located, of_transformers = _locate(name)
    if of_transformers:
        from vargen.pipelines.language_model_folders import describe_model

        return ModelInfo(**describe_model(located))
    folder = validate_model_folder(located)
    family, index = folder.family, folder.index
    required = {part: component for part, component in family.components.items() if component.required}
    with torch.device("meta"):  # fills in default values that the files omit
        networks = {
            part: kind.from_config(kind.load_config(folder.path / part))
            for part, kind in ((each, component.paths[tuple(index[each])]) for each, component in required.items())
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
        defaults=index.get("defaults") or {},
    )
