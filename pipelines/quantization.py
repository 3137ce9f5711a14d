"""Opening a pipeline whose transformers compute with 8-bit products: the `quantization` argument."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

from vargen.models.component_files import read_object

if TYPE_CHECKING:
    from vargen.pipelines.loading import ModelFolder


def quantized_components(folder: ModelFolder, quantization: str | None, given: Mapping[str, Any]) -> dict[str, str]:
    """Return the formats of the components that are quantized in a model folder, or become so by a request, by name.

    Args:
        given: components that the caller passes, which are left as they are.
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
