"""`vargen generate` for video models: prompts to mp4, gif or webp files."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from vargen.cli.console import Names, say
from vargen.cli.inputs import read_source, say_names
from vargen.cli.outputs import (
    Write,
    check_apart,
    free_path,
    json_writes,
    model_files,
    not_written,
    slug,
    targets,
    write_each,
)
from vargen.files import expand_user

FORMATS = (".mp4", ".gif", ".webp")
_ANIMATION = ".webp"  # the default format in a folder: needs no extra package, and loops


@dataclass(frozen=True)
class VideoOptions:
    """Options of the command for videos; see `vargen generate --help`."""

    num_blocks: int | None = None
    tau: float | None = None
    scorer: str | None = None
    motion: int | None = None
    image: Path | None = None

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


def check_video_options(options: VideoOptions) -> None:
    """Raise ValueError for an option that only video models support."""
    for name in ("num_blocks", "tau", "motion"):
        if getattr(options, name) is not None:
            raise ValueError(f"{name} is for models of video, such as emoji-video")


def check_picture_options(**options: Any) -> None:
    """Raise ValueError for an option that video models do not support."""
    for name, value in options.items():
        if value:
            raise ValueError(f"{name} is for models of pictures, and this one makes video")


def generate_videos(
    subjects: list[str],
    num_videos: int,
    first_seed: int,
    model: str,
    accelerator: str | None,
    output: str | None,
    options: VideoOptions,
    pick: Any,
    prompt_file: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Generate a video for each prompt and seed; print the name of each file.

    Args:
        pick: selects the device and dtype for a model's folder.

    Raises:
        ValueError: for a request that the model does not support, before any weight is read.
    """
    import torch

    from vargen.decoding import VideoMethod, resolve_method
    from vargen.pipelines.registry import describe, open_pipeline, pipeline_class
    from vargen.pipelines.videos import check_video_path, save_video

    described = describe(model)
    kind = pipeline_class(described.pipeline)
    if accelerator is not None:
        method = resolve_method(accelerator, VideoMethod.paradigm)
        kind.check_method(described, method)
        if options.tau is not None:
            method.with_tau(options.tau)
    jobs = [(text, first_seed + k) for k, text in enumerate(text for text in subjects for _ in range(num_videos))]
    places = targets(output, [f"{slug(text)}-{seed}" for text, seed in jobs], formats=FORMATS, usual=_ANIMATION)
    for place in places:
        check_video_path(place.path, "output")
    image = options.image and read_source(expand_user(options.image, "image"), "image")
    read: dict[str, list[Path | None]] = {"prompt_file": [prompt_file], "image": [options.image]}
    read["a file of model"] = [*model_files(model)]
    check_apart({"output": places}, read)
    device, dtype = pick(described.folder)
    started = time.perf_counter()
    pipe: Any = open_pipeline(described.folder, torch_dtype=dtype).to(device)
    loaded = time.perf_counter() - started
    said = {"model": Path(model).resolve().name if Path(model).is_dir() else model, "fps": pipe.fps}
    if not quiet:
        say_names(pipe, subjects)
    hidden = True if quiet else None
    made: list[dict[str, Any]] = []
    names = Names(silent=as_json)
    call = {**options.given(), "accelerator": accelerator, **({} if image is None else {"image": image})}
    for number, ((text, seed), place) in enumerate(zip(jobs, places, strict=True), 1):
        label = f"video {number} of {len(jobs)}, blocks"
        pipe.set_progress_bar_config(desc=label, disable=hidden, leave=False, file=sys.stderr)
        result = pipe(text, generator=torch.Generator().manual_seed(seed), **call)
        for failure in result.stats.failures:
            say(f"{text}: {failure}")
        path = free_path(place)
        try:
            save_video(result.frames[0], path, pipe.fps, comment=f"vargen: {text}, seed {seed}")
        except OSError as error:
            say(not_written(f"output {str(path)!r}", error))
            continue
        made.append({"file": str(path), "prompt": text, "seed": seed, "stats": result.stats.to_dict()})
        names.add(path)
        if not quiet:
            say(_line(result))
    writes: list[Write] = []
    if as_json:
        writes += json_writes("-", None, {"videos": made, **said, "device": str(device), "seconds_load": loaded})
    write_each(writes)
    if len(made) < len(jobs) or names.failed:
        raise typer.Exit(1)


def _line(result: Any) -> str:
    stats, frames = result.stats, len(result.frames[0])
    share = "" if stats.acceptance is None else f", {100 * stats.acceptance:.0f} % of the drafts accepted"
    return f"{frames} frames ({frames / result.fps:.1f} s) in {stats.seconds:.1f} s by {stats.accelerator}{share}"
