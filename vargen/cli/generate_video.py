"""`vargen generate` for video models: prompts to mp4, gif or webp files."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vargen.cli.console import print_json, print_status
from vargen.cli.inputs import read_source, report_emoji_names
from vargen.cli.options import require_device, select_dtype
from vargen.cli.outputs import model_files, resolve_outputs, slugify, validate_distinct_paths
from vargen.cli.results import describe_failed_write, unused_path, write_each

if TYPE_CHECKING:
    from vargen.cli.generate import GenerateOptions
    from vargen.pipelines.base import VisualPipeline

SUFFIXES = (".mp4", ".gif", ".webp")
_DEFAULT_SUFFIX = ".webp"  # needs no extra package, and loops


def generate_videos(options: GenerateOptions, image: Path | None, video: dict[str, Any]) -> None:
    """Generate a video for each prompt and seed; print the name of each file.

    Args:
        image: to start from. video: options that only video has.
    """
    import torch

    from vargen.pipelines.loading import inspect_model, open_pipeline
    from vargen.pipelines.start_images import find_image_model
    from vargen.pipelines.videos import save_video, validate_video_path

    model = inspect_model(options.model)
    image_model_name = video.pop("image_model", None)
    if image is not None and image_model_name is not None:
        raise ValueError(f"image_model must be left out beside --image, got {image_model_name!r}")
    image_model = find_image_model(model, image_model_name) if image is None else None
    if options.accelerator is not None:
        _check_method(options.accelerator, model, video)
    jobs = options.jobs()
    files = resolve_outputs(
        options.output, [f"{slugify(text)}-{seed}" for text, seed in jobs], suffixes=SUFFIXES, default=_DEFAULT_SUFFIX
    )
    for file in files:
        validate_video_path(file.path, "output")
    call = {**video, "accelerator": options.accelerator}
    if options.scorer is not None:
        call["scorer"] = options.scorer
    call["image"] = False if image is None else read_source(image, "image")
    inputs: dict[str, Iterable[Path | None]] = {"prompt_file": [options.prompt_file], "image": [image]}
    validate_distinct_paths({"output": files}, {**inputs, "a file of model": model_files(options.model)})
    device = require_device(options.device)
    started = time.perf_counter()
    dtype = select_dtype(options.dtype, device, model.folder, options.quantization)
    pipe: Any = open_pipeline(model.folder, device=device, torch_dtype=dtype, quantization=options.quantization)
    if image_model is not None:
        call["image"] = open_pipeline(image_model.folder, device=device, quantization=options.quantization)
        call["image"].set_progress_bar_config(desc="start image", disable=options.quiet or None, leave=False, file=sys.stderr)
    seconds_load = time.perf_counter() - started
    if not options.quiet:
        report_emoji_names(pipe, options.prompts)
    records: list[dict[str, Any]] = []
    for number, ((text, seed), file) in enumerate(zip(jobs, files, strict=True), 1):
        label = f"video {number} of {len(jobs)}, blocks"  # disable=None hides the bar if stderr is not a terminal
        pipe.set_progress_bar_config(desc=label, disable=options.quiet or None, leave=False, file=sys.stderr)
        result = pipe(text, generator=torch.Generator().manual_seed(seed), **call)
        for failure in result.stats.failures:
            print_status(f"{text}: {failure}")
        path = unused_path(file)
        try:
            save_video(result.frames[0], path, pipe.fps, comment=f"vargen: {text}, seed {seed}")
        except OSError as error:
            print_status(describe_failed_write(f"output {str(path)!r}", error))
            continue
        records.append({"file": str(path), "prompt": text, "seed": seed, "stats": result.stats.to_dict()})
        if not options.as_json:
            print(path, flush=True)
        if not options.quiet:
            print_status(_summarize(result))
    if options.as_json:
        about = {"model": options.model_title, "fps": pipe.fps, "device": str(device), "seconds_load": seconds_load}
        write_each([("json", lambda: print_json({"videos": records, **about}))])
    if len(records) < len(jobs):
        raise typer.Exit(1)


def _check_method(name: str, model: VisualPipeline, video: dict[str, Any]) -> None:
    from vargen.decoding import VideoMethod, resolve_method

    method = resolve_method(name, VideoMethod.paradigm)
    model.validate_method(method)
    if "tau" in video:
        method.with_tau(video["tau"])


def _summarize(result: Any) -> str:
    stats, frames = result.stats, len(result.frames[0])
    share = "" if stats.acceptance is None else f", {100 * stats.acceptance:.0f} % of the drafts accepted"
    return f"{frames} frames ({frames / result.fps:.1f} s) in {stats.seconds:.1f} s by {stats.accelerator}{share}"
