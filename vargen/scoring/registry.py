"""Scorers by name, as the command line gives them: `emoji-scorer`, `clip:model=ViT-L-14,weights=FILE`, `module:function`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vargen.scoring.protocol import Scorer, as_scorer
from vargen.values import shown


def _clip(**options: Any) -> Scorer:
    from vargen.scoring.clip import CLIPScorer

    return CLIPScorer(**options)


def _image_reward(**options: Any) -> Scorer:
    from vargen.scoring.image_reward import ImageRewardScorer

    return ImageRewardScorer(**options)


def _packaged(**options: Any) -> Scorer:
    from vargen.scoring.packaged import PackagedScorer

    return PackagedScorer(**options)


PACKAGED = "emoji-scorer"  # what scores where nobody chose
# Name -> what opens it; any other name is that of a packaged scorer or a folder of one.
SCORERS: dict[str, Callable[..., Scorer]] = {"clip": _clip, "image-reward": _image_reward}


def default_scorer(model: str) -> str | None:
    """The packaged scorer of a packaged model's pictures: `emoji-scorer` for `emoji` and `emoji-var`; None without one."""
    from vargen.scoring.packaged import packaged_scorers

    name = f"{model.split('-')[0]}-scorer"
    return name if name in packaged_scorers() else None


def split_specs(text: str | Sequence[str]) -> list[str]:
    """The parts of a comma-separated list whose parts may have options: `a,b:x=1,y=2,c` is `a`, `b:x=1,y=2` and `c`."""
    found: list[str] = []
    for part in (text if isinstance(text, str) else ",".join(text)).split(","):
        name = part.split("=", 1)[0]
        if found and "=" in part and ":" not in name:
            found[-1] += "," + part
        elif part.strip():
            found.append(part.strip())
    return found


def read_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Name and options of `name:key=value,...`.

    Raises:
        ValueError: for an option without a value, or one given twice.
    """
    name, _, rest = spec.partition(":")
    options: dict[str, str] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or key.strip() in options:
            raise ValueError(f"{shown(spec)} must be name:key=value,key=value, each key once; got {shown(part)}")
        options[key.strip()] = value.strip()
    return name.strip(), options


def open_scorer(spec: str, device: torch.device | str = "cpu", batch_size: int | None = None) -> Scorer:
    """The scorer that `spec` names; see the top of this module.

    Raises:
        ValueError: for an unknown name or option. FileNotFoundError: for weights that are missing; says how to get them.
        ImportError: for a package that is not installed.
    """
    where, _, attribute = spec.partition(":")
    if attribute and "=" not in spec and where not in SCORERS:
        return _imported(where, attribute)
    name, options = read_spec(spec)
    given: dict[str, Any] = {"device": device, **({} if batch_size is None else {"batch_size": batch_size})}
    if name not in SCORERS:
        return _packaged(source=name, **_known(options, ("text_encoder",), name), **given)
    allowed = {"clip": ("model", "weights", "prefix"), "image-reward": ("weights", "tokenizer", "package", "med_config")}[name]
    chosen: dict[str, Any] = _known(options, allowed, name)
    if "package" in chosen:
        chosen["package"] = _truth(chosen["package"])
    return SCORERS[name](**chosen, **given)


def _known(options: dict[str, str], allowed: Sequence[str], name: str) -> dict[str, str]:
    unknown = [key for key in options if key not in allowed]
    if unknown:
        raise ValueError(f"scorer {name} has no option {shown(unknown[0])}; it takes {', '.join(allowed)}")
    return options


def _truth(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError(f"package must be true or false, got {shown(value)}")
    return value.lower() == "true"


def _imported(module: str, attribute: str) -> Scorer:
    """A function, a scorer, or a class of scorers without arguments; modules of the current folder are found, too."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"scorer {module}:{attribute} could not be imported: {error}") from error
    return as_scorer(value() if inspect.isclass(value) else value, attribute)
