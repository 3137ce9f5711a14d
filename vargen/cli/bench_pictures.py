"""`vargen bench var`: end-to-end time per image of a next-scale model, against the published loop and the roofline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from tqdm import tqdm

from vargen.cli.bench import BATCH, JSON, MODEL, MOST_IMAGES, prepare, whole_numbers
from vargen.cli.console import table
from vargen.cli.options import Device, Dtype, check_range
from vargen.cli.outputs import Write, check_apart, json_writes, model_files, result_file, write_each

if TYPE_CHECKING:
    from vargen.evaluation.image_speed import PictureReport


def pictures(
    model: Annotated[list[str] | None, MODEL] = None,
    batch: Annotated[str, BATCH] = "1",
    dtype: Annotated[Dtype, typer.Option()] = Dtype.auto,
    device: Annotated[Device, typer.Option()] = Device.auto,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads. Default: torch's.")] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Timed turns of each; more are steadier.")] = 5,
    compile: Annotated[bool, typer.Option("--compile", help="Compile our passes, on a GPU; not timed.")] = False,
    as_json: Annotated[str | None, JSON] = None,
) -> None:
    """Measure milliseconds per image of a next-scale model, against the published sampling loop.

    Both with and without pixel decoding. Runs of the published loop, in float32, alternate with ours. The roofline is the
    minimum time to read the weights, or to do the floating-point operations at the rate of a large matrix product.
    """
    batches = whole_numbers(batch, "batch", MOST_IMAGES)
    check_range(rounds, "rounds", 1)
    names = model or ["var-d16"]
    json_file = result_file(as_json, ".json", "json")
    check_apart({"json": [json_file]}, {"a file of model": [file for name in names for file in model_files(name)]})
    chosen, kind, machine = prepare(device, dtype, threads, names)

    from vargen.evaluation.image_speed import measure_pictures
    from vargen.evaluation.machine import machine_line
    from vargen.evaluation.networks import check_benchmark_model, open_benchmark_model

    for name in names:  # fail before minutes of measurement
        check_benchmark_model(name, whole_images=True)
    reports = []
    for name in names:
        network = open_benchmark_model(name, kind, chosen)
        for count in batches:
            with tqdm(desc=f"{name}, {count} at once", total=rounds, disable=None, leave=False) as bar:

                def show(done: int, total: int, bar: tqdm = bar) -> None:
                    bar.update(done - bar.n)

                reports.append(measure_pictures(network, count, rounds=rounds, compile=compile, progress=show))
        del network
    document = {"machine": machine, "compiled": compile, "reports": [report.to_dict() for report in reports]}
    lines = machine_line(machine, chosen, kind) + (", compiled" if compile else "") + "\n\n" + _table(reports)
    writes: list[Write] = [] if as_json == "-" else [("table", lambda: print(lines, flush=True))]
    write_each([*writes, *json_writes(as_json, json_file, document)])


def _table(reports: list[PictureReport]) -> str:
    rows = []
    for report in reports:
        both, theirs = report.drawing + report.decoding, report.published_drawing + report.published_decoding
        numbers = [
            ("tokens", report.drawing, report.published_drawing, report.ratio, report.roofline, report.share),
            ("and pixels", both, theirs, report.ratio_with_pixels, report.roofline_with_pixels, report.share_with_pixels),
        ]
        for what, ours, port, ratio, least, share in numbers:
            cells = [f"{ours:.1f}", f"{port:.1f}", f"{ratio:.2f}", f"{least:.1f}", f"{100 * share:.0f} %"]
            rows.append([report.model, str(report.batch), what, *cells])
    head = ["model", "batch", "", "ms a picture", "published", "ratio", "roofline", "share of it"]
    first = reports[0]
    rates = f"{first.gigabytes_per_second:.1f} GB/s read, {first.gigaflops:.0f} GFLOP/s of a product, {first.threads} threads"
    return f"{rates}; the published loop runs in float32\n\n" + table(head, rows, "<><>>>>>")
