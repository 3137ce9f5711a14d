"""Official checkpoint files to checked weights. Pickles are read weights-only: nothing in them runs."""

from __future__ import annotations

import argparse
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vargen.models.weights import compare_shapes, read_header

State = dict[str, Tensor]

_PICKLES = (".pt", ".pth", ".bin")


def read_checkpoint(file: Path, prefer: str | None = None) -> State:
    """Tensors by their plain names, from under `prefer`, `model`, `module` or `state_dict`, or from the top.

    A `.pt` file of the current format is mapped, not read: tensors come into memory when they are used.

    Raises:
        ValueError: if it is no checkpoint file, damaged, or would run code if it were unpickled in full.
    """
    if file.suffix == ".safetensors":
        read_header(file)  # its message is clearer than the loader's
        content: Any = load_file(file)
    elif file.suffix in _PICKLES and file.is_file():
        content = _unpickle(file)
    else:
        raise ValueError(f"{file} is not a checkpoint file, which is {', '.join(_PICKLES)} or .safetensors")
    if isinstance(content, Mapping):
        places = [prefer, "model", "module", "state_dict"]
        content = next((content[p] for p in places if isinstance(content.get(p), Mapping)), content)
    if not isinstance(content, Mapping):
        raise ValueError(f"{file} holds a {type(content).__name__}, expected tensors by name")
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if others or not content:
        held = f"more than tensors at its top ({', '.join(others[:5])})" if others else "no tensors"
        raise ValueError(f"{file} holds {held}; expected tensors, bare or under model, module or state_dict")
    state = {_plain(str(name)): value.detach() for name, value in content.items()}
    if len(state) != len(content):
        raise ValueError(f"{file} holds a tensor twice, with and without a 'module.' or '_orig_mod.' prefix")
    return state


def _plain(name: str) -> str:
    """A parameter's name without what distributed training and torch.compile put before it."""
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    while len(parts) > 1 and parts[0] == "module":
        parts.pop(0)
    return ".".join(parts)


def _unpickle(file: Path) -> Any:
    try:
        # Training checkpoints keep their command line in a Namespace, which only holds attributes.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        text = str(error)
    # torch's own message is left out: it recommends switching the protection off.
    blocked = re.search(r"GLOBAL (\S+)", text)
    if blocked or "TorchScript" in text:
        what = blocked[1] if blocked else "a TorchScript program"
        raise ValueError(
            f"{file} holds more than tensors: {what}. Opening it in full could run code, so it was not "
            "opened; ask its author for a .safetensors file or a plain state dict"
        )
    told = [line.strip() for line in text.splitlines() if line.strip() and "torch.load" not in line]
    reason = told[-1] if told else "no data"
    raise ValueError(f"{file} is damaged, incomplete or not a torch checkpoint ({reason}); fetch it again")


def build(
    kind: Callable[..., nn.Module],
    config: dict[str, Any],
    state: State,
    file: Path,
    dtype: torch.dtype | None = None,
) -> Any:
    """The network `kind(**config)` with the tensors of `state` as its weights, cast to `dtype` if given.

    Raises:
        ValueError: naming the file, if a tensor is missing, unexpected, of another shape, not floating-point
            or not finite.
    """
    try:
        with torch.device("meta"):
            network = kind(**config)
    except ValueError as error:
        raise ValueError(f"{file} does not describe a network that this library has: {error}") from error
    expected = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    compare_shapes({key: tuple(value.shape) for key, value in state.items()}, expected, str(file))
    placed: State = {}
    storages: set[int] = set()
    for name, value in state.items():
        if not value.is_floating_point():
            raise ValueError(f"{name} in {file} is {value.dtype}, expected floating-point weights")
        weight = value.to(dtype or value.dtype).contiguous()
        if not weight.isfinite().all():
            reason = f"does not fit {dtype}" if value.isfinite().all() else "holds NaN or infinite numbers"
            raise ValueError(f"{name} in {file} {reason}")
        storage = weight.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != weight.nbytes:
            weight = weight.clone()  # views into one buffer cannot be saved side by side
        storages.add(weight.untyped_storage().data_ptr())
        placed[name] = weight
    network.load_state_dict(placed, strict=True, assign=True)
    return network
