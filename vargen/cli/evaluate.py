"""`vargen eval`: generate images with several methods, score them, and report what each method saves and costs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vargen.cli import common, inputs
from vargen.cli.common import OutputFile, image_option, machine_option
from vargen.cli.compare import compare_videos, save_strips, video_table
from vargen.cli.console import import_libraries, print_status, progress_bar, table, to_json
from vargen.device import select_device
from vargen.values import short_repr

if TYPE_CHECKING:
    from vargen.eval.features import FeatureStatistics
    from vargen.eval.measurement import MetricModels
    from vargen.eval.run import Backend
    from vargen.eval.run_directory import RunDirectory
    from vargen.eval.score import EvaluationResult
    from vargen.pipelines.base import VisualPipeline

GENERATION, METRICS, OF_IMAGES = "Generation", "Metrics", "With --images"
generation_option = partial(typer.Option, rich_help_panel=GENERATION)
metric_option = partial(typer.Option, rich_help_panel=METRICS)
images_option = partial(typer.Option, rich_help_panel=OF_IMAGES)


def evaluate(
    ctx: typer.Context,
    output: Annotated[
        Path | None,
        generation_option("-o", "--output", metavar="DIR", help="Run directory. An unfinished run in it is resumed."),
    ] = None,
    methods: Annotated[
        list[str] | None,
        generation_option(metavar="METHOD,...", help="Also with settings: gsd:budget=5. Default: the baseline alone."),
    ] = None,
    num_images: Annotated[
        int | None,
        generation_option(min=1, max=common.MAX_IMAGES, metavar="N", help="Per method. Default: one per prompt or class."),
    ] = None,
    model: common.ModelName = "emoji",
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE|-", help="One prompt per line, used in turn. Default, for text models: 64 packaged ones."),
    ] = None,
    seed: common.Seed = 0,
    as_json: common.Json = None,
    classes: Annotated[
        str | None,
        image_option(metavar="each|random|N,...", help="All in turn (default), uniformly random, or numbers and names."),
    ] = None,
    unit_size: Annotated[
        int | None,
        image_option(metavar="N", help="Images of a list where each that ends makes room for one. Default: fixed batches."),
    ] = None,
    shard: Annotated[
        str, image_option(metavar="I/N", help="Generate only part I of N, from 1; other processes generate the others.")
    ] = "1/1",
    generate_only: Annotated[
        bool, image_option("--generate-only", help="Only generate; `vargen eval --images DIR` scores them later.")
    ] = False,
    num_timed: Annotated[
        int,
        image_option(
            min=0, metavar="N", help="Images of each method that are also timed at batch 1, beside the baseline; 0: none."
        ),
    ] = 4,
    guidance_scale: common.Guidance = None,
    temperature: common.Temperature = None,
    top_k: common.TopK = None,
    top_p: common.TopP = None,
    min_p: common.MinP = None,
    scorers: Annotated[
        list[str] | None,
        metric_option(
            metavar="NAME,...",
            help="emoji-scorer; clip:model=ViT-L-14,weights=FILE; image-reward:weights=FILE; module:function; or none. "
            "Default: the packaged scorer of the model of a run; a folder of other images has none.",
        ),
    ] = None,
    extractor: Annotated[
        str | None,
        metric_option(
            metavar="NAME",
            help="Network whose features distances compare: inception:weights=FILE, clip:model=NAME,weights=FILE, the name of "
            "a scorer, module:function, or none. Default: the packaged scorer of the model of a run.",
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        metric_option(metavar="FILE.npz|DIR", help="Real images: a folder, or statistics or samples in ADM's layout."),
    ] = None,
    resize: Annotated[  # several copies of 64 images of the largest size fit in memory
        int | None,
        metric_option(min=16, max=2048, metavar="N", help="First crop to the center square and resize to N x N (bicubic)."),
    ] = None,
    export: Annotated[
        Literal["geneval", "t2i-compbench", "dpg-bench"] | None,
        metric_option(help="Also copy the images as this benchmark reads them; its prompts are given by --prompt-file."),
    ] = None,
    images: Annotated[
        Path | None,
        images_option(metavar="DIR|FILE", help="Only score these: a run, a folder of images, or samples: .npz, .npy."),
    ] = None,
    skip_unreadable: Annotated[
        bool, images_option("--skip-unreadable", help="Skip those that cannot be read, and report them.")
    ] = False,
    export_samples: Annotated[
        Path | None, images_option(metavar="FILE.npz", help="Also write them as samples in ADM's layout.")
    ] = None,
    save_reference: Annotated[
        Path | None, images_option(metavar="FILE.npz", help="Also write their statistics, for --reference.")
    ] = None,
    reference_features: Annotated[
        int | None,
        images_option(
            min=0, metavar="N", help="In --save-reference, rounded features of N images only. Default: all, exactly."
        ),
    ] = None,
    backend: Annotated[
        Literal["local", "ray"], machine_option(help="ray: several processes or machines (needs the extra `ray`).")
    ] = "local",
    num_workers: Annotated[
        int | None, machine_option(min=1, metavar="N", help="Processes of --backend ray. Default: one per GPU, or core.")
    ] = None,
    batch_size: Annotated[int, machine_option(min=1, metavar="N", help="Images generated at once.")] = 8,
    dtype: common.Dtype = "auto",
    quantization: common.Quantization = None,
    device: common.Device = "auto",
    threads: common.Threads = None,
) -> None:
    """Generate images with several methods, and score them; or score images from any source, with --images.

    Reports what each method saves in time, and what it costs in quality. Writes report.md, table.tex, metrics.json,
    quality_vs_speed.svg and .pdf, methods.png and log.txt to DIR. Run the same command again to resume an interrupted
    run. Image k has the seed --seed + k, regardless of batch size, shard and backend.
    """
    sampling = common.chosen(ctx, common.SAMPLING)
    if backend == "local":
        common.reject(ctx, "needs --backend ray; otherwise there is one process (see --shard)", "num_workers")
    if images is not None:
        reason = "is for images that are generated, and --images are there"
        common.reject(ctx, reason, GENERATION, common.SAMPLING, common.IMAGE_MODELS, "quantization")
        evaluate_images(ctx, images)
        return
    if output is None:
        raise ValueError("output must be the folder of a run, for example -o run; or give --images to score")
    common.reject(ctx, "needs --images", OF_IMAGES)
    if generate_only:
        common.reject(ctx, "cannot be used with --generate-only", METRICS, "as_json")
    part = parse_shard(shard)
    common.check_outputs(ctx.params, {}, run=output)
    common.validate_writable(output)
    inspected = common.inspect(ctx, model)
    machine = common.loading(ctx, inspected.folder)
    if inspected.fps is not None:
        common.reject(ctx, "is for image models, and this model generates video", "reference", "resize", "export")
        evaluate_videos(ctx, inspected, output)
        return
    from vargen.eval.export import validate_export
    from vargen.eval.run import GenerationPlan, generate_missing_images, select_classes
    from vargen.eval.run_directory import RunDirectory
    from vargen.eval.timing import time_single_images
    from vargen.pipelines.validation import validate_prompts
    from vargen.specs import split_specs

    subjects: list[Any]
    records: list[dict[str, Any]] = []
    if inspected.is_class_conditional:
        common.reject(ctx, "is for models of text: give --classes", "prompt_file")
        number, names = inspected.num_classes, inspected.class_names
        subjects = select_classes(classes or "each", number, names, seed, num_images or 0)
    else:
        common.reject(ctx, "is for models of classes: give --prompt-file", "classes")
        records = inputs.read_prompt_records(prompt_file)
        subjects = validate_prompts([record["prompt"] for record in records], "prompts")
    plan = GenerationPlan(
        model=model,
        output=str(output),
        methods=tuple(split_specs(methods or [inspected.baseline])),
        prompts=tuple(subjects),
        num=num_images or len(subjects),
        seed=seed,
        batch=batch_size,
        sampling=sampling,
        dtype=None if dtype == "auto" else dtype,
        quantization=quantization,
        device=str(machine["device"]),
        threads=threads,
        unit=unit_size,
        prompt_records=tuple(records) if any(len(record) > 1 for record in records) else (),
    )
    plan.validate()
    if export is not None:
        validate_export(export, subjects, plan.prompt_records, plan.num)
    run = RunDirectory(output)
    # Before hours of generation: missing weights, and statistics of another extractor.
    metrics = None if generate_only else load_metrics(ctx, model, run)
    with progress_bar("generating", "images") as show:
        count = generate_missing_images(plan, *part, backend=select_backend(ctx), progress=show)
    missing = len(plan.pending_batches(run.complete_records()))
    if num_timed and batch_size > 1 and metrics is not None and not missing and backend == "local":
        with progress_bar("timing single images", "images") as show:
            time_single_images(plan, num_timed, show)
    if metrics is None or missing:
        others = f"; batches that other shards still have to generate: {missing}" if missing else ""
        print_status(f"images generated: {count}{others}. Score them with: vargen eval --images {output}")
    else:
        score_run(ctx, run, *metrics)
    if export is not None and not missing:
        export_images(run, export)


def parse_shard(text: str) -> tuple[int, int]:
    """Parse a shard I/N; raises ValueError unless I is from 1 to N."""
    numbers = [int(part) for part in text.split("/") if part.isdecimal() and len(part) < 6]
    if "/".join(map(str, numbers)) != text or len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
        raise ValueError(f"shard must be I/N with I from 1 to N, such as 1/2 and 2/2, got {short_repr(text)}")
    return numbers[0], numbers[1]


def select_backend(ctx: typer.Context) -> Backend:
    """Select where images are generated and scored: in this process, or on Ray."""
    from vargen.eval.ray import ray_backend
    from vargen.eval.run import run_locally

    place = select_device(ctx.params["device"]).type
    on_ray = ctx.params["backend"] == "ray"
    return ray_backend(ctx.params["num_workers"], place, ctx.params["threads"]) if on_ray else run_locally


def load_metrics(ctx: typer.Context, model: str, run: RunDirectory | None) -> tuple[MetricModels, FeatureStatistics | None]:
    """Load scorers, extractor and the statistics of the reference, so that what is missing is reported before anything else.

    Args:
        model: provides the default scorer and extractor; empty for none. run: keeps measurements of the reference.
    """
    from vargen.eval.measurement import MetricModels
    from vargen.eval.run_directory import MEASUREMENTS
    from vargen.eval.score import default_reference, load_reference
    from vargen.scoring import default_scorer
    from vargen.specs import split_specs

    packaged = default_scorer(model) if model else None
    scorers, extractor, reference = (ctx.params[name] for name in ("scorers", "extractor", "reference"))
    models = MetricModels(
        scorers=tuple(name for name in split_specs(scorers or packaged or "") if name != "none"),
        extractor=None if extractor == "none" else extractor or packaged,
        resize=ctx.params["resize"],
        keep_going=ctx.params["skip_unreadable"],
        device=str(select_device(ctx.params["device"])),
        threads=ctx.params["threads"],
    )
    models.load()
    cache = None if run is None else run.path / MEASUREMENTS
    file = default_reference(models.extractor) if reference is None else reference
    return models, None if file is None else load_reference(file, models, cache)


def score_run(ctx: typer.Context, run: RunDirectory, models: MetricModels, reference: FeatureStatistics | None) -> None:
    """Score the images of a run, and write its report, plot and images."""
    from vargen.eval.score import evaluate_run, write_report_files

    with progress_bar("scoring", "images") as show:
        found = evaluate_run(run, models, reference, select_backend(ctx), show)
    found.about["command"] = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    if not models.scorers and models.extractor is None:
        print_status("only speed and similarity to the baseline were measured: give --scorers and --extractor for quality")
    write_result(ctx, found, lambda: [run.path / name for name in write_report_files(run, found)])


def export_images(run: RunDirectory, layout: str) -> None:
    """Copy the images of a run as a benchmark reads them."""
    from vargen.eval.export import export_run

    for folder in export_run(run, layout):
        print_status(f"{folder}: images for {layout}")


def evaluate_images(ctx: typer.Context, path: Path) -> None:
    """Score a run, a folder of images or a file of samples; write them as samples and as a reference if it is asked for."""
    prompt_file, names = ctx.params["prompt_file"], ("export_samples", "save_reference")
    samples, saved = (common.result_file(ctx.params[name], ".npz", name) for name in names)
    common.check_outputs(ctx.params, {"export_samples": [samples], "save_reference": [saved]})
    import_libraries()
    from vargen.eval.export import validate_export
    from vargen.eval.features import Extractor
    from vargen.eval.run import list_images
    from vargen.eval.run_directory import RUN_FILE, RunDirectory
    from vargen.eval.score import evaluate_folder, evaluate_samples, export_adm_samples, statistics_of

    if (path / RUN_FILE).is_file():
        common.reject(ctx, f"is for a folder of images, and {str(path)!r} is a run", "prompt_file", *names)
        run = RunDirectory(path)
        export, settings = ctx.params["export"], run.settings()
        if export is not None:
            validate_export(export, settings["subjects"], settings.get("prompt_records"), settings["num"])
        score_run(ctx, run, *load_metrics(ctx, str(settings["model"]), run))
        if export is not None:
            export_images(run, export)
        return
    common.reject(ctx, f"is for a run, and {str(path)!r} is none", "export")
    images = []
    if path.is_file():
        common.reject(ctx, f"is for a folder of images, and {str(path)!r} is a file", "prompt_file", "export_samples")
    else:
        images = list_images(path, None if prompt_file is None else inputs.read_prompts(prompt_file))
    models, reference = load_metrics(ctx, "", None)
    extractor = models.load().get("extractor")
    if not models.scorers and extractor is None and samples is None:
        raise ValueError("nothing to do: give --scorers, such as emoji-scorer, --extractor or --export-samples")
    if saved is not None and not isinstance(extractor, Extractor):
        raise ValueError("save_reference needs --extractor")
    if prompt_file is not None:  # so that a wrong order is noticed
        ends = [f"{short_repr(Path(each.file).name)} is {short_repr(each.text)}" for each in (images[0], images[-1])]
        print_status(f"prompts by natural order of file names: {', ...; '.join(dict.fromkeys(ends))}")
    with progress_bar("scoring", "images") as show:
        if images:
            found = evaluate_folder(path.name, images, models, reference, None, select_backend(ctx), show)
        else:
            found = evaluate_samples(path, models, reference)

    def save() -> list[Path]:
        if saved is not None and isinstance(extractor, Extractor):
            number, statistics = ctx.params["reference_features"], statistics_of(found.measured[path.name], extractor)
            kept = statistics if number is None else statistics.subsample_features(number)
            kept.write(saved.path, number is not None)
        if samples is not None:
            export_adm_samples(samples.path, images, models.resize)
        return [file.path for file in (saved, samples) if file is not None]

    write_result(ctx, found, save)


def write_result(ctx: typer.Context, found: EvaluationResult, save: Callable[[], list[Path]]) -> None:
    """Write the table for the terminal or the JSON document, and other files."""
    from vargen.eval.report import group_notes, image_columns, table_cells, to_json

    heads, rows = table_cells(image_columns(found.rows, found.baseline), found.rows)
    lines = [table(heads, rows, "<" + ">" * (len(heads) - 1)), *(f"note: {note}" for note in group_notes(found.rows)), ""]
    common.write_results(ctx, "\n".join(lines), to_json(found.rows, found.baseline, found.about), save)


def evaluate_videos(ctx: typer.Context, model: VisualPipeline, folder: Path) -> None:
    """Compare the methods of a video model, and write metrics.json, report.md and strips.png."""
    from vargen.device import describe_machine
    from vargen.eval.report import video_to_markdown

    prompts, options = inputs.read_prompts(ctx.params["prompt_file"]), common.chosen(ctx, "scorers", "extractor")
    prompts = [prompts[k % len(prompts)] for k in range(ctx.params["num_images"] or len(prompts))]
    found = compare_videos(ctx, model, prompts, **options)
    about = describe_machine()
    setup = f"{about['cpu']}, CPU threads: {about['threads']}, torch {about['torch']}; seeds from {found.seed}"

    def save() -> list[Path]:
        metrics, report = folder / "metrics.json", folder / "report.md"
        common.write_text(metrics, to_json(found.to_dict()) + "\n")
        common.write_text(report, video_to_markdown(found, setup))
        return [metrics, report, save_strips(found, OutputFile(folder / "strips.png"))]

    common.write_results(ctx, video_table(found), found.to_dict(), save)
