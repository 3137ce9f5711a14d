"""Measured choices per GPU model, in `device_profiles.json`: use of Triton kernels and CUDA graphs, and the window of `auto`.

`vargen bench gpu` measures them and writes a profile of the same form, which is reviewed before it enters the file. A card that
is not in the file is unmeasured: kernels run after their self-check, passes are not captured, and `auto` uses its largest
window. VARGEN_KERNELS and VARGEN_CUDA_GRAPHS take precedence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

_CHEAP = 1.25
FILE = Path(__file__).with_name("device_profiles.json")


@dataclass(frozen=True)
class DeviceProfile:
    """Measured choices for a GPU model. None: not measured.

    Attributes:
        kernels: whether Triton kernels are faster than torch, and right.
        graphs: whether captured passes are faster than passes launched one by one, with the same tokens.
        window: tokens that `auto` feeds per pass: the most that cost little more than one.
        source: page in `benchmarks/`, or the report, that shows it.
    """

    kernels: bool | None = None
    graphs: bool | None = None
    window: int | None = None
    source: str = ""


@lru_cache(maxsize=1)
def read_profiles() -> Mapping[str, DeviceProfile]:
    """Return the profiles by the name of the GPU, as `torch.cuda.get_device_name` gives it."""
    found = json.loads(FILE.read_text("utf-8"))
    return {name: DeviceProfile(**choices) for name, choices in found.items()}


@lru_cache
def find_profile(device: str) -> DeviceProfile:
    """Return the profile of a device such as `"cuda:0"`; an unmeasured one for other devices and unknown cards."""
    import torch

    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return DeviceProfile()
    return read_profiles().get(torch.cuda.get_device_name(device), DeviceProfile())


def derive_profile(results: Sequence[Any], source: str) -> dict[str, Any]:
    """Return the choices that a device report supports, as plain values of a `DeviceProfile`.

    A choice is measured if its checks passed and a pass over one and over several tokens was timed both ways.

    Args:
        results: `PartResult` of the parts "kernels", "tokens" and "passes".
    """
    parts = {each.name: each for each in results}
    passed = {name for name, each in parts.items() if each.status == "done"}
    rows = parts["passes"].rows if "passes" in parts else []
    return asdict(
        DeviceProfile(
            kernels=_is_faster(rows, "kernels", "torch") if "kernels" in passed else _known_wrong(parts, "kernels"),
            graphs=_is_faster(rows, "kernels, graphs", "kernels") if "tokens" in passed else _known_wrong(parts, "tokens"),
            window=_widest_cheap_pass(rows),
            source=source,
        )
    )


def _is_faster(rows: Sequence[Mapping[str, Any]], variant: str, other: str) -> bool | None:
    """Whether the passes of a variant take less time in total; None if no pass was timed in both."""
    seconds = {(row["model"], row["tokens"], row["variant"]): float(row["ms"]) for row in rows}
    pairs = [(ms, seconds.get((model, tokens, other))) for (model, tokens, each), ms in seconds.items() if each == variant]
    both = [(ms, old) for ms, old in pairs if old is not None]
    return sum(ms / old for ms, old in both) < len(both) if both else None


def _widest_cheap_pass(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The widest pass that costs at most `_CHEAP` passes over one token in some variant of every next-token model that was
    timed; None without one."""
    rows = [row for row in rows if row["paradigm"] == "next-token"]
    one = {(row["model"], row["variant"]): float(row["ms"]) for row in rows if row["tokens"] == 1}
    widest: dict[str, int] = {}
    for row in rows:
        if float(row["ms"]) <= _CHEAP * one.get((row["model"], row["variant"]), 0.0):
            widest[row["model"]] = max(widest.get(row["model"], 1), int(row["tokens"]))
    found = min(widest.values(), default=1)
    return found if found > 1 else None


def _known_wrong(parts: Mapping[str, Any], name: str) -> bool | None:
    return False if name in parts and parts[name].status == "failed" and parts[name].rows else None
