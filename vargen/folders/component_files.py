"""Validation of a component's folder without loading weights: configuration, headers of weight files, code."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from vargen.folders.config_bounds import validate_config
from vargen.reading import read_bounded
from vargen.values import short_repr
from vargen.weight_files import read_weight_header, validate_layer_counts, validate_weights

INCOMPLETE = "the folder is incomplete, download or convert it again"
_CODE = (".py", ".pyc", ".pyd", ".so")
# Configuration keys that make the library fetch or run code: remote classes of transformers and diffusers, and kernels from
# the Hub, which transformers accepts as the name of an attention or expert implementation.
_CODE_KEYS = ("auto_map", "trust_remote_code", "custom_pipelines", "custom_generate", "audio_tokenizer")
_KERNEL_KEYS = ("implementation", "implementation_internal")
_MAX_JSON, _MAX_VALUES = 2**26, 2**22  # bytes of a JSON file, and values in it
_MAX_FILES = 10_000  # per component


def read_object(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file."""
    if not file.is_file():
        raise ValueError(f"{file} is missing; {INCOMPLETE}")
    try:
        data = read_bounded(file, _MAX_JSON)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
    if sum(data.count(mark) for mark in (b"[", b"{", b",")) > _MAX_VALUES:
        raise ValueError(f"{file} must hold at most {_MAX_VALUES:,} values")
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, and holds a {type(content).__name__}")
    return content


def read_config(file: Path) -> dict[str, Any]:
    """Read a configuration; ValueError as `read_object`, or if it requests code at any depth to be fetched or run."""
    config = read_object(file)
    waiting: list[Any] = [config]
    while waiting:
        values = waiting.pop()
        waiting += [each for each in (values.values() if isinstance(values, dict) else values) if isinstance(each, dict | list)]
        for key, value in values.items() if isinstance(values, dict) else ():
            kernel = key.endswith(_KERNEL_KEYS) and isinstance(value, str | dict) and "/" in str(value)
            if kernel or (key.startswith(_CODE_KEYS) and value):
                raise ValueError(
                    f"{file} has {key!r}: {short_repr(value)}, which asks for code from elsewhere; vargen runs none"
                )
    return config


def validate_network_files(folder: Path, network_class: Any, variant: str | None = None) -> Mapping[str, Any]:
    """Compare a folder's weight file with the network that its configuration describes.

    Numbers of layers are compared before a network of that size is built, even on the meta device: a network class has
    `layer_prefixes`, by configuration key of such a number the prefixes before the layer index in names of weights.

    Args:
        variant: variant in the weight file's name, such as "fp16", as in diffusers.

    Returns:
        The configuration, including default values that the file omits.
    """
    file = folder / "config.json"
    config = read_config(file)
    if config.get("quantization_config"):
        raise ValueError(
            f"{file} has a quantization_config, which vargen cannot load: use weights that are not quantized, or saved with "
            "weight_format='int8'"
        )
    header = read_weight_header(folder, "diffusion_pytorch_model", variant)
    validate_layer_counts(header, config, getattr(network_class, "layer_prefixes", {}), file)
    try:
        validate_config(network_class, config)
        with torch.device("meta"):
            network = network_class.from_config(config)
    except Exception as error:
        raise ValueError(f"{file} does not describe a {network_class.__name__}: {error}") from error
    if network.config.get("weight_format") is not None:
        validate_weights(header, network.stored_shapes(), str(folder), network.stored_dtypes())
    else:
        shapes = {key: tuple(value.shape) for key, value in network.state_dict().items()}
        validate_weights(header, shapes, str(folder))
    return network.config


def refuse_code_files(folder: Path, components: Iterable[str] = ()) -> None:
    """Raise ValueError if a folder, or the folder of one of its components, contains a file that Python could import."""
    files = [entry for entry in sorted(folder.iterdir()) if entry.is_file()]
    files += [file for component in components for file in _list_files(folder / component)]
    for file in files:
        if file.suffix.lower() in _CODE:
            raise ValueError(
                f"{file} is program code, and vargen runs none that comes with a model; if it is a file of your own, "
                "keep it outside the model folder"
            )


def _list_files(folder: Path) -> list[Path]:
    """Return all files below a folder. Links to folders are followed, but each folder is visited only once."""
    found: list[Path] = []
    visited: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if os.path.realpath(os.path.join(place, name)) not in visited)
        visited.update(os.path.realpath(os.path.join(place, name)) for name in folders)
        found += [Path(place) / name for name in sorted(names)]
        if len(found) + len(visited) > _MAX_FILES:
            raise ValueError(f"{folder} holds more than {_MAX_FILES} files and folders, links followed; it is no component's")
    return found
