"""`vargen generate`: generate image files from prompts or classes."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vargen.cli.console import Names, import_libraries, quiet_libraries, say
from vargen.cli.draw_images import Job, draw, write_sheet
from vargen.cli.generate_video import VideoOptions, check_picture_options, check_video_options, generate_videos
from vargen.cli.inputs import MOST_PICTURES, Source, class_numbers, say_names, subjects_of
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
    pick_dtype,
    select_device,
)
from vargen.cli.outputs import (
    Write,
    check_apart,
    json_writes,
    model_files,
    slug,
    targets,
    write_each,
)
from vargen.device import check_compile, set_threads
from vargen.files import expand_user

if TYPE_CHECKING:
    from vargen.pipelines.model_info import ModelInfo

_LARGEST_SEED = 2**63 - 1


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT...|-", help="What to draw; -: from stdin.")] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE|DIR",
            help="A .png, .jpg or .webp file (of video .mp4, .gif or .webp), overwritten if it exists, numbered from 1 for "
            "several; or a folder, which ends with / or has no suffix. Default: a free name here, of prompt and seed.",
        ),
    ] = None,
    sheet: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write all images side by side, captioned, to this picture.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE|-", help="UTF-8, one prompt a line; skips blank lines and those starting with #."),
    ] = None,
    model: ModelName = "emoji",
    class_label: Annotated[
        list[str] | None, typer.Option(metavar="N|NAME", help="Class to draw, instead of a prompt; may be repeated.")
    ] = None,
    image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A picture to start from, of the model's size (next-scale models).")
    ] = None,
    mask: Annotated[
        Path | None, typer.Option(metavar="FILE", help="White where the image is drawn anew; as large as it is.")
    ] = None,
    strength: Annotated[
        float | None,
        typer.Option(metavar="X", help="Share of the scales drawn anew, 0 to 1. Default: 0.8, and 1 with a mask."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(parser=parse_integer, metavar="N", help="Of the first image; the next has seed + 1. Default: random."),
    ] = None,
    num_images: Annotated[int, typer.Option("--num-images", "-n", metavar="N", help="Images of each prompt.")] = 1,
    accelerator: Annotated[
        str | None,
        typer.Option(
            metavar="PRESET",
            help="`vargen info presets` lists them; also with settings, as in gumbel:window=8. Default: the model's.",
        ),
    ] = None,
    guidance_scale: Guidance = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    negative_prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="What guidance leads away from.")] = None,
    best_of: Annotated[int, typer.Option(metavar="N", help="Draw N candidates of each image and keep the best.")] = 1,
    scorer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Chooses the best; `vargen score --help` tells. Default: emoji-scorer.")
    ] = None,
    num_blocks: Annotated[int | None, typer.Option(metavar="N", help="Blocks of a video. Default: the model's.")] = None,
    tau: Annotated[
        float | None, typer.Option(metavar="X", help="Threshold of drafted blocks of video, on the scorer's scale.")
    ] = None,
    motion: Annotated[int | None, typer.Option(metavar="N", help="Level of motion of a video, where known to it.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the transformer; auto is the fastest here.")] = Dtype.auto,
    device: Annotated[Device, typer.Option(help="auto takes a GPU where there is one.")] = Device.auto,
    compile: Annotated[bool, typer.Option("--compile", help="Compile first, on a GPU; takes minutes.")] = False,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Most images drawn at once, candidates counted.")] = 8,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of file names.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar, no summary.")] = False,
) -> None:  # fmt: skip
    """Generate images from prompts and print the name of each file.

    Image k of a run has the seed `seed + k` and does not depend on the others, so it can be reproduced alone.
    """
    subjects = subjects_of(prompts, prompt_file, class_label)
    given = given_options(guidance_scale=guidance_scale, temperature=temperature, top_k=top_k, top_p=top_p)
    negative_prompt = negative_prompt or None  # an empty negative prompt has no effect
    _check_settings(given, negative_prompt, num_images)
    check_range(len(subjects) * num_images, "the number of images", 1, MOST_PICTURES)
    first = _first_seed(seed, len(subjects) * num_images)
    check_range(batch_size, "batch_size", 1)
    check_range(best_of, "best_of", 1)
    import_libraries()
    set_threads(threads)
    video = VideoOptions(num_blocks, tau, scorer, motion, image)
    if makes_video(model):
        check_picture_options(
            class_label=class_label, mask=mask, strength=strength, sheet=sheet, compile=compile,
            negative_prompt=negative_prompt, best_of=best_of > 1, **given,
        )  # fmt: skip
        quiet_libraries()

        def pick(folder: Path) -> tuple[Any, Any]:
            place = select_device(device)
            return place, pick_dtype(dtype, place, folder)

        listed = None if prompt_file is None else expand_user(prompt_file, "prompt_file")
        generate_videos(
            subjects, num_images, first, model, accelerator, output, video, pick, listed, as_json, quiet
        )  # fmt: skip
        return
    check_video_options(video)
    chosen_device = select_device(device)
    check_compile(compile, chosen_device)
    repeated = [subject for subject in subjects for _ in range(num_images)]
    kind = "class " if class_label else ""
    places = targets(output, [f"{slug(kind + subject)}-{first + k}" for k, subject in enumerate(repeated)])
    sheet_place = None if sheet is None else targets(sheet, ["sheet"], "sheet")[0]
    listed = None if prompt_file is None else expand_user(prompt_file, "prompt_file")
    source = Source.of(image, mask, strength)
    read = {"prompt_file": [listed], **source.files(), "a file of model": model_files(model)}
    check_apart({"output": places, "sheet": [sheet_place]}, read)
    quiet_libraries()
    opened, method = _check_against(model, accelerator, given, bool(class_label), negative_prompt)
    given_pictures = source.opened(opened)
    drawn: list[Any] = class_numbers(repeated, opened) if class_label else repeated
    jobs = [Job(subject, first + k, place) for k, (subject, place) in enumerate(zip(drawn, places, strict=True))]

    from vargen.pipelines.registry import open_pipeline
    from vargen.scoring.registry import PACKAGED, open_scorer

    judge = open_scorer(scorer or PACKAGED, chosen_device) if best_of > 1 or scorer else None
    chosen_dtype = pick_dtype(dtype, chosen_device, opened.folder)
    started = time.perf_counter()
    pipe = open_pipeline(opened.folder, torch_dtype=chosen_dtype).to(chosen_device)
    seconds_load = time.perf_counter() - started
    options: dict[str, Any] = {**given, "accelerator": method, "negative_prompt": negative_prompt}
    parameters = {**_parameters(pipe, model, options, chosen_dtype), **source.told()}
    options |= given_pictures
    if judge is not None:
        options |= {"num_candidates": best_of, "scorer": judge}
    if compile:
        options["compile"] = True
    if not quiet:
        say_names(pipe, [*([] if class_label else subjects), *([negative_prompt] if negative_prompt else [])])
    names = Names(silent=as_json)
    images, runs, seconds = draw(pipe, jobs, options, parameters, batch_size, quiet, names)
    tokens, loop_seconds = sum(run.tokens for run in runs), sum(run.seconds for run in runs)
    rate = tokens / loop_seconds if loop_seconds else 0.0
    writes: list[Write] = []
    if as_json:
        measured = {"seconds_load": seconds_load, "seconds_generate": seconds, "tokens_per_second": rate}
        writes += json_writes("-", None, _document(images, {**parameters, "device": str(chosen_device), **measured}, runs))
    if sheet_place is not None and images:
        writes.append((f"sheet {str(sheet_place.path)!r}", lambda: write_sheet(images, sheet_place, parameters)))
    write_each(writes)
    if len(images) < len(jobs) or names.failed:
        raise typer.Exit(1)
    if not quiet:
        count = f"{len(jobs)} image{'s' if len(jobs) > 1 else ''}"
        say(f"{count} in {seconds:.1f} s (and {seconds_load:.1f} s to load), {rate:.0f} tokens per second, seed {first}")


def _first_seed(seed: int | None, images: int) -> int:
    """Return the seed of the first of `images` images; a random one if none is given.

    Raises:
        ValueError: if the first or the last image's seed is out of range.
    """
    check_range(seed, "seed", 0, _LARGEST_SEED)
    first = secrets.randbelow(2**32) if seed is None else seed
    if first + images - 1 > _LARGEST_SEED:
        raise ValueError(f"seed must be at most {_LARGEST_SEED} for the last of {images} images, got {seed} for the first")
    return first


def _parameters(pipe: Any, model: str, options: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """Return the generation parameters stored in an image's PNG and in the JSON document."""
    from vargen.compat import installed_version

    return {
        "model": Path(model).resolve().name if Path(model).is_dir() else model,  # no local paths in image files
        "accelerator": options["accelerator"],
        "negative_prompt": options["negative_prompt"],
        **pipe.default_sampling,
        **{name: value for name, value in options.items() if name in pipe.default_sampling},
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {name: installed_version(name) for name in ("vargen", "torch", "diffusers", "transformers")},
    }


def _document(images: list[dict[str, Any]], said: dict[str, Any], runs: list[Any]) -> dict[str, Any]:
    from vargen.decoding import DecodeStats

    return {"images": images, **said, "stats": DecodeStats.merge(runs).to_dict()}


def _check_settings(given: dict[str, Any], negative_prompt: str | None, num_images: int) -> None:
    """Check everything that can be checked without a model."""
    from vargen.pipelines import validation as checks

    checks.check_sampling(given)
    checks.check_count(num_images, 1)
    if negative_prompt is not None:
        checks.check_prompts(negative_prompt, "negative_prompt")


def _check_against(
    name: str, accelerator: str | None, given: dict[str, Any], by_class: bool, negative_prompt: str | None
) -> tuple[ModelInfo, str]:
    """Check the request against the model's files, without reading weights.

    Returns:
        The model's description, and the name of the method to use.

    Raises:
        ValueError: for a folder that is not a model, or a model that cannot generate what was requested.
    """
    from vargen.decoding import Sampling, resolve_method
    from vargen.pipelines.registry import describe, pipeline_class

    model = describe(name)
    kind = pipeline_class(model.pipeline)
    method = resolve_method(kind.default_method if accelerator is None else accelerator, kind.paradigm)
    Sampling(top_k=given.get("top_k")).validate_top_k(model.vocab)
    if model.condition == "class" and not by_class:
        raise ValueError(f"this model draws classes: give --class-label 0 to {model.num_classes - 1} instead of a prompt")
    if model.condition == "class" and negative_prompt is not None:
        raise ValueError("negative_prompt must be left out: this model draws classes, not text")
    if model.condition == "text" and by_class:
        raise ValueError("this model draws from text: give a prompt instead of --class-label")
    return model, method.name
