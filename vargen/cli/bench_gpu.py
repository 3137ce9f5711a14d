"""`vargen bench gpu`: check and measure everything that depends on the device, and write a report."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vargen.cli.console import print_json, print_status, quiet_libraries
from vargen.cli.options import Device, DeviceName, require_device
from vargen.cli.results import write_json
from vargen.files import expand_user
from vargen.values import short_repr

_MAX_MINUTES = 24 * 60
_MARGIN = 5.0  # seconds for the start of the interpreter, and for what follows the last part


def gpu(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Folder of the report.")],
    minutes: Annotated[float, typer.Option(metavar="X", help="For all parts together.")] = 10.0,
    part: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this part; may be repeated.")] = None,
    device: DeviceName = Device.auto,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Check and measure everything that depends on the device.

    Kernels against references, tokens of kernels and graphs, cost of passes, methods, batches, images and videos, in this
    order. Each part runs in its own process and stops in time. Writes report.md, a JSON file per part and, on a GPU,
    profile.json with the choices that it supports. On a CPU, what needs CUDA is skipped.
    """
    end = time.monotonic() + 60 * minutes - min(_MARGIN, 6 * minutes)
    if not 0 < minutes <= _MAX_MINUTES:
        raise ValueError(f"minutes must be above 0 and at most {_MAX_MINUTES}, got {minutes:g}")
    folder = expand_user(output, "output")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output must be a folder, got the file {short_repr(str(folder))}")
    quiet_libraries()

    from vargen.evaluation.device_parts import PARTS

    names = part or list(PARTS)
    if unknown := set(names) - PARTS.keys():
        raise ValueError(f"part must be one of {', '.join(PARTS)}, got {short_repr(min(unknown))}")
    place = require_device(device).type
    folder.mkdir(parents=True, exist_ok=True)

    from vargen.device_profiles import derive_profile
    from vargen.evaluation.device_parts import describe_device
    from vargen.evaluation.device_report import PartResult, run_report, write_markdown
    from vargen.evaluation.plots import plot_device_passes

    facts, results = describe_device(place), []

    def save(result: PartResult) -> None:
        results.append(result)
        print_status(f"{result.name}: {result.status}, {len(result.rows)} rows, {result.seconds:.0f} s")
        if result.name == "passes" and result.rows:
            plot_device_passes(result.rows, folder / "passes.png")
        write_markdown(results, facts, folder)
        write_json(folder / "report.json", {"facts": facts, "parts": [asdict(each) for each in results]})

    run_report(PARTS, names, place, end - time.monotonic(), folder, save)
    if place == "cuda":
        import torch

        write_json(folder / "profile.json", {torch.cuda.get_device_name(): derive_profile(results, "report.md")})
    if as_json:
        print_json({"facts": facts, "parts": [asdict(each) for each in results]})
    else:
        print(folder / "report.md")
    if any(each.status == "failed" for each in results):
        raise typer.Exit(1)
