"""`vargen bench`: what a pass costs on this machine, and how fast the sequential baseline is."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm

from vargen.cli.console import print_json, quiet_libraries, say, table
from vargen.cli.options import Device, Dtype, check_range, pick_device, pick_dtype
from vargen.cli.outputs import check_writable
from vargen.compat import check_matplotlib
from vargen.device import fix_threads
from vargen.values import shown

if TYPE_CHECKING:
    from vargen.evaluation.speed import BaselineReport, StepReport

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)

_MODEL = typer.Option(
    metavar="NAME|DIR", help="Packaged model, folder, or llamagen-b, -l, -xl, -xxl, -3b with random weights; may be repeated."
)  # fmt: skip
_JSON = typer.Option("--json", metavar="FILE|-", help="Write JSON to a file, or to stdout instead of the table.")
MOST_IMAGES = 1024  # at once
_BATCH = typer.Option(metavar="N,...", help="Images at once.")


@app.command()
def step(
    model: Annotated[list[str] | None, _MODEL] = None,
    tokens: Annotated[str, typer.Option(metavar="N,...", help="Tokens fed per image.")] = "1,2,4,8,16,32,64",
    batch: Annotated[str, _BATCH] = "1,8",
    dtype: Annotated[Dtype, typer.Option()] = Dtype.auto,
    device: Annotated[Device, typer.Option()] = Device.auto,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads. Default: torch's.")] = None,
    guidance: Annotated[bool, typer.Option("--guidance", help="Two rows per image, as guidance feeds.")] = False,
    rounds: Annotated[int, typer.Option(metavar="N", help="Visits of each case; more are steadier.")] = 7,
    as_json: Annotated[str | None, _JSON] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the curves.")] = None,
) -> None:
    """Cost of one target pass against the tokens it feeds, and against reading its weights once."""
    widths, batches = whole_numbers(tokens, "tokens"), whole_numbers(batch, "batch", MOST_IMAGES)
    check_range(rounds, "rounds", 1)
    check_result_file(as_json, ".json", "json")
    check_result_file(plot, ".png", "plot")
    names = model or ["emoji", "llamagen-b"]
    chosen, kind, machine = prepare(device, dtype, threads, names)

    from vargen.evaluation.machine import machine_line
    from vargen.evaluation.network import check_network, open_network
    from vargen.evaluation.speed import measure_steps

    for name in names:  # before minutes are spent on the first
        check_network(name)
    reports = []
    for name in names:
        network = open_network(name, kind, chosen)
        with tqdm(desc=name, disable=None, leave=False) as bar:

            def show(done: int, total: int, bar: tqdm = bar) -> None:
                bar.total = total
                bar.update(done - bar.n)

            report = measure_steps(network, widths, batches, guidance=guidance, rounds=rounds, progress=show)
        reports.append(report)
        del network
    document = {"machine": machine, "reports": [report.to_dict() for report in reports]}
    if as_json != "-":
        print(machine_line(machine, chosen, kind))
        for report in reports:
            print("\n" + _step_table(report))
    write_json(as_json, document)
    if plot:
        from vargen.evaluation.speed_plot import plot_steps

        plot_steps(reports, plot)


@app.command()
def ar(
    model: Annotated[list[str] | None, _MODEL] = None,
    batch: Annotated[str, _BATCH] = "1,8",
    dtype: Annotated[Dtype, typer.Option()] = Dtype.auto,
    device: Annotated[Device, typer.Option()] = Device.auto,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads. Default: as many as pay, measured.")] = None,
    seconds: Annotated[float, typer.Option(metavar="X", help="Draw whole batches of each size for at least so long.")] = 10.0,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the passes; that is not timed.")] = False,
    as_json: Annotated[str | None, _JSON] = None,
) -> None:  # fmt: skip
    """Speed of the sequential baseline: one token a pass, with the model's own guidance and sampling."""
    batches = whole_numbers(batch, "batch", MOST_IMAGES)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds must be a finite number of at least 0, got {seconds}")
    check_result_file(as_json, ".json", "json")
    names = model or ["emoji"]
    chosen, kind, machine = prepare(device, dtype, threads, names)

    from vargen.evaluation.machine import machine_line
    from vargen.evaluation.network import check_network, open_network
    from vargen.evaluation.speed import measure_baseline

    for name in names:
        check_network(name)
    reports = []
    for name in names:
        network = open_network(name, kind, chosen)
        for count in tqdm(batches, desc=name, disable=None, leave=False):
            reports.append(measure_baseline(network, count, seconds=seconds, compile=compile))
        del network
    document = {"machine": machine, "compiled": compile, "reports": [report.to_dict() for report in reports]}
    if as_json != "-":
        print(machine_line(machine, chosen, kind) + (", compiled" if compile else "") + "\n")
        print(_baseline_table(reports))
    write_json(as_json, document)


def whole_numbers(text: str, name: str, most: int = 10**9) -> list[int]:
    """`"1,2,8"` as numbers.

    Raises:
        ValueError: unless all are whole numbers from 1 to `most`.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and 0 < int(part) <= most for part in parts):
        limit = f" and at most {most}" if most < 10**9 else ""
        allowed = f"whole numbers of at least 1{limit} with commas between, such as 1,8"
        raise ValueError(f"{name} must be {allowed}, got {shown(text)}")
    return list(dict.fromkeys(int(part) for part in parts))


def check_result_file(path: str | Path | None, suffix: str, name: str) -> None:
    """Before minutes of measuring: can the result be written?"""
    if path is None or str(path) == "-":
        return
    if Path(path).suffix.lower() != suffix or Path(path).is_dir():
        raise ValueError(f"{name} must be a file ending in {suffix}, got {str(path)!r}")
    check_writable(Path(path).parent)
    if name == "plot":
        check_matplotlib("--plot needs")


def prepare(device: Device, dtype: Dtype, threads: int | None, models: Sequence[str]) -> tuple[Any, Any, dict[str, Any]]:
    """The torch device, the dtype (by default that of the first model that is no random one), and the machine."""
    fix_threads(threads)
    quiet_libraries()

    from vargen.evaluation.machine import describe_machine
    from vargen.evaluation.network import RANDOM_MODELS
    from vargen.pipelines.loading import checked_folder

    saved = next((name for name in models if name not in RANDOM_MODELS), None)
    folder = None if saved is None else checked_folder(saved, "LlamaGenPipeline", {})
    chosen = pick_device(device)
    machine = describe_machine()
    busy = machine["load"]
    if busy is not None and busy > 0.5 * machine["cores"]:
        say(f"warning: the load average is {busy:.1f} on {machine['cores']} cores, so these figures will be unsteady")
    return chosen, pick_dtype(dtype, chosen, folder), machine


def write_json(where: str | None, document: dict[str, Any]) -> None:
    if where == "-":
        print_json(document)
    elif where is not None:
        from vargen.files import whole_file

        with whole_file(Path(where)) as temporary:
            temporary.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _step_table(report: StepReport) -> str:
    rows = [
        [
            str(result.batch),
            str(result.tokens),
            f"{result.milliseconds:.2f}",
            f"{result.quartiles[0]:.2f}-{result.quartiles[1]:.2f}",
            "" if result.over_one is None else f"{result.over_one:.2f}",
            f"{result.over_read:.2f}",
        ]
        for result in report.results
    ]
    head = ["batch", "tokens", "ms", "quartiles", "x 1 token", "x weights"]
    rows_each = ", two rows per image" if report.guidance else ""
    return (
        f"{report.model}: {report.parameters / 1e6:.1f} M parameters, {report.cached_tokens} tokens held{rows_each}\n"
        f"reading {report.weight_bytes / 1e6:.1f} MB of weights once: {report.read_milliseconds:.2f} ms, "
        f"{report.gigabytes_per_second:.1f} GB/s\n" + table(head, rows, ">>>>>>")
    )


def _baseline_table(reports: list[BaselineReport]) -> str:
    parts = list(dict.fromkeys(part for report in reports for part in report.share_by_part))
    rows = [
        [
            report.model,
            str(report.batch),
            f"{report.guidance_scale:g}",
            f"{report.tokens_per_second:.1f}",
            f"{report.tokens_per_second_per_image:.1f}",
            f"{report.milliseconds_per_pass:.2f}",
            *(f"{100 * report.share_by_part.get(part, 0.0):.0f} %" for part in parts),
        ]
        for report in reports
    ]
    head = ["model", "batch", "guidance", "tokens/s", "per image", "ms a pass", *parts]
    return table(head, rows, "<>>>>>" + ">" * len(parts))
