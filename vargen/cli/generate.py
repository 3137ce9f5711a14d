"""`vargen generate`: image or video files from prompts or classes. `vargen regenerate`: images again, from their PNG files."""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vargen.cli import common, inputs
from vargen.cli.common import MAX_IMAGES, OutputFile, image_option, machine_option, video_option
from vargen.cli.console import import_libraries, print_json, print_status, progress_bar
from vargen.reading import open_image
from vargen.values import MAX_SEED

if TYPE_CHECKING:
    from vargen.pipelines.base import VisualPipeline

VIDEO_SUFFIXES = (".webp", ".mp4", ".gif")
# What each image has of its own in the JSON document.
_OWN = ("file", "prompt", "class_label", "seed", "scorer", "score", "candidates", "asked_seed", "tokens_digest")
Job = tuple[Any, int, OutputFile]  # prompt or class, seed, file


def generate(
    ctx: typer.Context,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT...|-", help="What to generate; -: prompts from stdin, one per line.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE|DIR",
            help="A .png, .jpg or .webp file (video: .mp4, .gif or .webp), which is overwritten if it exists and numbered from "
            "1 for several images; or a folder, which ends with / or has no suffix. Default: a new file in the current folder, "
            "named after prompt and seed.",
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE|-", help="UTF-8, one prompt per line; blank lines and lines starting with # are skipped."),
    ] = None,
    model: common.ModelName = "emoji",
    num_images_per_prompt: Annotated[
        int, typer.Option("--num-images-per-prompt", "-n", min=1, max=1024, metavar="N", help="Images of each prompt.")
    ] = 1,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_SEED, metavar="N", help="Of the first image; the next has seed + 1. Default: random."),
    ] = None,
    accelerator: common.Method = None,
    image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Image to start from, of the model's size (next-scale models, video).")
    ] = None,
    scorer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Selects the best; see --scorers of `vargen eval`. Default: emoji-scorer."),
    ] = None,
    as_json: common.JsonFlag = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress bar and no summary.")] = False,
    class_label: Annotated[
        list[str] | None, image_option(metavar="N|NAME", help="Class to generate, instead of a prompt; may be repeated.")
    ] = None,
    mask_image: Annotated[
        Path | None, image_option(metavar="FILE", help="White, or transparent, where --image is regenerated; of the same size.")
    ] = None,
    strength: Annotated[
        float | None,
        image_option(metavar="X", help="Fraction of the scales to regenerate, 0 to 1. Default: 0.8, and 1 with a mask."),
    ] = None,
    height: Annotated[
        int | None, image_option(metavar="N", help="In pixels, with --width; the nearest size of an Infinity model is taken.")
    ] = None,
    width: Annotated[int | None, image_option(metavar="N", help="In pixels, with --height.")] = None,
    negative_prompt: Annotated[str | None, image_option(metavar="TEXT", help="What guidance leads away from.")] = None,
    best_of: Annotated[
        int, image_option(min=1, metavar="N", help="Generate N candidates of each image and keep the best.")
    ] = 1,
    contact_sheet: Annotated[
        str | None, image_option(metavar="FILE", help="Also write one image of all images with their prompts.")
    ] = None,
    guidance_scale: common.Guidance = None,
    temperature: common.Temperature = None,
    top_k: common.TopK = None,
    top_p: common.TopP = None,
    min_p: common.MinP = None,
    num_blocks: common.NumBlocks = None,
    tau: common.Tau = None,
    motion: Annotated[int | None, video_option(metavar="N", help="Level of motion, for models trained with one.")] = None,
    image_model: Annotated[
        str | None, video_option(metavar="NAME|DIR|none", help="Generates the image to start from. Default: the model's own.")
    ] = None,
    batch_size: Annotated[int, machine_option(min=1, metavar="N", help="Images generated at once, including candidates.")] = 8,
    dtype: common.Dtype = "auto",
    quantization: common.Quantization = None,
    device: common.Device = "auto",
    threads: common.Threads = None,
) -> None:
    """Generate images from prompts and print the name of each file.

    Image k of a run has the seed `seed + k` and does not depend on the others, so it can be reproduced alone.
    """
    subjects = inputs.collect_prompts(prompts, prompt_file, class_label)
    sampling = common.chosen(ctx, common.SAMPLING)
    if (count := len(subjects) * num_images_per_prompt) > MAX_IMAGES:
        raise ValueError(f"the number of images must be at most {MAX_IMAGES}, got {count}")
    first = secrets.randbelow(2**32) if seed is None else seed
    from vargen.pipelines.validation import validate_prompts, validate_seed

    validate_seed(first, count)
    if not class_label:
        validate_prompts(subjects)
    inspected = common.inspect(ctx, model)
    is_video, prefix = inspected.fps is not None, "class " if class_label else ""
    subjects = [each for each in subjects for _ in range(num_images_per_prompt)]
    stems = [f"{common.slugify(prefix + each)}-{first + k}" for k, each in enumerate(subjects)]
    files = common.resolve_outputs(output, stems, suffixes=VIDEO_SUFFIXES if is_video else common.IMAGE_SUFFIXES)
    sheets = [] if contact_sheet is None else common.resolve_outputs(contact_sheet, ["sheet"], "contact_sheet")
    common.check_outputs(ctx.params, {"output": files, "contact_sheet": sheets})
    call: dict[str, Any] = {"accelerator": accelerator, **sampling}
    machine = common.loading(ctx, inspected.folder)
    if is_video:
        call |= _video_arguments(ctx, inspected, files)
    else:
        call |= _image_arguments(ctx, inspected, machine["device"])
    labels: list[Any] = _parse_labels(subjects, inspected) if class_label else subjects
    jobs: list[Job] = [(label, first + k, file) for k, (label, file) in enumerate(zip(labels, files, strict=True))]
    from vargen.decoding import DecodeStats
    from vargen.pipelines.loading import open_pipeline

    started = time.perf_counter()
    pipe: Any = open_pipeline(inspected.folder, **machine)
    run: dict[str, Any] = {"device": str(machine["device"]), "seconds_load": time.perf_counter() - started}
    if not quiet and not class_label:
        inputs.report_emoji_names(pipe, [*subjects, negative_prompt or ""])
    records, stats = _generate_batches(ctx, pipe, jobs, 1 if is_video else max(1, batch_size // best_of), call)
    shared = {name: value for name, value in records[-1].items() if name not in _OWN} if records else {}
    if is_video:
        document = {"videos": records, "model": common.title_of(model), "fps": pipe.fps, **run}
    else:
        total = DecodeStats.merge(stats)
        run["seconds_generate"] = time.perf_counter() - started - run["seconds_load"]
        run["tokens_per_second"] = total.tokens_per_second
        images = [{name: value for name, value in record.items() if name in _OWN} for record in records]
        document = {"images": images, **shared, **run, "stats": total.to_dict()}
    if as_json:
        print_json(document)
    if sheets and records:
        _write_contact_sheet(records, sheets[0], shared)
    if len(records) < count:
        raise typer.Exit(1)
    if not quiet and not is_video:
        seconds = f"{run['seconds_generate']:.1f} s (and {run['seconds_load']:.1f} s to load)"
        rate, number = f"{run['tokens_per_second']:.0f} tokens per second", f"{count} image{'s' if count > 1 else ''}"
        seed_text = f"seed {first}"
        if best_of > 1 and count == 1:
            seed_text = f"seed {records[0]['seed']}, the best of {best_of} candidates from seed {first}"
        print_status(f"{number} in {seconds}, {rate}, {seed_text}")


def _parse_labels(labels: list[str], model: VisualPipeline) -> list[int]:
    from vargen.pipelines.validation import resolve_class_labels

    # Python does not parse integers of thousands of digits; no class label has more than nine.
    typed = [int(label) if label.lstrip("-").isdecimal() and len(label) < 1000 else label for label in labels]
    return resolve_class_labels(typed, model.num_classes, model.class_names)


def _image_arguments(ctx: typer.Context, model: Any, place: Any) -> dict[str, Any]:
    """Check a request against the model's files, before weights are read, and return more arguments of the call."""
    from vargen.pipelines.images import validate_source
    from vargen.pipelines.validation import validate_prompts
    from vargen.scoring import DEFAULT_SCORER, open_scorer

    model.resolve_method(ctx.params["accelerator"] or model.default_method)
    model.resolve_sampling(**common.chosen(ctx, common.SAMPLING))
    given, by_class = common.chosen(ctx, "image", "mask_image", "strength"), bool(ctx.params["class_label"])
    if size := common.chosen(ctx, "height", "width"):
        if "height" not in model.recorded_arguments:
            raise ValueError(f"{min(size)} must be left out: images of this model have one size")
        model = model.at_size(**size)
    if not model.makes_images:
        raise ValueError("model must make images itself; another pipeline decodes the tokens of this one: see docs/models.md")
    if model.is_class_conditional != by_class:
        classes = f"classes: give --class-label 0 to {model.num_classes - 1} instead of a prompt"
        raise ValueError(f"this model generates {'from text: give a prompt, no --class-label' if by_class else classes}")
    if given and model.image_size is None:
        raise ValueError(f"{min(given)} must be left out: only next-scale models, such as emoji-var, start from an image")
    for name in given.keys() - {"strength"}:
        given[name] = inputs.read_source(given[name], name, keep_alpha=name == "mask_image")
    if given:
        image, mask, strength = (given.get(name) for name in ("image", "mask_image", "strength"))
        validate_source(image, mask, strength, model.image_size or 0, model.image_processor)
    if negative := ctx.params["negative_prompt"]:  # an empty one has no effect
        if by_class:
            raise ValueError("negative_prompt must be left out: this model generates classes, not text")
        given["negative_prompt"] = validate_prompts(negative, "negative_prompt")[0]
    if (candidates := ctx.params["best_of"]) > 1 or ctx.params["scorer"]:
        given |= {"scorer": open_scorer(ctx.params["scorer"] or DEFAULT_SCORER, place), "num_candidates": candidates}
    return {**given, **size}


def _video_arguments(ctx: typer.Context, model: VisualPipeline, files: list[OutputFile]) -> dict[str, Any]:
    """Check a request against the model's files, before weights are read, and return more arguments of the call."""
    from vargen.pipelines.start_images import find_image_model
    from vargen.pipelines.videos import validate_video_path

    given = common.chosen(ctx, common.VIDEO, "scorer")
    image, named = ctx.params["image"], given.pop("image_model", None)
    if image is not None and named is not None:
        raise ValueError(f"image_model must be left out beside --image, got {named!r}")
    find_image_model(model, named)
    if ctx.params["accelerator"] is not None:
        method = model.resolve_method(ctx.params["accelerator"])
        model.validate_method(method)
        if "tau" in given:
            method.with_tau(given["tau"])
    for file in files:
        validate_video_path(file.path, "output")
    start: Any = False if named == "none" else named
    return {**given, "image": start if image is None else inputs.read_source(image, "image")}


def _generate_batches(
    ctx: typer.Context, pipe: Any, jobs: list[Job], size: int, call: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Generate and save batch by batch, and print the name of each file; returns its record, and statistics of each batch.

    A file that cannot be written is reported, and the others are still saved; if none of a batch can be, generation ends.
    """
    import torch

    records: list[dict[str, Any]] = []
    is_video, stats = pipe.fps is not None, []
    what, argument = "videos" if is_video else "images", "class_labels" if ctx.params["class_label"] else "prompt"
    try:
        with progress_bar("generating", what, hidden=True, silent=ctx.params["quiet"]) as show:
            for start in range(0, len(jobs), size):
                batch, before = jobs[start : start + size], len(records)
                label = f"{what} {start + 1}-{start + len(batch)} of {len(jobs)}"
                hidden = ctx.params["quiet"] or None  # None: where stderr is no terminal
                pipe.set_progress_bar_config(desc=label, disable=hidden, leave=False, file=sys.stderr)
                subjects: Any = [subject for subject, _, _ in batch]
                generators: Any = [torch.Generator().manual_seed(seed) for _, seed, _ in batch]
                if is_video:
                    (subjects,), (generators,) = subjects, generators
                result = pipe(**{argument: subjects}, generator=generators, **call)
                stats.append(result.stats)
                for number, job in enumerate(batch):
                    try:
                        records.append(_save_video(result, job) if is_video else _save_image(ctx, result, number, job))
                    except OSError as error:
                        print_status(f"error: output {str(job[2].path)!r} was not written: {error.strerror or error}")
                        continue
                    if not ctx.params["as_json"]:
                        print(records[-1]["file"], flush=True)
                if is_video and not ctx.params["quiet"]:
                    print_status(_summarize(result))
                if len(records) == before:
                    break
                show(len(records), len(jobs))
    finally:
        if 0 < len(records) < len(jobs):
            print_status(f"{len(records)} of {len(jobs)} {what} were written")
    return records, stats


def _save_image(ctx: typer.Context, result: Any, number: int, job: Job) -> dict[str, Any]:
    """Save an image with its parameters, which name the files that it started from without their folders."""
    given = common.chosen(ctx, "image", "mask_image", "strength")
    source = {name.removesuffix("_image"): getattr(value, "name", value) for name, value in given.items()}
    parameters = {**result.parameters(number), **source}
    return {"file": str(common.save_image(result.images[number], job[2], parameters)), **parameters}


def _save_video(result: Any, job: Job) -> dict[str, Any]:
    from vargen.pipelines.videos import save_video

    text, seed, file = job
    for failure in result.stats.failures:
        print_status(f"{text}: {failure}")
    path = save_video(result.frames[0], common.unused_path(file), result.fps, comment=f"vargen: {text}, seed {seed}")
    return {"file": str(path), "prompt": text, "seed": seed, "stats": result.stats.to_dict()}


def _summarize(result: Any) -> str:
    stats, frames = result.stats, len(result.frames[0])
    share = "" if stats.acceptance is None else f", {100 * stats.acceptance:.0f} % of the drafts accepted"
    return f"{frames} frames ({frames / result.fps:.1f} s) in {stats.seconds:.1f} s by {stats.accelerator}{share}"


def _write_contact_sheet(records: list[dict[str, Any]], file: OutputFile, parameters: dict[str, Any]) -> None:
    from vargen.eval.contact_sheets import contact_sheet

    captions = [str(record.get("prompt", record.get("class_label"))) for record in records]
    images = [inputs.read_source(Path(record["file"]), "output") for record in records]
    print_status(f"wrote {common.save_image(contact_sheet(images, captions), file, parameters)}")


def regenerate(
    ctx: typer.Context,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE.png...", help="Written by `vargen generate` or the demo.")],
    model: Annotated[
        str | None, typer.Option(metavar="NAME|DIR", help="Default: the model that an image names, if it is packaged.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE|DIR", help="Also write the new images there.")
    ] = None,
    as_json: common.JsonFlag = False,
    device: common.Device = "auto",
    threads: common.Threads = None,
) -> None:
    """Generate shared images again and print whether tokens and pixels of each are the same, or why they are not.

    Exit code 1: another image.
    """
    recorded = [_read_recorded(image, model) for image in images]
    files = [] if output is None else common.resolve_outputs(output, [f"{image.stem}-regenerated" for image in images])
    common.check_outputs(ctx.params, {"output": files})
    folders = {name: common.inspect(ctx, name).folder for name, _ in recorded}
    from vargen.pipelines.loading import open_pipeline
    from vargen.pipelines.regeneration import regenerate

    opened: dict[str, Any] = {}
    records: list[dict[str, Any]] = []
    for number, (image, (name, parameters)) in enumerate(zip(images, recorded, strict=True)):
        dtype = parameters.get("dtype")
        ctx.params["dtype"] = dtype if dtype in ("float32", "bfloat16", "float16") else "auto"
        ctx.params["quantization"] = parameters.get("quantization")
        load = {"name": folders[name], **common.loading(ctx, folders[name])}
        if load != opened:
            pipe, opened = open_pipeline(**load), load
            pipe.set_progress_bar_config(disable=True)
        print_status(f"generating {parameters.get('prompt', parameters.get('class_label'))!r} again, seed {parameters['seed']}")
        with open_image(image) as original:
            found = regenerate(pipe, parameters, original.convert("RGB"))
        if files:
            print_status(f"wrote {common.save_image(found.image, files[number], parameters)}")
        if not as_json:
            print(f"{image}: {found.describe()}", flush=True)
        same = {"same_tokens": found.same_tokens, "same_pixels": found.same_pixels}
        records.append({"image": str(image), **same, "reasons": list(found.reasons)})
    if as_json:
        print_json({"images": records})
    if not all(record["same_pixels"] for record in records):
        raise typer.Exit(1)


def _read_recorded(image: Path, model: str | None) -> tuple[str, dict[str, Any]]:
    """Return the model of an image, and the parameters in its file; ValueError if they are not enough to generate it again."""
    from vargen.assets import packaged_models
    from vargen.image_metadata import read_parameters

    if not image.is_file():
        raise FileNotFoundError(f"image {str(image)!r} does not exist")
    try:
        parameters = read_parameters(image)
        name = str(model or parameters.get("model"))
        if model is None and name not in packaged_models():
            raise ValueError(f"its model {name!r} is not packaged: give it with --model")
        import_libraries()
        from vargen.pipelines.regeneration import validate_regenerable

        validate_regenerable(parameters)
    except ValueError as error:
        raise ValueError(f"image {str(image)!r}: {error}") from error
    return name, parameters
