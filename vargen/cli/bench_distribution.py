"""`vargen bench distribution`: test whether a method samples from the same distribution as `ar`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from vargen.cli.bench import setup_device
from vargen.cli.compare import Window, select_methods, validate_request
from vargen.cli.console import print_status, progress_bar, table
from vargen.cli.inputs import MAX_IMAGES, read_prompts
from vargen.cli.options import (
    Device,
    DeviceName,
    Dtype,
    DtypeName,
    Guidance,
    Json,
    ModelName,
    Threads,
    explicit_options,
    validate_range,
)
from vargen.cli.outputs import model_files, validate_writable
from vargen.cli.results import ResultWriter, describe_failed_write
from vargen.files import expand_user

RENAMED = {"cache": "token-cache", "pictures": "num-images", "batch": "batch-size", "strong": "negative-control"}


def distribution(
    prompt_file: Annotated[Path, typer.Option(metavar="FILE", help="One prompt per line, used in turn.")],
    token_cache: Annotated[Path, typer.Option(metavar="DIR", help="Stores the tokens; an unfinished run in it is resumed.")],
    methods: Annotated[str, typer.Option(metavar="METHOD,...")] = "ar,sjd,scd,gumbel,gsd,speculative",
    num_images: Annotated[int, typer.Option(metavar="N", help="Images per method.")] = 1000,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Images generated at once.")] = 50,
    permutations: Annotated[int, typer.Option(metavar="N", help="Of each test; the smallest p-value is 1 / (N + 1).")] = 200,
    negative_control: Annotated[
        bool, typer.Option("--negative-control", help="Also run gsd with large groups, whose difference the tests must detect.")
    ] = False,
    as_json: Json = None,
    model: ModelName = "emoji",
    window: Window = None,
    guidance_scale: Guidance = None,
    dtype: DtypeName = Dtype.auto,
    device: DeviceName = Device.auto,
    threads: Threads = None,
) -> None:
    """Test whether methods sample from one distribution.

    Compares each method's images with sequential ones by two-sample tests, with the same prompts and different seeds. Small
    p-values mean that the distributions differ. Comparing `ar` with itself shows the results of the tests where there is no
    difference. A guidance scale of 1 halves the work and broadens the distribution.
    """
    validate_range(num_images, "num_images", 2, MAX_IMAGES)
    validate_range(permutations, "permutations", 1)
    results, cache = ResultWriter(as_json), expand_user(token_cache, "token_cache")
    validate_writable(cache, "token_cache")
    inputs = {"prompt_file": [expand_user(prompt_file, "prompt_file")], "a file of token_cache": model_files(str(cache))}
    results.check([model], inputs=inputs)
    prompts = read_prompts(prompt_file)
    selected = select_methods(methods, model, window)
    place, kind, machine = setup_device(device, dtype, threads, [model])

    from vargen.decoding import Accelerator, GroupedRule
    from vargen.evaluation.distribution import run_distribution_tests
    from vargen.pipelines import validation
    from vargen.pipelines.registry import open_pipeline

    grouped = selected.get("gsd")
    if negative_control and isinstance(grouped, Accelerator):
        wide = dataclasses.replace(grouped, acceptance=GroupedRule(size=50, delta=1.0))
        selected["gsd, 50 tokens a group"] = wide
    sampling = explicit_options(guidance_scale=guidance_scale)
    validation.validate_batch_size(batch_size)
    validate_request(model, selected, sampling)
    pipe = open_pipeline(model, torch_dtype=kind).to(place)
    tests = partial(run_distribution_tests, pipe, prompts, selected, num_images, batch_size, cache, permutations, sampling)
    report, saved = _run_with_progress(tests, num_images * (len(selected) + 1))
    results.write(_distribution_table(report), {"machine": machine, **report})
    if not saved:
        raise typer.Exit(1)


def _run_with_progress(tests: Callable[..., dict[str, Any]], total: int) -> tuple[dict[str, Any], bool]:
    """Run the tests on `total` images with a progress bar. Returns their report, and whether all tokens were saved."""
    done, saved = 0, True

    def on_cache_error(file: Path, error: OSError) -> None:
        nonlocal saved
        if saved:
            print_status(describe_failed_write(f"token_cache {str(file)!r}", error) + "; the run continues without it")
        saved = False

    with progress_bar("generating", "images") as show:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            show(done, total)

        show(0, total)
        report = tests(progress=advance, on_cache_error=on_cache_error)
    return report, saved


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
        f"{report['num_images']} images per method, compared with {report['baseline']}; p-values from "
        f"{report['permutations']} permutations\n\n"
        + table(["method", "kind", "tokens/pass", "relaxation", *tests], rows, "<<>>" + ">" * len(tests))
    )
