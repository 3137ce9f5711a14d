"""Loading and validation of official checkpoint files. Pickles are read weights-only: no code in them is executed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vargen.weight_files import load_pickle_safely, read_header, validate_shapes

State = dict[str, Tensor]

_FOLDERS = ("text_encoder", "tokenizer", "wan")  # arguments that take a folder
_PICKLES = (".pt", ".pth", ".bin")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # parts of names, anywhere in them


def read_checkpoint(file: Path, prefer: str | Sequence[str] = ()) -> State:
    """Return the tensors under their plain names, from under `prefer`, `model`, `module` or `state_dict`, or from the top.

    Each of these keys may itself be under `trainer`, where VAR's training script keeps its networks.

    A `.pt` file of the current format is memory-mapped: tensors are loaded when they are used.

    Raises:
        ValueError: the file is not a checkpoint, is damaged, would execute code if it were fully unpickled, or holds
            tensors that are empty, sparse or otherwise not plain.
    """
    if file.suffix == ".safetensors":
        read_header(file)  # its message is clearer than the loader's
        content: Any = load_file(file)
    elif file.suffix in _PICKLES and file.is_file():
        # Training checkpoints keep their command-line arguments in a Namespace, which only holds attributes.
        content = load_pickle_safely(file, [argparse.Namespace], mmap=True)
    else:
        raise ValueError(f"{file} is not a checkpoint file, which is {', '.join(_PICKLES)} or .safetensors")
    if isinstance(content, Mapping) and isinstance(content.get("trainer"), Mapping):
        content = content["trainer"]
    if isinstance(content, Mapping):
        places = [*((prefer,) if isinstance(prefer, str) else prefer), "model", "module", "state_dict"]
        content = next((content[p] for p in places if isinstance(content.get(p), Mapping)), content)
    if not isinstance(content, Mapping):
        raise ValueError(f"{file} holds a {type(content).__name__}, expected tensors by name")
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if others or not content:
        held = f"more than tensors at its top ({', '.join(others[:5])})" if others else "no tensors"
        raise ValueError(f"{file} holds {held}; expected tensors, bare or under model, module or state_dict")
    for name, value in content.items():
        _require_plain_tensor(f"{name} in {file}", value)
    state = {strip_wrapper_prefixes(str(name)): value.detach() for name, value in content.items()}
    if len(state) != len(content):
        raise ValueError(f"{file} holds a tensor twice, with and without a prefix such as 'module.' or '_orig_mod.'")
    return state


def _require_plain_tensor(name: str, value: Tensor) -> None:
    """Raise ValueError unless a tensor is non-empty and has all its entries in memory."""
    kinds = {"nested": value.is_nested, "quantized": value.is_quantized, "meta": value.is_meta}
    if any(kinds.values()) or value.layout != torch.strided:
        kind = next((kind for kind, found in kinds.items() if found), "sparse")
        raise ValueError(f"{name} is a {kind} tensor, expected a plain one")
    if value.numel() == 0:
        raise ValueError(f"{name} is empty, {list(value.shape)}: there is no network of such a size")
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise ValueError(f"{name} is {list(value.shape)}, but the file holds fewer numbers than that")


def strip_wrapper_prefixes(name: str) -> str:
    """Strip what distributed training, activation checkpointing and torch.compile add to a parameter's name."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts.pop(0)
    return ".".join(parts)


def build_network(
    kind: Callable[..., nn.Module],
    config: dict[str, Any],
    state: State,
    file: Path,
    dtype: torch.dtype | None = None,
) -> Any:
    """Build the network `kind(**config)` with the tensors of `state` as its weights, cast to `dtype` if given.

    Raises:
        ValueError: naming the file, if a tensor is missing, unexpected, of another shape, not floating-point
            or not finite.
    """
    network = describe_network(kind, config, state, file)
    placed: State = {}
    storages: set[int] = set()
    for name, value in state.items():
        weight = value.to(dtype or value.dtype).contiguous()
        if not weight.isfinite().all():
            reason = f"does not fit {dtype}" if value.isfinite().all() else "holds NaN or infinite numbers"
            raise ValueError(f"{name} in {file} {reason}")
        storage = weight.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != weight.nbytes:
            weight = weight.clone()  # safetensors cannot save views of one buffer as separate tensors
        storages.add(weight.untyped_storage().data_ptr())
        placed[name] = weight
    network.load_state_dict(placed, strict=True, assign=True)
    return network


def describe_network(kind: Callable[..., nn.Module], config: dict[str, Any], state: State, file: Path) -> Any:
    """Return the network `kind(**config)` on the meta device. Compares the tensors of `state` without reading them.

    Raises:
        ValueError: naming the file, if a tensor is missing, unexpected, of another shape or not floating-point.
    """
    try:
        with torch.device("meta"):
            network = kind(**config)
    except ValueError as error:
        raise ValueError(f"{file} does not describe a network that this library has: {error}") from error
    expected = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    validate_shapes({key: tuple(value.shape) for key, value in state.items()}, expected, str(file))
    for name, value in state.items():
        if value.dtype not in _FLOATS:
            raise ValueError(f"{name} in {file} is {value.dtype}, expected floating-point weights of 16, 32 or 64 bits")
    return network


def require_shape(state: State, name: str, dims: int, file: Path, kind: str) -> torch.Size:
    """Return the shape of a tensor that every network of a `kind` has.

    Raises:
        ValueError: it is missing or has another number of dimensions.
    """
    if name not in state:
        raise ValueError(f"{file} is not a {kind}: it has no {name}")
    if state[name].dim() != dims:
        raise ValueError(f"{file} is not a {kind}: its {name} is {list(state[name].shape)}")
    return state[name].shape


def count_modules(state: State, prefix: str) -> int:
    """Return the number of entries after `prefix`."""
    return len({key[len(prefix) :].split(".")[0] for key in state if key.startswith(prefix)})


def validate_dtype(dtype: torch.dtype | None) -> None:
    """Raise ValueError unless weights can be stored in this dtype; None keeps that of a file."""
    if dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype must be None, torch.float32, torch.float16 or torch.bfloat16, got {dtype!r}")


def validate_input_files(**inputs: Path | None) -> None:
    """Check a converter's input paths, passed by argument name, before any is read; None means not given.

    Raises:
        FileNotFoundError: naming the argument, if the path does not exist.
        ValueError: the path is a folder where a file is expected, or the reverse.
    """
    for name, path in inputs.items():
        if path is None:
            continue
        if not path.exists():
            raise FileNotFoundError(f"{name} {str(path)!r} does not exist")
        if name in _FOLDERS and not path.is_dir():
            raise ValueError(f"{name} must be a folder, got {str(path)!r}")
        if name not in _FOLDERS and not path.is_file():
            raise ValueError(f"{name} must be a file, got {str(path)!r}")


def read_labels(file: Path, num_classes: int) -> dict[int, str]:
    """Read class names from a JSON file: `{"0": "name, synonym"}` or a list of names.

    Raises:
        ValueError: the file has another form, or names a class that does not exist.
    """
    try:
        content = json.loads(file.read_text("utf-8"))
        items = enumerate(content) if isinstance(content, list) else content.items()
        labels = {int(k): v if isinstance(v, str) else ", ".join(v) for k, v in items}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not JSON of the form {{number: names}} or [names]: {error}") from error
    outside = [k for k in labels if not 0 <= k < num_classes]
    if outside:
        raise ValueError(f"{file} names class {outside[0]}, but the transformer has classes 0 to {num_classes - 1}")
    return labels


def clamp_top_k(defaults: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return sampling defaults, without a top-k that exceeds the vocabulary size."""
    return {name: value for name, value in defaults.items() if name != "top_k" or value <= vocab_size}
