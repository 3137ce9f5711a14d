"""`vargen compare`: several methods side by side on the same prompts and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm

from vargen.cli.bench import prepare
from vargen.cli.compare_video import VideoSetting, compared, video_writes
from vargen.cli.console import say, table
from vargen.cli.generate_video import check_picture_options
from vargen.cli.inputs import read_prompts, say_names
from vargen.cli.options import (
    Device,
    Dtype,
    Guidance,
    ModelName,
    Temperature,
    Threads,
    TopK,
    TopP,
    check_range,
    given_options,
    makes_video,
    parse_integer,
)
from vargen.cli.outputs import Write, check_apart, json_writes, model_files, result_file, save_image, targets, write_each
from vargen.device import set_threads
from vargen.files import expand_user

if TYPE_CHECKING:
    from vargen.decoding import Method
    from vargen.evaluation.compare import Comparison


def compare(
    prompt_file: Annotated[Path, typer.Option(metavar="FILE", help="Prompts, one a line; each is one picture per method.")],
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="PRESET,...",
            help="Also with settings: gsd:budget=5,window=24. The baseline joins them. Default: all that the model can run.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Images at once.")] = 1,
    window: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="Of the Jacobi presets; auto also sets the length of speculative chains."),
    ] = None,
    output: Annotated[str, typer.Option("-o", "--output", metavar="FILE.png", help="The pictures, a row per method.")] = (
        "comparison.png"
    ),
    as_json: Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the figures.")] = None,
    model: ModelName = "emoji",
    seed: Annotated[int, typer.Option(parser=parse_integer, metavar="N", help="Of the first; the next has seed + 1.")] = 0,
    guidance_scale: Guidance = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    num_blocks: Annotated[int | None, typer.Option(metavar="N", help="Blocks of a video. Default: the model's.")] = None,
    tau: Annotated[float | None, typer.Option(metavar="X", help="Of methods for video that have a threshold.")] = None,
    scorer: Annotated[str | None, typer.Option(metavar="NAME", help="Routes blocks of video. Default: emoji-scorer.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the transformer; auto is the fastest here.")] = Dtype.auto,
    device: Annotated[Device, typer.Option()] = Device.auto,
    threads: Threads = None,
) -> None:
    """Compare seconds, passes, excess acceptance and images of several methods in one run.

    The ratio is the baseline's seconds divided by the method's. `allowed` is the ratio if a step cost only its passes;
    efficiency is the first divided by the second.
    """
    place = targets(output, ["comparison"])[0]
    json_file, plot_file = result_file(as_json, ".json", "json"), result_file(plot, ".png", "plot")
    inputs = {"prompt_file": [expand_user(prompt_file, "prompt_file")], "a file of model": model_files(model)}
    check_apart({"output": [place], "json": [json_file], "plot": [plot_file]}, inputs)
    prompts = read_prompts(prompt_file)
    if makes_video(model):
        check_picture_options(
            window=window, guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p, batch=batch != 1
        )
        check_range(seed, "seed", 0, 2**63 - 1 - len(prompts))
        set_threads(threads)
        setting = VideoSetting(model, None if methods is None else [methods], num_blocks, tau, scorer, seed)
        found = compared(setting, prompts, device, dtype)
        write_each(video_writes(found, place, as_json, json_file, plot_file))
        return
    for name, value in (("num_blocks", num_blocks), ("tau", tau), ("scorer", scorer)):
        if value is not None:
            raise ValueError(f"{name} is for models of video")
    settings = given_options(guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p)
    chosen_methods = chosen(methods, window, model)
    chosen_device, kind, machine = prepare(device, dtype, threads, [model])

    from vargen.evaluation.compare import compare as run
    from vargen.evaluation.machine import machine_line
    from vargen.evaluation.plots import picture_grid, plot_comparison
    from vargen.pipelines import validation as checks
    from vargen.pipelines.registry import open_pipeline

    checks.check_seed(seed, -(-len(prompts) // checks.check_batch(batch)) * batch)
    check_fits(model, chosen_methods, settings, leave_out=methods is None)
    pipe = open_pipeline(model, torch_dtype=kind).to(chosen_device)
    if methods is None:
        for method in pipe.methods():
            if method.name in chosen_methods and method.reason is not None:
                say(f"{method.name} is left out: {method.reason}")
                del chosen_methods[method.name]
    say_names(pipe, prompts)
    with tqdm(desc="batches", disable=None, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        comparison = run(pipe, prompts, chosen_methods, batch, seed, settings, show)

    def save_pictures() -> None:
        path = save_image(picture_grid(pipe, comparison), place, {"methods": list(chosen_methods), "seeds": comparison.seeds})
        if as_json != "-":
            print(path, flush=True)

    # Measurements are written first: they took the longest to obtain and are the smallest files.
    machine = {**machine, "threads": comparison.threads}
    lines = machine_line(machine, chosen_device, kind) + "\n\n" + comparison_table(comparison) + "\n"
    document = {"machine": machine, "dtype": str(kind).removeprefix("torch."), **comparison.to_dict()}
    writes: list[Write] = [] if as_json == "-" else [("table", lambda: print(lines, flush=True))]
    writes += [*json_writes(as_json, json_file, document), (f"output {str(place.path)!r}", save_pictures)]
    if plot_file:
        writes.append((f"plot {str(plot_file)!r}", lambda: plot_comparison(comparison, plot_file)))
    write_each(writes)


def chosen(methods: str | None, window: str | None, model: str = "emoji") -> dict[str, Method]:
    """Return the methods by name, the baseline first, with `window` replaced if one is given.

    The default is every method of the model's family except the one that selects among others. Names may carry settings, as in
    `vargen eval`: see `resolve_method`.

    Raises:
        ValueError: for an unknown preset, setting or window.
    """
    from vargen.decoding import DEFAULT_METHOD, list_methods, resolve_method
    from vargen.pipelines.registry import describe, pipeline_class
    from vargen.specs import split_specs

    kind = pipeline_class(describe(model).pipeline)
    names = split_specs(methods) if methods is not None else []
    if methods is not None and not names:
        raise ValueError(f"methods must name at least one method, got {methods!r}")
    names = names or [preset.name for preset in list_methods(kind.paradigm) if preset.name != DEFAULT_METHOD]
    number = window is not None and window.isascii() and window.isdigit() and len(window) < 1000
    size: Any = int(window) if window is not None and number else window
    found: dict[str, Any] = {name: resolve_method(name, kind.paradigm) for name in (kind.baseline, *names)}
    return found if size is None else {name: method.with_window(size) for name, method in found.items()}


def check_fits(model: str, methods: dict[str, Method], settings: dict[str, Any], leave_out: bool = False) -> None:
    """Check that the model generates from prompts and supports the methods and settings, before any weight is read.

    Args:
        leave_out: remove unsupported methods from `methods` with a message, instead of raising.

    Raises:
        ValueError: with the reason, if something is unsupported.
    """
    from vargen.pipelines import validation as checks
    from vargen.pipelines.registry import describe, pipeline_class

    _, sampling = checks.check_sampling(settings)
    opened = describe(model)
    if opened.condition != "text":
        raise ValueError("model must draw from text, and this one draws classes")
    sampling.check_vocabulary(opened.vocab)
    for name, method in list(methods.items()):
        try:
            pipeline_class(opened.pipeline).check_method(opened, method)
        except ValueError as error:
            if not leave_out:
                raise
            say(f"{name} is left out: {error}")
            del methods[name]


def comparison_table(comparison: Comparison) -> str:
    """Format the comparison as a table for the terminal."""
    rows = [
        [
            method.name,
            method.kind,
            f"{method.seconds_per_image:.2f}",
            f"{method.seconds_quartiles[0]:.2f}-{method.seconds_quartiles[1]:.2f}",
            f"{method.ratio:.2f}",
            f"{method.tokens_per_pass:.2f}",
            f"{method.allowed:.2f}",
            f"{method.efficiency:.2f}",
            f"{100 * method.share_by_part.get('draft', 0.0):.0f} %",
            f"{100 * sum(method.share_by_part.get(part, 0.0) for part in ('accept', 'commit')):.0f} %",
            f"{method.relaxation_per_image:.2f}",
            f"{method.same_as_baseline}/{method.images}",
        ]
        for method in comparison.methods
    ]
    head = ["method", "kind", "s/image", "quartiles", "ratio", "tokens/pass", "allowed", "efficiency", "drafting", "rest"]
    head += ["relaxation", f"same as {comparison.baseline}"]
    curve = ", ".join(f"{width}: {1e3 * seconds:.2f}" for width, seconds in comparison.cost_curve.items())
    settings = ", ".join(f"{key} {value:g}" for key, value in comparison.sampling.items() if value is not None)
    return (
        f"{len(comparison.prompts)} pictures, batch {comparison.batch}, {settings}\n"
        f"milliseconds of a pass by tokens fed: {curve}\n\n" + table(head, rows, "<<>>>>>>>>>>")
    )
