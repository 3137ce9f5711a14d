"""Options shared by several verbs: model, sampling, device and dtype."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vargen import device
from vargen.options import OPTIONS

if TYPE_CHECKING:
    import torch


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _sampling(name: str) -> Any:
    option = OPTIONS[name]
    most = f" to {option.most:g}" if option.most < float("inf") else ""
    least = f"{'Over' if option.above else 'From'} {option.least:g}{most}"
    return typer.Option(metavar="N" if option.is_integer else "X", help=f"{least}; {option.help}. Default: the model's.")


Guidance = Annotated[float | None, _sampling("guidance_scale")]
Temperature = Annotated[float | None, _sampling("temperature")]
TopK = Annotated[int | None, _sampling("top_k")]
TopP = Annotated[float | None, _sampling("top_p")]
ModelName = Annotated[str, typer.Option(metavar="NAME|DIR|HUB ID", help="A packaged model, a folder, or a hub id.")]
Threads = Annotated[int | None, typer.Option(metavar="N", help="CPU threads. Default: as many as pay, measured.")]


def given_options(**values: float | int | None) -> dict[str, float | int]:
    """Return only the options that were given; the model's defaults apply to the others."""
    return {name: value for name, value in values.items() if value is not None}


def select_device(name: Device) -> torch.device:
    """Select the device to run on; `auto` uses a GPU if there is one.

    Raises:
        ValueError: for cuda if torch finds no GPU, or if VARGEN_KERNELS requests kernels that cannot run there.
    """
    from vargen.kernels.dispatch import explain_kernels

    chosen = device.select_device(name.value)
    explain_kernels(chosen)  # logged before weights are loaded
    return chosen


def pick_dtype(name: Dtype, place: torch.device, folder: Path | None = None) -> torch.dtype:
    """Select the dtype of the large networks; `auto` takes the default for the device and for the model in `folder`."""
    import torch

    from vargen.pipelines.loading import default_dtype

    if name is not Dtype.auto:
        return getattr(torch, name.value)
    return device.preferred_dtype(place) if folder is None else default_dtype(folder, place)


def parse_integer(text: Any) -> int:
    """Parse an integer option. Typer's own parser reads `0-7` as -7.

    Raises:
        typer.BadParameter: for anything else; typer adds the option's name.
    """
    if not re.fullmatch(r"[+-]?[0-9]{1,40}", str(text)):
        raise typer.BadParameter(f"must be a whole number, got {text!r}")
    return int(text)


def check_range(value: int | None, name: str, low: int, high: int | None = None) -> None:
    """Raise ValueError unless `value` is from `low` to `high`, or None for an option that was not given."""
    if value is not None and (value < low or (high is not None and value > high)):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be a whole number {allowed}, got {value}")


def makes_video(model: str) -> bool:
    """Whether a model generates video, according to its folder's index alone; other problems of a folder are reported later."""
    from vargen.decoding import VideoMethod
    from vargen.pipelines.registry import paradigm_of

    try:
        return paradigm_of(model) == VideoMethod.paradigm
    except ValueError:
        return False
