"""`vargen bench distribution`: test whether a method samples from the same distribution as `ar`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from vargen.cli.bench import prepare
from vargen.cli.compare import check_fits, chosen
from vargen.cli.console import say, table
from vargen.cli.inputs import MOST_PICTURES, read_prompts
from vargen.cli.options import Device, Dtype, check_range
from vargen.cli.outputs import (
    Write,
    check_apart,
    check_writable,
    json_writes,
    model_files,
    not_written,
    result_file,
    write_each,
)
from vargen.files import expand_user


def distribution(
    prompt_file: Annotated[Path, typer.Option(metavar="FILE", help="Prompts, one a line, drawn in turn.")],
    cache: Annotated[Path, typer.Option(metavar="DIR", help="Keeps the tokens; a run found there goes on.")],
    methods: Annotated[str, typer.Option(metavar="PRESET,...")] = "ar,sjd,scd,gumbel,gsd,speculative",
    pictures: Annotated[int, typer.Option(metavar="N", help="Of each method.")] = 1000,
    batch: Annotated[int, typer.Option(metavar="N", help="Images at once.")] = 50,
    permutations: Annotated[int, typer.Option(metavar="N", help="Of each test; the least p-value is 1 / (N + 1).")] = 200,
    strong: Annotated[
        bool, typer.Option("--strong", help="Also draw a gsd with large groups, which the tests must find out.")
    ] = False,
    as_json: Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write JSON.")] = None,
    model: Annotated[str, typer.Option(metavar="NAME|DIR|HUB ID")] = "emoji",
    window: Annotated[str | None, typer.Option(metavar="N", help="Of the Jacobi presets.")] = None,
    guidance_scale: Annotated[
        float | None, typer.Option(metavar="X", help="1 halves the work and broadens the distribution. Default: the model's.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option()] = Dtype.auto,
    device: Annotated[Device, typer.Option()] = Device.auto,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads. Default: as many as pay, measured.")] = None,
) -> None:
    """Compare each method's images with sequential ones by two-sample tests, with the same prompts and different seeds.

    Small p-values mean that the distributions differ. Comparing `ar` with itself shows the results of the tests where there is
    no difference.
    """
    check_range(pictures, "pictures", 2, MOST_PICTURES)
    check_range(permutations, "permutations", 1)
    json_file, kept = result_file(as_json, ".json", "json"), expand_user(cache, "cache")
    check_writable(kept, "cache")
    inputs = {"prompt_file": [expand_user(prompt_file, "prompt_file")], "a file of model": model_files(model)}
    check_apart({"json": [json_file]}, {**inputs, "a file of cache": model_files(str(kept))})
    prompts = read_prompts(prompt_file)
    asked = chosen(methods, window, model)
    chosen_device, kind, machine = prepare(device, dtype, threads, [model])

    from vargen.decoding import Accelerator, GroupedRule, Method
    from vargen.evaluation.distribution import distribution_report
    from vargen.pipelines import validation as checks
    from vargen.pipelines.registry import open_pipeline

    accelerators: dict[str, Method] = {}
    for name, accelerator in asked.items():
        accelerators[name] = accelerator
        if strong and name == "gsd" and isinstance(accelerator, Accelerator):
            wide = dataclasses.replace(accelerator, acceptance=GroupedRule(size=50, delta=1.0))
            accelerators["gsd, 50 tokens a group"] = wide
    settings = {} if guidance_scale is None else {"guidance_scale": guidance_scale}
    checks.check_batch(batch)
    check_fits(model, accelerators, settings)
    pipe = open_pipeline(model, torch_dtype=kind).to(chosen_device)
    with tqdm(total=pictures * (len(accelerators) + 1), desc="pictures", disable=None, leave=False) as bar:
        lost: list[Path] = []

        def not_kept(file: Path, error: OSError) -> None:
            if not lost:
                say(not_written(f"cache {str(file)!r}", error) + "; the run goes on without keeping its tokens")
            lost.append(file)

        report = distribution_report(
            pipe, prompts, accelerators, pictures, batch, kept, permutations, settings, bar.update, not_kept
        )
    writes: list[Write] = [] if as_json == "-" else [("table", lambda: print(_distribution_table(report), flush=True))]
    write_each([*writes, *json_writes(as_json, json_file, {"machine": machine, **report})])
    if lost:
        raise typer.Exit(1)


def _distribution_table(report: dict[str, Any]) -> str:
    tests = list(next(iter(report["methods"].values()))["tests"])
    rows = [
        [
            name,
            values["kind"],
            f"{values['tokens_per_pass']:.2f}",
            f"{values['relaxation_per_image']:.1f}",
            *(f"{values['tests'][test]['p_value']:.3f}" for test in tests),
        ]
        for name, values in report["methods"].items()
    ]
    return (
        f"{report['pictures']} pictures of each method against {report['baseline']}, p-values of {report['permutations']} "
        "permutations\n\n" + table(["method", "kind", "tokens/pass", "relaxation", *tests], rows, "<<>>" + ">" * len(tests))
    )
