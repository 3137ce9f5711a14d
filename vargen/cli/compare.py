"""`vargen compare`: several methods side by side on the same prompts and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vargen.cli.bench import setup_device
from vargen.cli.compare_video import VideoComparisonOptions, compare_and_write
from vargen.cli.console import print_status, progress_bar, table
from vargen.cli.inputs import read_prompts, report_emoji_names
from vargen.cli.options import (
    Device,
    DeviceName,
    Dtype,
    DtypeName,
    Guidance,
    Json,
    ModelName,
    QuantizationName,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
    check_names,
    explicit_options,
    makes_video,
    reject_options,
)
from vargen.cli.outputs import resolve_outputs
from vargen.cli.results import ResultWriter, save_image
from vargen.device import set_threads
from vargen.files import expand_user

if TYPE_CHECKING:
    from vargen.decoding import Method
    from vargen.evaluation.compare import Comparison


def compare(
    prompt_file: Annotated[Path, typer.Option(metavar="FILE", help="One prompt per line; each gives one image per method.")],
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD,...",
            help="Also with settings: gsd:budget=5,window=24. The baseline is added. Default: all that the model can run.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Images generated at once.")] = 1,
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FILE.png", help="The images, one row per method.")
    ] = "comparison.png",
    as_json: Json = None,
    model: ModelName = "emoji",
    seed: Seed = 0,
    guidance_scale: Guidance = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Video: number of blocks. Default: the model's.")
    ] = None,
    tau: Annotated[float | None, typer.Option(metavar="X", help="Video: score that a drafted block needs.")] = None,
    scorer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Video: scores drafted blocks. Default: emoji-scorer.")
    ] = None,
    dtype: DtypeName = Dtype.auto,
    quantization: QuantizationName = None,
    device: DeviceName = Device.auto,
    threads: Threads = None,
) -> None:
    """Compare the speed and the images of several methods.

    Reports time, passes and excess acceptance, all measured in one run. Speedup is the baseline's seconds
    divided by the method's.
    """
    file = resolve_outputs(output, ["comparison"])[0]
    check_names(model)
    results = ResultWriter(as_json)
    results.check([model], {"output": [file]}, {"prompt_file": [expand_user(prompt_file, "prompt_file")]})
    prompts = read_prompts(prompt_file)
    sampling = explicit_options(guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p)
    for_video = {"num_blocks": num_blocks, "tau": tau, "scorer": scorer}
    from vargen.pipelines import validation

    if makes_video(model):
        more = {"batch_size": None if batch_size == 1 else batch_size, **sampling}
        reject_options("is for image models, and this model generates video", **more)
        validation.validate_seed(seed, len(prompts))
        set_threads(threads)
        names = None if methods is None else [methods]
        options = VideoComparisonOptions(
            model, names, num_blocks, tau, scorer, seed, device=device, dtype=dtype, quantization=quantization
        )
        compare_and_write(options, prompts, file, results)
        return
    reject_options("is for video models", **for_video)
    selected = select_methods(methods, model)
    place, kind, machine = setup_device(device, dtype, threads, [model], quantization)

    from vargen.device import summarize_machine
    from vargen.evaluation.compare import compare_methods
    from vargen.evaluation.contact_sheets import method_grid
    from vargen.pipelines.loading import open_pipeline

    validation.validate_seed(seed, -(-len(prompts) // validation.validate_batch_size(batch_size)) * batch_size)
    validate_request(model, selected, sampling, leave_out=methods is None)
    pipe = open_pipeline(model, device=place, torch_dtype=kind, quantization=quantization)
    if methods is None:
        for method in pipe.list_methods():
            if method.name in selected and method.unsupported_reason is not None:
                print_status(f"{method.name} was left out: {method.unsupported_reason}")
                del selected[method.name]
    report_emoji_names(pipe, prompts)
    with progress_bar("batches") as show:
        comparison = compare_methods(pipe, prompts, selected, batch_size, seed, sampling, show)

    def save_images() -> None:
        image = method_grid(pipe, comparison)
        results.print_path(save_image(image, file, {"methods": list(selected), "seeds": comparison.seeds}))

    machine = {**machine, "threads": comparison.threads}
    text = summarize_machine(machine, place, kind) + "\n\n" + comparison_table(comparison) + "\n"
    document = {"machine": machine, "dtype": str(kind).removeprefix("torch."), **comparison.to_dict()}
    images = (f"output {str(file.path)!r}", save_images)
    results.write(text, document, [images])


def select_methods(methods: str | None, model: str = "emoji") -> dict[str, Method]:
    """Return the methods by name, the baseline first.

    The default is every method of the model's family except the one that selects among others. Names may carry settings, as in
    `vargen eval`: see `resolve_method`.
    """
    from vargen.decoding import DEFAULT_METHOD, list_methods, resolve_method
    from vargen.pipelines.loading import find_pipeline_class
    from vargen.specs import split_specs

    kind = find_pipeline_class(model)
    names = split_specs(methods) if methods is not None else []
    if methods is not None and not names:
        raise ValueError(f"methods must name at least one method, got {methods!r}")
    names = names or [preset.name for preset in list_methods(kind.paradigm) if preset.name != DEFAULT_METHOD]
    return {name: resolve_method(name, kind.paradigm) for name in (kind.baseline, *names)}


def validate_request(model: str, methods: dict[str, Method], sampling: dict[str, Any], leave_out: bool = False) -> None:
    """Check that the model generates from prompts and supports the methods and settings, before any weight is read.

    Args:
        leave_out: remove unsupported methods from `methods` with a message, instead of raising.
    """
    from vargen.pipelines import validation
    from vargen.pipelines.loading import inspect_model

    _, checked = validation.validate_sampling(sampling)
    opened = inspect_model(model)
    if opened.is_class_conditional:
        raise ValueError("model must generate from text, and this one generates classes")
    checked.validate_top_k(opened.vocab_size)
    for name, method in list(methods.items()):
        try:
            opened.validate_method(method)
        except ValueError as error:
            if not leave_out:
                raise
            print_status(f"{name} was left out: {error}")
            del methods[name]


def comparison_table(comparison: Comparison) -> str:
    """Format the comparison as a table for the terminal."""
    rows = [
        [
            method.name,
            method.kind,
            f"{method.seconds_per_image:.2f}",
            f"{method.seconds_quartiles[0]:.2f}-{method.seconds_quartiles[1]:.2f}",
            f"{method.speedup:.2f}",
            f"{method.tokens_per_pass:.2f}",
            f"{100 * method.share_by_part.get('draft', 0.0):.0f} %",
            f"{100 * sum(method.share_by_part.get(part, 0.0) for part in ('accept', 'commit')):.0f} %",
            f"{method.relaxation_per_image:.2f}",
            f"{method.num_identical_images}/{method.images}",
        ]
        for method in comparison.methods
    ]
    head = ["method", "kind", "s/image", "quartiles", "speedup", "tokens/pass", "drafting", "rest"]
    head += ["relaxation", f"same as {comparison.baseline}"]
    sampling = ", ".join(f"{key} {value:g}" for key, value in comparison.sampling.items() if value is not None)
    return f"{len(comparison.prompts)} images, batch size {comparison.batch}, {sampling}\n\n" + table(head, rows, "<<>>>>>>>>")
