"""Opening a pipeline whose transformers compute with 8-bit products: the `quantization` argument.

diffusers' own argument, `quantization_config`, is accepted with the configurations of torchao that name these formats: weights
with a scale per output channel, inputs with a scale per row.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from vargen.models.component_files import read_object
from vargen.models.quantization import validate_quantization
from vargen.values import short_repr

if TYPE_CHECKING:
    from vargen.pipelines.loading import ModelFolder

logger = logging.getLogger("vargen")

_TORCHAO_FORMATS = {"Int8DynamicActivationInt8WeightConfig": "int8", "Float8DynamicActivationFloat8WeightConfig": "float8"}


def resolve_quantization(quantization: Any, quantization_config: Any = None, device: torch.device | None = None) -> str | None:
    """Return the format of `quantization`, or of diffusers' `quantization_config`; None for floating point.

    Args:
        device: where the transformers compute. Default: the CPU.

    Raises:
        ValueError: for a format that is unknown or that the device does not have, or both arguments.
        ImportError: for a `quantization_config` or a GPU, without torchao.
    """
    validate_quantization(quantization, device)
    if quantization_config is None:
        return quantization
    if quantization is not None:
        raise ValueError(f"give quantization or quantization_config, not both; got {quantization!r} and a quantization_config")
    if find_spec("torchao") is None:
        raise ImportError(
            "quantization_config needs torchao: pip install torchao, or pass quantization='int8', which needs none"
        )
    given = getattr(quantization_config, "quant_mapping", None) or {"transformer": quantization_config}
    names = {part: _format_name(each) for part, each in given.items()}
    if set(names) == {"transformer"} and names["transformer"] in _TORCHAO_FORMATS:
        found = _TORCHAO_FORMATS[names["transformer"]]
        validate_quantization(found, device)
        return found
    allowed = f"torchao's {' or '.join(_TORCHAO_FORMATS)} for the transformer"
    raise ValueError(f"quantization_config must be {allowed}, got {short_repr(names)}")


def _format_name(config: Any) -> str:
    """Name of the torchao format of a config of diffusers or torchao."""
    kind = getattr(config, "quant_type", config)
    return kind if isinstance(kind, str) else type(kind).__name__


def quantized_components(folder: ModelFolder, quantization: str | None, given: Mapping[str, Any]) -> dict[str, str]:
    """Return the formats of the components that are quantized in a model folder, or become so by a request, by name.

    Args:
        given: components that the caller passes, which are left as they are.

    Raises:
        ValueError: if the transformer of this family has no such format.
    """
    found: dict[str, str] = {}
    for part, component in folder.family.components.items():
        network: Any = component.network_class
        if not isinstance(network, type) or "quantization" not in signature(network).parameters or part in given:
            if part == "transformer" and quantization is not None and part not in given:
                name = getattr(network, "__name__", network)
                raise ValueError(f"quantization={quantization!r} is not supported by {name}; leave it out")
            continue
        entry = folder.index.get(part) or [None, None]
        if entry[1] is not None and (kind := quantization or stored_quantization(folder.path / part)):
            found[part] = kind
    return found


def gpu_quantized_components(folder: ModelFolder, quantization: str, given: Mapping[str, Any]) -> list[str]:
    """Return the names of the components that are quantized when a pipeline is opened on a GPU.

    Args:
        given: components that the caller passes, which are left as they are.

    Raises:
        ValueError: if the transformer of this family has no such format, or the folder holds a network quantized for a CPU.
    """
    found = [*quantized_components(folder, quantization, given)]
    for part in found:
        if stored := stored_quantization(folder.path / part):
            raise ValueError(
                f"device must be 'cpu' for {folder.path.name}, whose {part} was saved with quantization={stored!r}, which "
                "computes there: open the model that it was quantized from"
            )
    return found


def stored_quantization(folder: Any) -> str | None:
    """Return the format that a component was saved in; None for floating point."""
    try:
        return read_object(folder / "config.json").get("quantization")
    except ValueError:  # reported when the folder is validated
        return None


def load_quantized_components(
    folder: ModelFolder, formats: Mapping[str, str], dtypes: Mapping[str, Any], variant: str | None
) -> dict[str, Any]:
    """Load the components with these formats; see `quantized_components`."""
    components = folder.family.components
    return {
        part: components[part].network_class.from_pretrained(
            folder.path / part, quantization=kind, torch_dtype=dtypes.get(part, dtypes["default"]), variant=variant
        )
        for part, kind in formats.items()
    }
