"""Folders of transformers with an image language model: validated before weights are read, described, and opened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vargen.compat import load_options, report_memory
from vargen.device import select_device
from vargen.folders.component_files import read_config, refuse_code_files
from vargen.folders.plain_values import one_line
from vargen.folders.transformers_networks import StoredNetwork
from vargen.models.transformers.base import ImageLanguageModel, validate_network
from vargen.models.transformers.decoding import TransformersTokenModel
from vargen.models.transformers.processors import load_processor
from vargen.models.transformers.supported import MODELS, describe_language_model
from vargen.pipelines.language_model import LanguageModelPipeline
from vargen.pipelines.llamagen import LlamaGenPipeline
from vargen.pipelines.loading import default_dtype, locate_folder, resolve_drafter

# Arguments of transformers' `from_pretrained` that place, quantize or attend; all others are set here.
_LOADING = ("device_map", "max_memory", "offload_folder", "quantization_config", "attn_implementation")
_FETCHING = ("cache_dir", "force_download", "local_files_only", "token", "revision")


def open_language_model(
    name: str | Path,
    draft_model: str | Path | None = None,
    *,
    torch_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    size: tuple[int, int] | None = None,
    negative_format: str | None = None,
    **options: Any,
) -> LanguageModelPipeline:
    """Open an image language model of transformers, with safetensors only and without running code of the folder.

    Args:
        name: a folder with `config.json`, or a hub id `"owner/name"`.
        draft_model: the same, for a smaller model with the same image tokens.
        torch_dtype, dtype: of both models. Default: the fastest of the device; float32 for small models on a CPU.
        device: where the models run; `"auto"` selects a GPU if there is one. Default: the CPU.
        size, negative_format: see `LanguageModelPipeline`.
        **options: of transformers, for the model: `device_map`, `max_memory`, `offload_folder`, `quantization_config`,
            `attn_implementation`; `cache_dir`, `force_download`, `local_files_only`, `token` and `revision` of the hub.

    Raises:
        ValueError: before any weight is read: if there is no such folder, the folder asks for code, has no safetensors or no
            weights that generate images, its class is not supported, its processor is missing, the draft model does not fit, or
            the installed transformers lacks the class.
        TypeError: for an unknown option, or the processor of another model; also before any weight is read.
        ImportError: if the package of a quantization is not installed.
    """
    if unknown := sorted(options.keys() - {*_LOADING, *_FETCHING}):
        allowed = ", ".join(("draft_model", "torch_dtype", "device", "size", "negative_format", *_LOADING, *_FETCHING))
        raise TypeError(f"{unknown[0]} is no argument for opening an image language model, which are {allowed}")
    if dtype is not None and torch_dtype is not None:
        raise ValueError(f"give dtype or torch_dtype, its older name, not both; got {dtype!r} and {torch_dtype!r}")
    if device is not None and options.get("device_map") is not None:
        raise ValueError(f"give device or device_map, not both; got {device!r} and {options['device_map']!r}")
    place = torch.device("cpu") if device is None else select_device(device)
    fetching = {key: value for key, value in options.items() if key in _FETCHING}
    folders = [locate_folder(each, fetching) for each in (name, draft_model) if each is not None]
    found = [describe_folder(folder, size, negative_format) for folder in folders]  # before the weights of one are read
    described = [each for _, each in found]
    processor = load_processor(folders[0], type(described[0]))
    described[0].validate_processor(processor)
    for each in described[1:]:
        described[0].validate_draft(each)
    kind = torch_dtype or dtype or default_dtype(folders[0], place)
    models = []
    for number, (folder, (stored, _)) in enumerate(zip(folders, found, strict=True)):
        loading = {} if number else {key: value for key, value in options.items() if key in _LOADING}
        moved = loading.get("device_map") is None
        quantized = loading.get("quantization_config") is not None or stored.is_quantized
        if moved and quantized:  # such weights cannot be moved later
            loading["device_map"], moved = {"": place}, False
        with report_memory(folder):
            model = stored.load(kind, **loading)
        models.append(model.to(place).eval() if moved else model.eval())
    pipe = LanguageModelPipeline(models[0], processor, models[1] if models[1:] else None, size, negative_format)
    if heads := _list_heads(folders[0]):
        pipe.load_drafter(*(folders[0] / name for name in heads))
    return pipe


def _list_heads(folder: Path) -> list[str]:
    """Return the draft heads that `LanguageModelPipeline.save_pretrained` stored in a folder."""
    return [name for name in LlamaGenPipeline.family.drafters if (folder / name / "config.json").is_file()]


def find_architecture(folder: Path) -> str | None:
    """Return the class of transformers that a folder's `config.json` names; None for a folder of another kind."""
    file = folder / "config.json"
    if not file.is_file() or (folder / "model_index.json").is_file():
        return None
    found = read_config(file).get("architectures")
    return str(found[0]) if isinstance(found, list) and found else None


def describe_folder(
    folder: Path, size: tuple[int, int] | None = None, negative_format: str | None = None
) -> tuple[StoredNetwork, ImageLanguageModel]:
    """Validate a folder and describe its model, whose weights are not read and take no memory."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json, so it is not a model of transformers")
    refuse_code_files(folder, [*_list_heads(folder), "custom_generate"])
    file, found = folder / "config.json", find_architecture(folder)
    if found not in MODELS:
        raise ValueError(f"{file} describes a {found!r}; vargen runs {', '.join(MODELS)}")
    import transformers

    if getattr(transformers, found, None) is None:
        raise ValueError(f"{found} needs transformers {MODELS[found].since}, got {transformers.__version__}")
    stored = StoredNetwork(folder, MODELS[found].stored)
    try:
        described = describe_language_model(stored.skeleton, size=size, negative_format=negative_format)
        validate_network(described)
        _ = described.max_prompt_tokens  # the image fits the context
    except (ValueError, TypeError):
        raise
    except Exception as error:  # from a value that its class does not validate
        raise ValueError(f"{file} does not describe a {found}: {one_line(error)}") from error
    return stored, described


def describe_model(folder: Path) -> Mapping[str, Any]:
    """Return the fields of `ModelInfo` for a folder; no weights are read."""
    described = describe_folder(folder)[1]
    described.validate_processor(load_processor(folder, type(described)))
    tokens = described.grid[0] * described.grid[1]
    return {"folder": folder, "pipeline": LanguageModelPipeline.__name__, "condition": "text", "vocab_size": described.vocab,
            "num_tokens": tokens, "num_classes": 0, "id2label": {}, "components": ("model", "processor", *_list_heads(folder)),
            "num_baseline_passes": tokens, "makes_images": described.has_pixels}  # fmt: skip


def load_draft_heads(target: TransformersTokenModel, *names: Any) -> dict[str, Any]:
    """Return the draft heads in folders of training runs or of saved networks, by name."""
    if not target.has_features:
        raise ValueError("drafter must wait until the model is loaded without offloading, whose hooks hide its features")
    known, family = target.description, LlamaGenPipeline.family
    found = [resolve_drafter(each, family) for each in names]
    for name, folder, config in found:
        if name not in family.drafters:
            raise ValueError(f"{folder} holds a {name}, which drafts for LlamaGen only, not for {known.class_name}")
        for setting, own in known.head_settings.items():
            if config.get(setting, own) != own:
                raise ValueError(f"{folder} was trained for another model: {setting} is {config[setting]}, not {own}")
    options = {"torch_dtype": target.dtype, "use_safetensors": True, **load_options()}
    return {name: family.drafters[name].network_class.from_pretrained(folder, **options).eval() for name, folder, _ in found}
