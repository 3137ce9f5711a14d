"""`vargen bench`: the cost of a forward pass on this machine, and the speed of the sequential baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm

from vargen.cli.console import quiet_libraries, say, table
from vargen.cli.options import Device, Dtype, check_range, pick_dtype, select_device
from vargen.cli.outputs import Write, check_apart, json_writes, model_files, result_file, write_each
from vargen.device import check_compile, set_threads
from vargen.values import short_repr

if TYPE_CHECKING:
    from vargen.evaluation.speed import BaselineReport, StepReport

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)

MODEL = typer.Option(
    metavar="NAME|DIR", help="Packaged model, folder, or an official size, random weights; `vargen info models` lists both."
)  # fmt: skip
JSON = typer.Option("--json", metavar="FILE|-", help="Write JSON to a file, or to stdout instead of the table.")
MOST_IMAGES = 1024  # in one batch
BATCH = typer.Option(metavar="N,...", help="Images at once.")


@app.command()
def step(
    model: Annotated[list[str] | None, MODEL] = None,
    tokens: Annotated[str, typer.Option(metavar="N,...", help="Tokens fed per image.")] = "1,2,4,8,16,32,64",
    batch: Annotated[str, BATCH] = "1,8",
    dtype: Annotated[Dtype, typer.Option()] = Dtype.auto,
    device: Annotated[Device, typer.Option()] = Device.auto,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads. Default: torch's.")] = None,
    guidance: Annotated[bool, typer.Option("--guidance", help="Two rows per image, as guidance feeds.")] = False,
    rounds: Annotated[int, typer.Option(metavar="N", help="Visits of each case; more are steadier.")] = 7,
    as_json: Annotated[str | None, JSON] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the curves.")] = None,
) -> None:
    """Measure the cost of a target pass by the number of tokens fed, relative to reading the weights once."""
    widths, batches = whole_numbers(tokens, "tokens"), whole_numbers(batch, "batch", MOST_IMAGES)
    check_range(rounds, "rounds", 1)
    json_file, plot_file = result_file(as_json, ".json", "json"), result_file(plot, ".png", "plot")
    from vargen.evaluation.networks import official_sizes

    names = model or ["emoji", next(iter(official_sizes()))]
    read = {"a file of model": [file for name in names for file in model_files(name)]}
    check_apart({"json": [json_file], "plot": [plot_file]}, read)
    chosen, kind, machine = prepare(device, dtype, threads, names)

    from vargen.evaluation.machine import machine_line
    from vargen.evaluation.networks import check_benchmark_model, open_benchmark_model
    from vargen.evaluation.speed import measure_steps

    for name in names:  # fail before minutes of measurement
        check_benchmark_model(name)
    reports = []
    for name in names:
        network = open_benchmark_model(name, kind, chosen)
        with tqdm(desc=name, disable=None, leave=False) as bar:

            def show(done: int, total: int, bar: tqdm = bar) -> None:
                bar.total = total
                bar.update(done - bar.n)

            report = measure_steps(network, widths, batches, guidance=guidance, rounds=rounds, progress=show)
        reports.append(report)
        del network
    document = {"machine": machine, "reports": [report.to_dict() for report in reports]}
    lines = "\n\n".join([machine_line(machine, chosen, kind), *map(_step_table, reports)])
    writes: list[Write] = [] if as_json == "-" else [("table", lambda: print(lines, flush=True))]
    writes += json_writes(as_json, json_file, document)
    if plot_file:
        from vargen.evaluation.plots import plot_steps

        writes.append((f"plot {str(plot_file)!r}", lambda: plot_steps(reports, plot_file)))
    write_each(writes)


@app.command()
def ar(
    model: Annotated[list[str] | None, MODEL] = None,
    batch: Annotated[str, BATCH] = "1,8",
    dtype: Annotated[Dtype, typer.Option()] = Dtype.auto,
    device: Annotated[Device, typer.Option()] = Device.auto,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads. Default: as many as pay, measured.")] = None,
    seconds: Annotated[float, typer.Option(metavar="X", help="Draw whole batches of each size for at least so long.")] = 10.0,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the passes, on a GPU; not timed.")] = False,
    as_json: Annotated[str | None, JSON] = None,
) -> None:  # fmt: skip
    """Measure the sequential baseline: one token per pass, with the model's default guidance and sampling."""
    batches = whole_numbers(batch, "batch", MOST_IMAGES)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds must be a finite number of at least 0, got {seconds}")
    json_file, names = result_file(as_json, ".json", "json"), model or ["emoji"]
    check_apart({"json": [json_file]}, {"a file of model": [file for name in names for file in model_files(name)]})
    chosen, kind, machine = prepare(device, dtype, threads, names)
    check_compile(compile, chosen)

    from vargen.evaluation.machine import machine_line
    from vargen.evaluation.networks import check_benchmark_model, open_benchmark_model
    from vargen.evaluation.speed import measure_baseline

    for name in names:
        check_benchmark_model(name)
    reports = []
    for name in names:
        network = open_benchmark_model(name, kind, chosen)
        for count in tqdm(batches, desc=name, disable=None, leave=False):
            reports.append(measure_baseline(network, count, seconds=seconds, compile=compile))
        del network
    document = {"machine": machine, "compiled": compile, "reports": [report.to_dict() for report in reports]}
    lines = machine_line(machine, chosen, kind) + (", compiled" if compile else "") + "\n\n" + _baseline_table(reports)
    writes: list[Write] = [] if as_json == "-" else [("table", lambda: print(lines, flush=True))]
    write_each([*writes, *json_writes(as_json, json_file, document)])


def whole_numbers(text: str, name: str, most: int = 10**9) -> list[int]:
    """Parse a comma-separated list of integers such as `"1,2,8"`.

    Raises:
        ValueError: unless all are integers from 1 to `most`.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and 0 < int(part) <= most for part in parts):
        limit = f" and at most {most}" if most < 10**9 else ""
        allowed = f"whole numbers of at least 1{limit} with commas between, such as 1,8"
        raise ValueError(f"{name} must be {allowed}, got {short_repr(text)}")
    return list(dict.fromkeys(int(part) for part in parts))


def prepare(device: Device, dtype: Dtype, threads: int | None, models: Sequence[str]) -> tuple[Any, Any, dict[str, Any]]:
    """Return the torch device, the dtype and a description of the machine.

    The default dtype is that of the first model that is not random.
    """
    set_threads(threads)
    quiet_libraries()

    from vargen.evaluation.machine import describe_machine
    from vargen.evaluation.networks import official_sizes
    from vargen.pipelines.registry import describe

    saved = next((name for name in models if name not in official_sizes()), None)
    folder = None if saved is None else describe(saved).folder
    chosen = select_device(device)
    machine = describe_machine()
    busy = machine["load"]
    if busy is not None and busy > 0.5 * machine["cores"]:
        say(f"warning: the load average is {busy:.1f} on {machine['cores']} cores, so these figures will be unsteady")
    return chosen, pick_dtype(dtype, chosen, folder), machine


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
