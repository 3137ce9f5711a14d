"""`vargen compare`: several methods side by side on the same prompts and seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vargen.cli import common, inputs
from vargen.cli.common import OutputFile, image_option, video_option
from vargen.cli.console import print_status, progress_bar, table

if TYPE_CHECKING:
    from vargen.bench.compare import Comparison
    from vargen.eval.video import VideoComparison
    from vargen.pipelines.base import VisualPipeline


def compare(
    ctx: typer.Context,
    prompt_file: Annotated[Path, typer.Option(metavar="FILE", help="One prompt per line; each gives one image per method.")],
    model: common.ModelName = "emoji",
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD,...",
            help="Also with settings: gsd:budget=5,window=24. The baseline is added. Default: all that the model can run.",
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FILE.png", help="The images, one row per method.")
    ] = "comparison.png",
    as_json: common.Json = None,
    seed: common.Seed = 0,
    batch_size: Annotated[int, image_option(min=1, max=1024, metavar="N", help="Images generated at once.")] = 1,
    guidance_scale: common.Guidance = None,
    temperature: common.Temperature = None,
    top_k: common.TopK = None,
    top_p: common.TopP = None,
    min_p: common.MinP = None,
    num_blocks: common.NumBlocks = None,
    tau: common.Tau = None,
    scorer: Annotated[str | None, video_option(metavar="NAME", help="Scores drafted blocks. Default: emoji-scorer.")] = None,
    dtype: common.Dtype = "auto",
    quantization: common.Quantization = None,
    device: common.Device = "auto",
    threads: common.Threads = None,
) -> None:
    """Compare the speed and the images of several methods.

    Reports time, passes and excess acceptance, all measured in one run. Speedup is the baseline's seconds
    divided by the method's.
    """
    (file,) = common.resolve_outputs(output, ["comparison"])
    sampling = common.chosen(ctx, common.SAMPLING)
    common.check_outputs(ctx.params, {"output": [file]})
    prompts = inputs.read_prompts(prompt_file)
    inspected = common.inspect(ctx, model)
    if methods is not None:
        select_methods(inspected, methods)  # before weights are read
    from vargen.bench.compare import compare_methods
    from vargen.device import summarize_machine
    from vargen.eval.contact_sheets import method_grid
    from vargen.pipelines.loading import open_pipeline
    from vargen.pipelines.validation import validate_seed

    validate_seed(seed, -(-len(prompts) // batch_size) * batch_size)
    machine, about = common.loading(ctx, inspected.folder), common.machine_for_timing()
    if inspected.fps is not None:
        videos = compare_videos(ctx, inspected, prompts)
        common.write_results(ctx, video_table(videos), videos.to_dict(), lambda: [save_strips(videos, file)])
        return
    inspected.resolve_sampling(**sampling)
    if inspected.is_class_conditional:
        raise ValueError("model must generate from text, and this one generates classes")
    pipe = open_pipeline(inspected.folder, **machine)
    selected = select_methods(pipe, methods)
    inputs.report_emoji_names(pipe, prompts)
    with progress_bar("batches") as show:
        comparison = compare_methods(pipe, prompts, selected, batch_size, seed, sampling, show)

    def save_images() -> list[Path]:
        parameters = {"methods": list(selected), "seeds": comparison.seeds}
        return [common.save_image(method_grid(pipe, comparison), file, parameters)]

    about["threads"] = comparison.threads
    dtype_name = str(machine["torch_dtype"]).removeprefix("torch.")
    head = summarize_machine(about, machine["device"], machine["torch_dtype"])
    document = {"machine": about, "dtype": dtype_name, **comparison.to_dict()}
    common.write_results(ctx, f"{head}\n\n{comparison_table(comparison)}\n", document, save_images)


def select_methods(pipe: Any, methods: str | list[str] | None) -> dict[str, Any]:
    """Return the methods by name, the baseline first.

    By default, these are all that the model can run, but for the one that selects among others; of video, also drafts alone.
    """
    from vargen.decoding import DEFAULT_METHOD, list_methods
    from vargen.eval.video import DRAFTS
    from vargen.specs import split_specs

    own = {DRAFTS.name: DRAFTS} if pipe.fps is not None else {}
    names = split_specs(methods or [])
    if methods is not None and not names:
        raise ValueError(f"methods must name at least one method, got {methods!r}")
    found = {name: own.get(name) or pipe.resolve_method(name) for name in (pipe.baseline, *names)}
    for method in found.values():
        pipe.validate_method(method)
    for preset in () if names else (*list_methods(pipe.paradigm), *own.values()):
        try:
            pipe.validate_method(preset)
        except ValueError as error:
            print_status(f"{preset.name} was left out: {error}")
            continue
        if preset.name != DEFAULT_METHOD:
            found[preset.name] = preset
    return found


def compare_videos(
    ctx: typer.Context, model: VisualPipeline, prompts: list[str], scorers: list[str] | None = None, extractor: str = "none"
) -> VideoComparison:
    """Generate the videos, and compare the methods.

    Args:
        model: without weights. scorers, extractor: what measures the finished videos; see `vargen eval --help`.
    """
    from vargen.eval.features import load_extractor
    from vargen.eval.video import compare_video_methods
    from vargen.pipelines.loading import open_pipeline
    from vargen.scoring import open_scorer
    from vargen.specs import split_specs

    machine, options = common.loading(ctx, model.folder), common.chosen(ctx, common.VIDEO)
    selected = select_methods(model, ctx.params["methods"])
    if (tau := options.get("tau")) is not None:
        selected = {name: each.with_tau(tau) if each.threshold is not None else each for name, each in selected.items()}
    named = [name for name in split_specs(scorers or []) if name != "none"]
    if len(named) > 1:
        raise ValueError(f"scorers must be at most one for video, got {', '.join(named)}")
    measure = open_scorer(named[0], machine["device"]) if named else None
    features = None if extractor == "none" else load_extractor(extractor, machine["device"])
    pipe: Any = open_pipeline(model.folder, **machine)
    for method in selected.values():
        pipe.validate_method(method)
    call = {"scorer": pipe.resolve_frame_scorer(options["scorer"])} if "scorer" in options else {}
    with progress_bar("videos") as show:
        return compare_video_methods(
            pipe,
            prompts,
            selected,
            num_blocks=options.get("num_blocks"),
            seed=ctx.params["seed"],
            scorer=measure,
            extractor=features,
            options=call,
            progress=show,
        )


def save_strips(comparison: VideoComparison, file: OutputFile) -> Path:
    """Write one image of frames, a row per method."""
    from vargen.eval.contact_sheets import frame_strips

    parameters = {"methods": list(comparison.frames), "seed": comparison.seed}
    return common.save_image(frame_strips(comparison), file, parameters)


def video_table(comparison: VideoComparison) -> str:
    """Format a comparison of video methods for the terminal."""
    from vargen.eval.report import VIDEO_COLUMNS, table_cells

    heads, rows = table_cells(VIDEO_COLUMNS, comparison.methods)
    head = f"videos: {len(comparison.prompts)}, blocks of each: {comparison.blocks}, scored by {comparison.scorer}"
    return f"{head}\n\n{table(heads, rows, '<<' + '>' * (len(heads) - 2))}"


def comparison_table(comparison: Comparison) -> str:
    """Format a comparison of image methods for the terminal."""
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
    return f"images: {len(comparison.prompts)}, batch size {comparison.batch}, {sampling}\n\n" + table(head, rows, "<<>>>>>>>>")
