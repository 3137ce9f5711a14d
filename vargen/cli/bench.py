"""`vargen bench`: the cost of a pass on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vargen.cli import common
from vargen.cli.console import import_libraries, progress_bar, table
from vargen.device import set_threads
from vargen.values import require_int

if TYPE_CHECKING:
    from vargen.bench.passes import StepReport


def bench(
    ctx: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|DIR", help="Packaged, a folder, or an official size with random weights; may be repeated."),
    ] = None,
    tokens_per_pass: Annotated[str, typer.Option(metavar="N,...", help="Tokens per image and pass.")] = "1,2,4,8,16,32,64",
    batch_size: Annotated[str, typer.Option(metavar="N,...", help="Images generated at once.")] = "1,8",
    guidance: Annotated[bool, typer.Option("--guidance", help="Two CFG rows per image, as with guidance.")] = False,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Measurements of each case; more are steadier.")] = 7,
    as_json: common.Json = None,
    dtype: common.Dtype = "auto",
    quantization: common.Quantization = None,
    device: common.Device = "auto",
    threads: common.Threads = None,
) -> None:
    """Measure the cost of a pass by its number of tokens.

    Costs are relative to a pass of one token, and to reading the weights once in their format.
    """
    widths = parse_numbers(tokens_per_pass, "tokens_per_pass", 2**20)
    batches = parse_numbers(batch_size, "batch_size", 1024)
    common.check_outputs(ctx.params, {})
    import_libraries()
    set_threads(threads)
    from vargen.bench.passes import measure_steps, official_sizes, open_benchmark_model, validate_benchmark_model
    from vargen.device import summarize_machine
    from vargen.pipelines.loading import inspect_model

    sizes = official_sizes()
    names = model or ["emoji", next(iter(sizes))]
    for name in names:
        validate_benchmark_model(name)
    folders = [inspect_model(name).folder for name in names if name not in sizes]
    machine, about = common.loading(ctx, folders[0] if folders else None), common.machine_for_timing()
    place, kind = machine["device"], machine["torch_dtype"]
    reports = []
    for name in names:  # one network in memory at a time
        with progress_bar(name) as show:
            network = open_benchmark_model(name, kind, place, quantization)
            reports.append(measure_steps(network, widths, batches, guidance=guidance, rounds=repeats, progress=show))
    text = "\n\n".join([summarize_machine(about, place, kind), *map(_format, reports)])
    common.write_results(ctx, text, {"machine": about, "reports": [report.to_dict() for report in reports]})


def parse_numbers(text: str, name: str, most: int) -> list[int]:
    """Parse a comma-separated list of whole numbers from 1 to `most`, such as `"1,2,8"`."""
    parts = [part.strip() for part in text.split(",")]
    return [require_int(name, int(part) if part.isdecimal() and len(part) < 10 else part, 1, most) for part in parts]


def _format(report: StepReport) -> str:
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
    return (
        f"{report.model}, {report.dtype}: {report.parameters / 1e6:.1f} M parameters, "
        f"{report.cached_tokens} cached tokens{cfg}\n"
        f"reading {report.weight_bytes / 1e6:.1f} MB of weights once: {report.read_milliseconds:.2f} ms, "
        f"{report.gigabytes_per_second:.1f} GB/s\n" + table(head, rows, ">>>>>>")
    )
