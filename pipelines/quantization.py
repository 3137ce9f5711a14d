"""Opening a pipeline whose transformers compute with 8-bit integer products: the `quantization` argument.

diffusers' own argument, `quantization_config`, is accepted with torchao's `Int8DynamicActivationInt8WeightConfig`, the common
name of this format: int8 weights with a scale per output channel, int8 inputs with a scale per row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any

from vargen.models.quantization import validate_quantization
from vargen.values import short_repr

if TYPE_CHECKING:
    from vargen.pipelines.loading import ModelFolder

_TORCHAO_INT8 = "Int8DynamicActivationInt8WeightConfig"


def resolve_quantization(quantization: Any, quantization_config: Any = None) -> str | None:
    """Return the format of `quantization`, or of diffusers' `quantization_config`; None for floating point.

    Raises:
        ValueError: for an unknown format, or both arguments.
        ImportError: for a `quantization_config` without torchao.
    """
    validate_quantization(quantization)
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
    if names == {"transformer": _TORCHAO_INT8}:
        return "int8"
    allowed = f"torchao's {_TORCHAO_INT8} for the transformer"
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


def stored_quantization(folder: Any) -> str | None:
    """Return the format that a component was saved in; None for floating point."""
    try:
        return json.loads((folder / "config.json").read_text("utf-8")).get("quantization")
    except (OSError, ValueError, AttributeError):  # reported when the folder is validated
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
