"""Weight files checked by their headers: no tensor is read before names and shapes are known to fit. A digest of weights.

And files of pickled tensors or of arrays, read as data only: nothing in them runs.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from vargen.values import short_repr

Shapes = dict[str, tuple[int, ...]]
MAX_LAYERS = 1000  # networks of more are not even described: that takes minutes
FLOATS = ("F64", "F32", "F16", "BF16")  # what a network computes in, by safetensors' names


@dataclass(frozen=True)
class Stored:
    """What a header tells of a tensor: its shape, and its dtype by safetensors' name."""

    shape: tuple[int, ...]
    dtype: str


Header = dict[str, Stored]


def read_weight_header(folder: Path, stem: str, variant: str | None = None) -> Header:
    """The tensors of `folder/stem.safetensors`, or of its shards, by their names.

    Args:
        variant: part of the files' names, such as "fp16", where diffusers puts it.

    Raises:
        ValueError: if a file is missing, damaged or not safetensors.
    """
    named = f".{variant}" if variant else ""
    single, index = folder / f"{stem}{named}.safetensors", folder / f"{stem}.safetensors.index{named}.json"
    if index.is_file():  # which diffusers prefers, too
        files = _shards(index)
    elif single.is_file():
        files = [single]
    else:
        others = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        reason = f"; {', '.join(others)} may run code when opened and is not read, convert it first" if others else ""
        raise ValueError(f"{single} is missing{reason}")
    return {name: stored for file in files for name, stored in read_header(file).items()}


def check_weights(found: Header, expected: Shapes, where: str, dtypes: Mapping[str, str] | None = None) -> None:
    """Raise ValueError unless the tensors are exactly the `expected` ones, of dtypes that can be used; see `check_dtypes`."""
    check_shapes({name: stored.shape for name, stored in found.items()}, expected, where)
    check_dtypes(found, where, dtypes)


def check_dtypes(found: Header, where: str, dtypes: Mapping[str, str] | None = None) -> None:
    """Raise ValueError naming the first tensor of a wrong dtype.

    Args:
        dtypes: the one that each tensor must be of; by default any may be of any of `FLOATS`.
    """
    for name, stored in found.items():
        allowed = FLOATS if dtypes is None else (dtypes[name],)
        if stored.dtype not in allowed:
            expected = " or ".join(allowed)
            raise ValueError(f"the weights in {where} cannot be used: {name} is {stored.dtype}, expected {expected}")


def check_layer_counts(
    found: Header, config: Mapping[str, Any], counted: Mapping[str, Sequence[str]], config_file: Path
) -> None:
    """Raise ValueError unless the file has as many layers as its config says: known before a network of that size is built.

    Args:
        counted: what stands before a layer's number in tensor names, by the config's name for how many there are; the first
            of which there are tensors counts.
    """
    for key, prefixes in counted.items():
        if key not in config:
            continue
        value = config[key]
        said = len(value) if isinstance(value, list | tuple) else value
        prefix = next((each for each in prefixes if any(name.startswith(each) for name in found)), prefixes[0])
        held = len({name[len(prefix) :].partition(".")[0] for name in found if name.startswith(prefix)})
        absurd = isinstance(said, int) and said > MAX_LAYERS
        if said != held and (held or absurd):  # a file with none is another network's, of which the shapes tell more
            what = f"{len(value)} numbers in {key}" if isinstance(value, list | tuple) else f"{key}: {short_repr(value)}"
            raise ValueError(f"{config_file} has {what}, but the weights beside it hold {held} ({prefix}0 and on)")


def _shards(index: Path) -> list[Path]:
    """Files that an index names, all of them in its own folder."""
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of weight files ({error!r}); fetch it again") from error
    if outside:
        raise ValueError(f"{index} names {outside[0]!r}, which is not a file beside it")
    return [index.parent / name for name in names]


def read_header(file: Path) -> Header:
    """The tensors of a safetensors file by their names, from its header.

    Raises:
        ValueError: if the file is missing, truncated or not safetensors.
    """
    try:
        with safe_open(str(file), "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: Stored(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is missing, damaged or not a safetensors file ({error}); fetch it again") from error


def check_shapes(found: Shapes, expected: Shapes, where: str, ignore: Iterable[str] = ()) -> None:
    """Raise ValueError naming what is missing, unexpected or of another shape."""
    problems = [f"missing: {_names(expected.keys() - found.keys())}"] if expected.keys() - found.keys() else []
    extra = found.keys() - expected.keys() - set(ignore)
    if extra:
        problems.append(f"unexpected: {_names(extra)}")
    wrong = [
        f"{key} is {list(found[key])}, expected {list(shape)}"
        for key, shape in expected.items()
        if key in found and found[key] != shape
    ]
    if wrong:
        problems.append(f"{len(wrong)} of another shape: " + "; ".join(wrong[:3]) + (" ..." if len(wrong) > 3 else ""))
    if problems:
        raise ValueError(f"the weights in {where} do not fit the model. " + ". ".join(problems))


def _names(keys: Iterable[str], most: int = 5) -> str:
    ordered = sorted(keys)
    return f"{len(ordered)} ({', '.join(ordered[:most])}{', ...' if len(ordered) > most else ''})"


def load_pickle_safely(
    file: Path,
    classes: Iterable[Any] = (),
    map_location: torch.device | str = "cpu",
    mmap: bool = False,
    if_damaged: str = "fetch it again",
    if_foreign: str = "ask its author for a .safetensors file or a plain state dict",
) -> Any:
    """What `torch.save` wrote to `file`: tensors, plain values, and containers of them.

    Args:
        classes: more that it may hold. mmap: map a file of the current format instead of reading it.
        if_damaged, if_foreign: what to do then, for the error.

    Raises:
        ValueError: if it is damaged, or would run code if it were unpickled in full.
    """
    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(file, map_location=map_location, weights_only=True, mmap=mmap and zipfile.is_zipfile(file))
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        text = str(error)
    # torch's own message is left out: it recommends switching the protection off.
    blocked = re.search(r"GLOBAL (\S+)", text)
    if blocked or "TorchScript" in text:
        what = blocked[1] if blocked else "a TorchScript program"
        raise ValueError(
            f"{file} holds more than tensors: {what}. Opening it in full could run code, so it was not opened; {if_foreign}"
        )
    told = [line.split("WeightsUnpickler error:")[-1].strip() for line in text.splitlines()]
    told = [line for line in told if line and "torch.load" not in line and "weights_only" not in line]
    reason = told[-1] if told else "no data"
    raise ValueError(f"{file} is damaged, incomplete or not a torch checkpoint ({reason}); {if_damaged}")


def load_npz(file: Path, *names: str) -> dict[str, np.ndarray]:
    """The named arrays of a `.npz` file.

    Raises:
        ValueError: if it is damaged, lacks one of them, or holds pickled objects, which are not read.
    """
    try:
        with np.load(file, allow_pickle=False) as held:
            return {name: held[name] for name in names}
    except MemoryError:
        raise
    except Exception as error:  # numpy, zipfile and zlib each have their own
        # numpy's message, too, recommends unpickling
        reason = "pickled data, which is not opened" if "pickle" in str(error) else f"{type(error).__name__}: {error}"
    raise ValueError(f"{file} is damaged or not of vargen's ({reason}); remove it, and it is made anew")


def weights_digest(*networks: torch.nn.Module | None) -> str:
    """Sixteen hexadecimal digits that change with any weight of the networks."""
    digest = hashlib.sha256()
    for network in networks:
        for name, value in sorted(network.state_dict().items()) if network is not None else ():
            digest.update(name.encode())
            digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
