"""Validation of weight files by their headers, before any tensor is read. A weight digest.

Also loads pickled tensors and arrays as data only: no code in them is executed.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from vargen.folders.json_files import read_object
from vargen.reading import open_regular
from vargen.values import short_repr

Shapes = dict[str, tuple[int, ...]]
MAX_LAYERS = 1000  # networks with more are rejected early: even constructing them without memory takes minutes
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # dtypes that a network can compute in, by their safetensors names


class TensorInfo(NamedTuple):
    """The header entry of a tensor: its shape, and its dtype by safetensors' name."""

    shape: tuple[int, ...]
    dtype: str


WeightHeader = dict[str, TensorInfo]


def find_weight_files(folder: Path, stem: str, variant: str | None = None) -> list[Path]:
    """Return the weight files of a network: one, or the shards that an index names, in any letter case.

    Args:
        variant: part of the file names, for example "fp16", as in diffusers. None: without, else the only one that there is.
    """
    listed = sorted(folder.iterdir()) if folder.is_dir() else []
    there = {file.name.lower(): file for file in listed} | {file.name: file for file in listed}  # the exact name counts first
    if variant is None and not {f"{stem}.safetensors", f"{stem}.safetensors.index.json"} & there.keys():
        kind = re.compile(rf"{stem}(?:\.(\w+)\.safetensors|\.safetensors\.index\.(\w+)\.json)")
        variants = {match[1] or match[2] for name in there if (match := kind.fullmatch(name))}
        variant = variants.pop() if len(variants) == 1 else None
    named = f".{variant}" if variant else ""
    single, index = f"{stem}{named}.safetensors", f"{stem}.safetensors.index{named}.json"
    if (found := there.get(index, there.get(index.lower()))) is not None:  # diffusers prefers it as well
        shards = sorted(set(read_index(found).values()))
        return [there.get(name, there.get(name.lower(), folder / name)) for name in shards]
    if (found := there.get(single, there.get(single.lower()))) is not None:
        return [found]
    others = [file.name for file in listed if file.suffix.lower() in (".bin", ".pt", ".pth", ".ckpt")]
    reason = f"; {', '.join(others)} may run code when opened and is not read; convert it first" if others else ""
    if weights := [file.name for file in listed if file.suffix.lower() == ".safetensors"]:
        names = ", ".join(weights[:4]) + ", ..." * (len(weights) > 4)
        reason += f"; there are {names}: name a variant, or add the index of shards"
    raise ValueError(f"{folder / single} is missing{reason}")


def list_shapes(tensors: Mapping[str, Any]) -> Shapes:
    """Return the shapes of tensors, or of entries of a header, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def validate_weights(found: WeightHeader, expected: Shapes, where: str, dtypes: Mapping[str, str] | None = None) -> None:
    """Raise ValueError unless the tensors are exactly the `expected` ones, in usable dtypes."""
    validate_shapes(list_shapes(found), expected, where)
    validate_dtypes(found, where, dtypes)


def validate_dtypes(found: WeightHeader, where: str, dtypes: Mapping[str, str] | None = None) -> None:
    """Raise ValueError naming a tensor of another dtype than in `dtypes`, or in `FLOAT_DTYPES`."""
    for name, info in found.items():
        allowed = FLOAT_DTYPES if dtypes is None else (dtypes[name],)
        if info.dtype not in allowed:
            expected = " or ".join(allowed)
            raise ValueError(f"the weights in {where} cannot be used: {name} is {info.dtype}, expected {expected}")


def validate_layer_counts(
    found: WeightHeader, config: Mapping[str, Any], counted: Mapping[str, Sequence[str]], config_file: Path
) -> None:
    """Raise ValueError unless the file has the layers of its config, before a network is built.

    Args:
        counted: by config key of a layer count, the prefixes before the layer number in tensor names; the first prefix with
            any tensors is counted.
    """
    for key, prefixes in counted.items():
        if key not in config:
            continue
        value = config[key]
        layers = len(value) if isinstance(value, list | tuple) else value
        prefix = next((each for each in prefixes if any(name.startswith(each) for name in found)), prefixes[0])
        held = len({name[len(prefix) :].partition(".")[0] for name in found if name.startswith(prefix)})
        absurd = isinstance(layers, int) and layers > MAX_LAYERS
        if layers != held and (held or absurd):  # without any such layers it is another network: see its shapes
            what = f"{len(value)} numbers in {key}" if isinstance(value, list | tuple) else f"{key}: {short_repr(value)}"
            raise ValueError(f"{config_file} has {what}, but the weights in its folder hold {held} ({prefix}0 and on)")


def read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor by an index of weight files; all must be in its own folder."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} is not an index of weight files; fetch it again")
    if outside := [name for name in weight_map.values() if Path(name).name != name]:
        raise ValueError(f"{index} names {outside[0]!r}, which is not a file beside it")
    return weight_map


def read_header(file: Path) -> WeightHeader:
    """Return the tensors of a safetensors file by name, from its header."""
    try:
        open_regular(file).close()  # a pipe would block
        with safe_open(str(file), "np") as opened:  # torch would map the file so that it must fit in memory
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: TensorInfo(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:  # the last for names that no file has
        raise ValueError(f"{file} is missing, damaged or not a safetensors file ({error}); fetch it again") from error


def read_headers(files: Iterable[Path]) -> tuple[WeightHeader, dict[str, Path]]:
    """Return the tensors of several files, and the file that holds each of them."""
    header: WeightHeader = {}
    places: dict[str, Path] = {}
    for file in files:
        found = read_header(file)
        if twice := header.keys() & found.keys():
            name = min(twice)
            raise ValueError(f"{file} holds {name}, which is also in {places[name]}; download the folder again")
        header |= found
        places |= dict.fromkeys(found, file)
    return header, places


def validate_shapes(found: Shapes, expected: Shapes, where: str) -> None:
    """Raise ValueError naming missing and unexpected tensors and those of another shape."""
    problems = [f"missing: {_names(expected.keys() - found.keys())}"] if expected.keys() - found.keys() else []
    if extra := found.keys() - expected.keys():
        problems.append(f"unexpected: {_names(extra)}")
    misshapen = [key for key, shape in expected.items() if found.get(key, shape) != shape]
    if wrong := [f"{key} is {list(found[key])}, expected {list(expected[key])}" for key in misshapen]:
        problems.append(f"{len(wrong)} of another shape: " + "; ".join(wrong[:3]) + (" ..." if len(wrong) > 3 else ""))
    if problems:
        raise ValueError(f"the weights in {where} do not fit the model. " + ". ".join(problems))


def _names(keys: Iterable[str], most: int = 3) -> str:
    ordered = sorted(keys)
    return f"{len(ordered)} ({', '.join(ordered[:most])}{', ...' if len(ordered) > most else ''})"


def rename(name: str, patterns: Iterable[tuple[str, str]]) -> str:
    """Return a tensor's name in which regular expressions are replaced, in this order."""
    for pattern, replacement in patterns:
        name = re.sub(pattern, replacement, name)
    return name


def load_pickle_safely(
    file: Path,
    classes: Iterable[Any] = (),
    map_location: torch.device | str = "cpu",
    mmap: bool = False,
    advice: str = "fetch it again, or ask its author for a .safetensors file or a plain state dict",
) -> Any:
    """Load what `torch.save` wrote to `file`: tensors, plain values, and containers of them.

    Args:
        classes: further classes that it may contain. mmap: memory-map a file of the current format instead of reading it.
        advice: what to do about a file that cannot be loaded, for the error message.
    """
    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(file, map_location=map_location, weights_only=True, mmap=mmap and zipfile.is_zipfile(file))
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        text = str(error)
    # torch's own message is omitted because it recommends disabling the protection.
    blocked = re.search(r"GLOBAL (\S+)", text)
    if blocked or "TorchScript" in text:
        what = blocked[1] if blocked else "a TorchScript program"
        raise ValueError(f"{file} holds more than tensors: {what}, which could run code, so it was not opened; {advice}")
    lines = [line.split("WeightsUnpickler error:")[-1].strip() for line in text.splitlines()]
    lines = [line for line in lines if line and "torch.load" not in line and "weights_only" not in line]
    reason = lines[-1] if lines else "no data"
    raise ValueError(f"{file} is damaged, incomplete or not a torch checkpoint ({reason}); {advice}")


def load_npz(file: Path, *names: str) -> dict[str, np.ndarray]:
    """Return the named arrays of a `.npz` file."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except MemoryError:
        raise
    except Exception as error:  # numpy, zipfile and zlib each raise their own types
        # numpy's message also recommends unpickling
        reason = "pickled data, which is not opened" if "pickle" in str(error) else f"{type(error).__name__}: {error}"
    raise ValueError(f"{file} is damaged or was not written by vargen ({reason}); remove it, and it is written again")


def weights_digest(*networks: torch.nn.Module | None, dtype: torch.dtype | None = None) -> str:
    """Return sixteen hexadecimal digits that change if any weight of the networks changes.

    Args:
        dtype: floating-point weights are rounded to it first, so that the digest is that of wider dtypes, too.
    """
    digest = hashlib.sha256()
    for network in networks:
        for name, value in sorted(network.state_dict().items()) if network is not None else ():
            digest.update(name.encode())
            value = value.to(dtype) if dtype is not None and value.is_floating_point() else value
            digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
