"""Options that several verbs take: the device, the dtype."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from vargen import device

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


def pick_device(name: Device) -> torch.device:
    """The device to run on; `auto` takes a GPU where there is one.

    Raises:
        ValueError: for cuda where torch sees none.
    """
    return device.pick_device(name.value)


def pick_dtype(name: Dtype, place: torch.device, folder: Path | None = None) -> torch.dtype:
    """The dtype of the large networks; `auto` takes the default of the device and of the model in `folder`."""
    import torch

    from vargen.pipelines.loading import default_dtype

    if name is not Dtype.auto:
        return getattr(torch, name.value)
    return device.fast_dtype(place) if folder is None else default_dtype(folder, place)


def check_range(value: int | None, name: str, low: int, high: int | None = None) -> None:
    """Raise ValueError unless `value` is from `low` to `high`, or None, which an option is when it is not given."""
    if value is not None and (value < low or (high is not None and value > high)):
        allowed = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be a whole number {allowed}, got {value}")
