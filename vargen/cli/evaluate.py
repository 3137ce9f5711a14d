"""`vargen eval`: generate images with several methods, score them, and report what each method saves and costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vargen.cli.compare_video import VideoComparisonOptions, evaluate_videos
from vargen.cli.console import print_status, progress_bar, quiet_libraries
from vargen.cli.evaluate_images import (
    Extractor,
    ImageFiles,
    Reference,
    Resize,
    Scorers,
    evaluate_images,
    load_metrics,
    load_reference_or_default,
    score_run,
)
from vargen.cli.inputs import MAX_IMAGES, packaged_prompts, read_prompts
from vargen.cli.options import (
    Backend,
    BackendName,
    Device,
    DeviceName,
    Dtype,
    DtypeName,
    Guidance,
    Json,
    ModelName,
    NumWorkers,
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
    require_device,
    select_backend,
)
from vargen.cli.outputs import validate_run_outputs, validate_writable
from vargen.cli.results import ResultWriter
from vargen.files import expand_user
from vargen.values import short_repr

if TYPE_CHECKING:
    from vargen.evaluation.generation import Backend as RunBackend
    from vargen.evaluation.generation import GenerationPlan


def evaluate(
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Run directory. An unfinished run in it is resumed."),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(metavar="DIR|FILE", help="Only score these: a run, a folder of images, or samples: .npz, .npy."),
    ] = None,
    model: ModelName = "emoji",
    methods: Annotated[
        list[str] | None,
        typer.Option(metavar="METHOD,...", help="Also with settings: gsd:budget=5. Default: the baseline alone."),
    ] = None,
    num_images: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_IMAGES, metavar="N", help="Images per method. Default: one per prompt or class."),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|-", help="One prompt per line, used in turn. Default, for text models: 64 packaged prompts."
        ),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(
            metavar="each|random|N,...", help="All classes in turn (default), uniformly random, or numbers and names."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Images generated at once.")] = 8,
    unit_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Images of a list in which each finished one makes room for the next. Default: fixed batches.",
        ),
    ] = None,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Generate only part I of N, from 1; other processes generate the others.")
    ] = "1/1",
    generate_only: Annotated[
        bool, typer.Option("--generate-only", help="Only generate the images; `vargen eval --images DIR` scores them later.")
    ] = False,
    scorers: Scorers = None,
    extractor: Extractor = None,
    reference: Reference = None,
    resize: Resize = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Of --images: skip those that cannot be read, and report them.")
    ] = False,
    export_samples: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Of --images: also write them as samples in ADM's layout.")
    ] = None,
    save_reference: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Of --images: also write their statistics, for --reference.")
    ] = None,
    reference_features: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Store rounded features of only N images in --save-reference. Default: all, exactly."
        ),
    ] = None,
    backend: BackendName = Backend.local,
    num_workers: NumWorkers = None,
    seed: Seed = 0,
    guidance_scale: Guidance = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    dtype: DtypeName = Dtype.auto,
    quantization: QuantizationName = None,
    device: DeviceName = Device.auto,
    threads: Threads = None,
    as_json: Json = None,
) -> None:
    """Generate images with several methods, and score them; or score images from any source, with --images.

    Reports what each method saves in time, and what it costs in quality. Writes metrics.json, report.md,
    quality_vs_speed.png and methods.png to DIR. Run the same command again to resume an interrupted run. Image k has
    the seed --seed + k, regardless of batch size, shard and backend.
    """
    sampling = explicit_options(guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p)
    part, results = parse_shard(shard), ResultWriter(as_json)
    if images is not None:
        reject_options(
            "is for images that are generated, and --images are there", output=output, methods=methods, num_images=num_images,
            classes=classes, unit_size=unit_size, shard=part[1] > 1, generate_only=generate_only, quantization=quantization,
            **sampling,
        )  # fmt: skip
        quiet_libraries()
        place = require_device(device)
        given = ImageFiles(images, prompt_file, reference, export_samples, save_reference, reference_features)
        found = given.check(results)
        scored = "" if found.run is None else str(found.run.settings()["model"])
        metrics = load_metrics(scored, scorers, extractor, resize, skip_unreadable, device=str(place), threads=threads)
        evaluate_images(found, metrics, select_backend(backend, num_workers, place, threads), results)
        return
    if output is None:
        raise ValueError("output must be the folder of a run, for example -o run; or give --images to score")
    reject_options(
        "needs --images", skip_unreadable=skip_unreadable, export_samples=export_samples, save_reference=save_reference,
        reference_features=reference_features,
    )  # fmt: skip
    check_names(model)
    folder = expand_user(output, "output")
    inputs = {"prompt_file": prompt_file, "reference": reference}
    validate_run_outputs({"json": results.json_file}, inputs, model, folder)
    if generate_only:
        reject_options(
            "cannot be used with --generate-only", scorers=scorers, extractor=extractor, reference=reference, resize=resize,
            json=as_json,
        )  # fmt: skip
    if makes_video(model):
        for_images = {
            "classes": classes,
            "unit_size": unit_size,
            "resize": resize,
            "reference": reference,
            "shard": part[1] > 1,
        }
        for_images |= {"generate_only": generate_only, **sampling}
        reject_options("is for image models, and this model generates video", **for_images)
        videos = VideoComparisonOptions(
            model,
            methods,
            seed=seed,
            scorers=scorers,
            extractor=extractor,
            device=device,
            dtype=dtype,
            quantization=quantization,
        )
        evaluate_videos(videos, folder, prompt_file, num_images, threads, results)
        return
    quiet_libraries()
    place = require_device(device)
    validate_writable(folder, "output")

    from vargen.evaluation.generation import GenerationPlan
    from vargen.pipelines.loading import find_pipeline_class
    from vargen.specs import split_specs

    prompts = select_prompts(model, prompt_file, classes, seed, num_images or 0)
    plan = GenerationPlan(
        model=model,
        output=str(folder),
        methods=tuple(split_specs(methods or [find_pipeline_class(model).baseline])),
        prompts=tuple(prompts),
        num=num_images or len(prompts),
        seed=seed,
        batch=batch_size,
        sampling=sampling,
        dtype=None if dtype is Dtype.auto else dtype.value,
        quantization=quantization,
        device=str(place),
        threads=threads,
        unit=unit_size,
    )
    run_on = select_backend(backend, num_workers, place, threads)
    if generate_only:
        count = _generate(plan, part, run_on)
        print_status(f"{count} images generated; score them with: vargen eval --images {output}")
        return
    plan.validate()
    metrics = load_metrics(model, scorers, extractor, resize, device=str(place), threads=threads)

    from vargen.evaluation.run_directory import MEASUREMENTS, RunDirectory

    run = RunDirectory(folder)
    # Checked before hours of generation: missing weights, and statistics of another extractor.
    statistics = load_reference_or_default(reference, metrics, run.path / MEASUREMENTS)
    _generate(plan, part, run_on)
    if missing := len(plan.pending_batches(run.complete_records())) if part[1] > 1 else 0:
        done = f"shard {shard} is finished; other shards still have to generate {missing} batches"
        print_status(f"{done}. Afterwards: vargen eval --images {output}")
        return
    score_run(run, metrics, statistics, run_on, results)


def select_prompts(model: str, prompt_file: Path | None, classes: str | None, seed: int, count: int) -> list[Any]:
    """Return the prompts or the classes to generate in turn; `count` classes if they are random."""
    from vargen.evaluation.generation import select_classes
    from vargen.pipelines.loading import inspect_model
    from vargen.pipelines.validation import validate_prompts

    pipe = inspect_model(model)
    if pipe.is_class_conditional:
        reject_options("is for models of text: give --classes", prompt_file=prompt_file)
        return list(select_classes(classes or "each", pipe.num_classes, pipe.class_names, seed, count))
    reject_options("is for models of classes: give --prompt-file", classes=classes)
    return validate_prompts(read_prompts(prompt_file or packaged_prompts()), "prompts")


def _generate(plan: GenerationPlan, part: tuple[int, int], backend: RunBackend) -> int:
    """Generate the missing images of one shard, and return their number."""
    from vargen.evaluation.generation import generate_missing_images

    with progress_bar("generating", "images") as show:
        return generate_missing_images(plan, *part, backend=backend, progress=show)


def parse_shard(text: str) -> tuple[int, int]:
    """Parse a shard I/N; raises ValueError unless I is from 1 to N."""
    own, slash, count = text.partition("/")
    if not slash or not own.isdecimal() or not count.isdecimal() or not 1 <= int(own) <= int(count) <= 100_000:
        raise ValueError(f"shard must be I/N with I from 1 to N, such as 1/2 and 2/2, got {short_repr(text)}")
    return int(own), int(count)
