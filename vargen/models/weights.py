"""Weight files checked by their headers: no tensor is read before names and shapes are known to fit. A digest of weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

Shapes = dict[str, tuple[int, ...]]


def check_weights(folder: Path, stem: str, expected: Shapes, variant: str | None = None) -> None:
    """Raise ValueError unless `folder/stem.safetensors` (or its shards) holds exactly the `expected` shapes.

    Args:
        variant: part of the files' names, such as "fp16", where diffusers puts it.
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
    found: Shapes = {}
    for file in files:
        found.update(header_shapes(file))
    compare_shapes(found, expected, str(folder))


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


def header_shapes(file: Path) -> Shapes:
    """Names and shapes in a safetensors file, from its header.

    Raises:
        ValueError: if the file is missing, truncated or not safetensors.
    """
    try:
        with safe_open(str(file), "pt") as opened:
            return {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is missing, damaged or not a safetensors file ({error}); fetch it again") from error


def compare_shapes(found: Shapes, expected: Shapes, where: str, ignore: Iterable[str] = ()) -> None:
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


def weights_digest(*networks: torch.nn.Module | None) -> str:
    """Sixteen hexadecimal digits that change with any weight of the networks."""
    digest = hashlib.sha256()
    for network in networks:
        for name, value in sorted(network.state_dict().items()) if network is not None else ():
            digest.update(name.encode())
            digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
