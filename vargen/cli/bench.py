"""`vargen bench`: the cost of passes on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vargen.cli.console import print_status, progress_bar, quiet_libraries, table
from vargen.cli.options import (
    Device,
    DeviceName,
    Dtype,
    DtypeName,
    Json,
    QuantizationName,
    TorchThreads,
    parse_int_list,
    require_device,
    select_dtype,
)
from vargen.cli.results import ResultWriter
from vargen.device import set_threads

if TYPE_CHECKING:
    from vargen.evaluation.speed import StepReport


app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)
_MAX_BATCH = 1024

Models = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|DIR", help="A packaged model, a folder, or an official size with random weights; may be repeated."
    ),
]
BatchSizes = Annotated[str, typer.Option(metavar="N,...", help="Images generated at once.")]
Repeats = Annotated[int, typer.Option(min=1, metavar="N", help="Measurements of each case; more give steadier results.")]


@app.callback()
def bench() -> None:
    """Measure speed on this machine."""


@app.command()
def step(
    model: Models = None,
    tokens_per_pass: Annotated[str, typer.Option(metavar="N,...", help="Tokens per image and pass.")] = "1,2,4,8,16,32,64",
    batch_size: BatchSizes = "1,8",
    dtype: DtypeName = Dtype.auto,
    device: DeviceName = Device.auto,
    threads: TorchThreads = None,
    guidance: Annotated[bool, typer.Option("--guidance", help="Two CFG rows per image, as with guidance.")] = False,
    quantization: QuantizationName = None,
    repeats: Repeats = 7,
    as_json: Json = None,
) -> None:
    """Measure the cost of a pass by its number of tokens.

    Costs are relative to a pass of one token, and to reading the weights once in their format.
    """
    widths = parse_int_list(tokens_per_pass, "tokens_per_pass")
    batches = parse_int_list(batch_size, "batch_size", _MAX_BATCH)
    results = ResultWriter(as_json)
    from vargen.evaluation.networks import official_sizes

    names = model or ["emoji", next(iter(official_sizes()))]
    results.check(names)
    place, kind, machine = setup_device(device, dtype, threads, names, quantization)

    from vargen.device import summarize_machine
    from vargen.evaluation.speed import measure_steps

    reports = []
    for name, network in _open_networks(names, place, kind, quantization=quantization):
        with progress_bar(name) as show:
            reports.append(measure_steps(network, widths, batches, guidance=guidance, rounds=repeats, progress=show))
    document = {"machine": machine, "reports": [report.to_dict() for report in reports]}
    text = "\n\n".join([summarize_machine(machine, place, kind), *map(_step_table, reports)])
    results.write(text, document)


def setup_device(
    device: Device, dtype: Dtype, threads: int | None, models: Sequence[str], quantization: str | None = None
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the torch device, the dtype and a description of the machine.

    The default dtype is that of the first model that is not random.
    """
    set_threads(threads)
    quiet_libraries()

    from vargen.device import describe_machine
    from vargen.evaluation.networks import official_sizes
    from vargen.pipelines.loading import inspect_model

    saved = next((name for name in models if name not in official_sizes()), None)
    folder = None if saved is None else inspect_model(saved).folder
    place = require_device(device)
    machine = describe_machine()
    load = machine["load"]
    if load is not None and load > 0.5 * machine["cores"]:
        busy = f"the load average is {load:.1f} on {machine['cores']} cores"
        print_status(f"warning: {busy}, so the measured times will vary")
    return place, select_dtype(dtype, place, folder, quantization), machine


def _open_networks(names: Sequence[str], place: Any, kind: Any, quantization: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield each network by name, one in memory at a time; all are checked before the first is opened."""
    from vargen.evaluation.networks import open_benchmark_model, validate_benchmark_model

    for name in names:
        validate_benchmark_model(name)
    for name in names:
        yield name, open_benchmark_model(name, kind, place, quantization)


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
    cfg = ", two CFG rows per image" if report.guidance else ""
    parameters = f"{report.parameters / 1e6:.1f} M parameters"
    return (
        f"{report.model}, {report.dtype}: {parameters}, {report.cached_tokens} cached tokens{cfg}\n"
        f"reading {report.weight_bytes / 1e6:.1f} MB of weights once: {report.read_milliseconds:.2f} ms, "
        f"{report.gigabytes_per_second:.1f} GB/s\n" + table(head, rows, ">>>>>>")
    )
