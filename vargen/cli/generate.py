"""`vargen generate`: prompts or classes to picture files."""

from __future__ import annotations

import json
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from vargen.cli.console import quiet_libraries, say
from vargen.cli.options import Device, Dtype, check_range, pick_device, pick_dtype
from vargen.cli.outputs import (
    Target,
    Write,
    check_apart,
    json_writes,
    model_files,
    not_written,
    save_image,
    slug,
    targets,
    write_each,
)
from vargen.device import check_compile, fix_threads
from vargen.files import expanded

_LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Job:
    """One image: its prompt or class, its seed, its file."""

    subject: str | int
    seed: int
    target: Target


@dataclass(frozen=True)
class Model:
    """What a model folder says without its weights: see `LlamaGenTransformer` and `LlamaGenPipeline` for the fields."""

    folder: Path
    condition: str
    vocab_size: int
    tokens: int
    num_classes: int
    id2label: dict[int, str]


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT...", help="What to draw.")] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE|DIR",
            help="A .png, .jpg or .webp file, overwritten if it exists, numbered from 1 for several images; or a folder, "
            "which ends with / or has no suffix. Default: a free name in the current folder, made of prompt and seed.",
        ),
    ] = None,
    sheet: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write all images side by side, captioned, to this picture.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="UTF-8, one prompt a line; skips blank lines and those starting with #.")
    ] = None,
    model: Annotated[str, typer.Option(metavar="NAME|DIR|HUB ID", help="A packaged model, a folder, or a hub id.")] = "emoji",
    class_label: Annotated[
        list[str] | None, typer.Option(metavar="N|NAME", help="Class to draw, instead of a prompt; may be repeated.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Of the first image; the next has seed + 1. Default: random.")
    ] = None,
    num_images: Annotated[int, typer.Option("--num-images", "-n", metavar="N", help="Images of each prompt.")] = 1,
    accelerator: Annotated[str, typer.Option(metavar="PRESET", help="`vargen info presets` lists them.")] = "auto",
    guidance_scale: Annotated[float | None, typer.Option(metavar="X", help="From 0; 1 is off. Default: the model's.")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="X", help="From 0; 0 is greedy. Default: the model's.")] = None,
    top_k: Annotated[int | None, typer.Option(metavar="N", help="1 to the vocabulary. Default: the model's.")] = None,
    top_p: Annotated[float | None, typer.Option(metavar="X", help="Over 0, up to 1. Default: the model's.")] = None,
    negative_prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="What guidance leads away from.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the transformer; auto is the fastest here.")] = Dtype.auto,
    device: Annotated[Device, typer.Option(help="auto takes a GPU where there is one.")] = Device.auto,
    compile: Annotated[bool, typer.Option("--compile", help="Compile first, on a GPU; takes minutes.")] = False,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Most images drawn at once.")] = 8,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads. Default: as many as pay, measured.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of file names.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar, no summary.")] = False,
) -> None:  # fmt: skip
    """Draw pictures of prompts; print the name of each file.

    Image k of a run is drawn with seed + k and does not depend on the others, so it can be drawn again alone.
    """
    subjects = _subjects(prompts, prompt_file, class_label)
    settings = {"guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    given = {name: value for name, value in settings.items() if value is not None}
    _check_settings(given, accelerator, negative_prompt, num_images)
    check_range(seed, "seed", 0, _LARGEST_SEED)
    check_range(batch_size, "batch_size", 1)
    fix_threads(threads)
    chosen_device = pick_device(device)
    check_compile(compile, chosen_device)
    first = secrets.randbelow(2**32) if seed is None else seed
    total = len(subjects) * num_images
    if first + total - 1 > _LARGEST_SEED:
        raise ValueError(f"seed must be at most {_LARGEST_SEED} for the last of {total} images, got {seed} for the first")
    repeated = [subject for subject in subjects for _ in range(num_images)]
    kind = "class " if class_label else ""
    stems = [f"{slug(kind + subject)}-{first + k}" for k, subject in enumerate(repeated)]
    places = targets(output, stems)
    sheet_place = None if sheet is None else targets(sheet, ["sheet"], "sheet")[0]
    listed = None if prompt_file is None else expanded(prompt_file, "prompt_file")
    check_apart({"output": places, "sheet": [sheet_place]}, {"prompt_file": [listed], "a file of model": model_files(model)})
    quiet_libraries()
    opened = read_model(model)
    _check_against(opened, given, bool(class_label), negative_prompt)
    drawn: list[Any] = _class_numbers(repeated, opened) if class_label else repeated
    jobs = [Job(subject, first + k, place) for k, (subject, place) in enumerate(zip(drawn, places, strict=True))]

    from vargen.compat import installed_version
    from vargen.pipelines.llamagen import LlamaGenPipeline

    chosen_dtype = pick_dtype(dtype, chosen_device, opened.folder)
    started = time.perf_counter()
    pipe = LlamaGenPipeline.from_pretrained(opened.folder, torch_dtype=chosen_dtype).to(chosen_device)
    seconds_load = time.perf_counter() - started
    used = {**pipe.default_sampling, **given}
    packages = ("vargen", "torch", "diffusers", "transformers")
    parameters = {
        "model": Path(model).resolve().name if Path(model).is_dir() else model,  # a picture tells no one's folders
        "accelerator": accelerator,
        "negative_prompt": negative_prompt,
        **used,
        "dtype": str(chosen_dtype).removeprefix("torch."),
        "versions": {name: installed_version(name) for name in packages},
    }
    options = {**given, "accelerator": accelerator, "negative_prompt": negative_prompt, "compile": compile}
    if not quiet:
        say_names(pipe, [*([] if class_label else subjects), *([negative_prompt] if negative_prompt else [])])
    images, runs, seconds = _draw(pipe, jobs, options, parameters, batch_size, quiet, silent=as_json)
    tokens, loop_seconds = sum(run.tokens for run in runs), sum(run.seconds for run in runs)
    rate = tokens / loop_seconds if loop_seconds else 0.0
    writes: list[Write] = []
    if as_json:
        from vargen.decoding import DecodeStats

        document = {
            "images": images,
            **parameters,
            "device": str(chosen_device),
            "seconds_load": seconds_load,
            "seconds_generate": seconds,
            "tokens_per_second": rate,
            "stats": DecodeStats.joined(runs).to_dict(),
        }
        writes += json_writes("-", None, document)
    if sheet_place is not None and images:
        writes.append((f"sheet {str(sheet_place.path)!r}", lambda: _write_sheet(images, sheet_place, parameters)))
    write_each(writes)
    if len(images) < total:
        raise typer.Exit(1)
    if not quiet:
        count = f"{total} image{'s' if total > 1 else ''}"
        say(f"{count} in {seconds:.1f} s (and {seconds_load:.1f} s to load), {rate:.0f} tokens per second, seed {first}")


def say_names(pipe: Any, prompts: list[str]) -> None:
    """A line on stderr about the characters in prompts that the model reads as names, if there are any."""
    read = {typed: name for prompt in prompts for typed, name in pipe.read_prompt(prompt).names.items()}
    if read:
        say("read " + ", ".join(f'"{typed}" as "{name}"' for typed, name in read.items()))


def _subjects(prompts: list[str] | None, prompt_file: Path | None, class_label: list[str] | None) -> list[str]:
    """Prompts, or class labels as typed."""
    from vargen.pipelines import checks

    if class_label:
        if prompts or prompt_file:
            raise ValueError("give prompts or --class-label, not both")
        return class_label
    listed = [*(prompts or []), *(read_prompts(prompt_file) if prompt_file else [])]
    if not listed:
        raise ValueError('give a prompt, for example: vargen generate "a red apple"')
    return checks.check_prompts(listed)


def read_prompts(path: Path) -> list[str]:
    """Prompts of a UTF-8 text file, one a line.

    Raises:
        ValueError: if it is not UTF-8 or holds no prompt. FileNotFoundError, IsADirectoryError: as said.
    """
    path = expanded(path, "prompt_file")
    if not path.exists():
        raise FileNotFoundError(f"prompt_file {str(path)!r} does not exist")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt_file {str(path)!r} must be UTF-8 text: {error}") from error
    lines = [line.strip() for line in text.split("\n")]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise ValueError(f"prompt_file {str(path)!r} holds no prompt; write one a line, without # in front")
    return found


def _check_settings(given: dict[str, Any], accelerator: str, negative_prompt: str | None, num_images: int) -> None:
    """What can be checked without a model."""
    from vargen.decoding import resolve_accelerator
    from vargen.pipelines import checks

    checks.check_sampling(given)
    resolve_accelerator(accelerator)
    checks.check_count(num_images, 1)
    if negative_prompt is not None:
        checks.check_prompts(negative_prompt, "negative_prompt")


def read_model(name: str) -> Model:
    """Find a model, check its files, and read its configuration; no weight is read.

    Raises:
        ValueError: see `vargen.pipelines.loading.checked_folder`.
    """
    import torch

    from vargen.models.llamagen import LlamaGenTransformer
    from vargen.pipelines.loading import checked_folder

    folder = checked_folder(name, "LlamaGenPipeline", {})
    index = json.loads((folder / "model_index.json").read_text())
    with torch.device("meta"):  # fills in what the file leaves to the defaults
        config = LlamaGenTransformer.from_config(LlamaGenTransformer.load_config(folder / "transformer")).config
    names = {int(number): label for number, label in (index.get("id2label") or {}).items()}
    return Model(folder, config.condition, config.vocab_size, config.grid_size**2, config.num_classes, names)


def _check_against(model: Model, given: dict[str, Any], by_class: bool, negative_prompt: str | None) -> None:
    from vargen.decoding import Sampling

    Sampling(top_k=given.get("top_k")).check_vocabulary(model.vocab_size)
    if model.condition == "class" and not by_class:
        raise ValueError(f"this model draws classes: give --class-label 0 to {model.num_classes - 1} instead of a prompt")
    if model.condition == "class" and negative_prompt is not None:
        raise ValueError("negative_prompt must be left out: this model draws classes, not text")
    if model.condition == "text" and by_class:
        raise ValueError("this model draws from text: give a prompt instead of --class-label")


def _class_numbers(labels: list[str], model: Model) -> list[int]:
    from vargen.pipelines import checks

    # A number of thousands of digits is one that Python does not read; no class has one of more than nine.
    typed = [int(label) if label.strip().lstrip("-").isdecimal() and len(label) < 1000 else label for label in labels]
    return checks.check_class_labels(typed, model.num_classes, model.id2label)


def _draw(
    pipe: Any,
    jobs: list[Job],
    options: dict[str, Any],
    parameters: dict[str, Any],
    batch_size: int,
    quiet: bool,
    silent: bool,
) -> tuple[list[dict[str, Any]], list[Any], float]:
    """Draw and save, a batch at a time; returns a record per written image, statistics per batch, and seconds spent drawing.

    An image that cannot be written is reported, and the others are; but after a batch of which none could be, no more is drawn.
    """
    import torch

    key = "prompt" if pipe.transformer.config.condition == "text" else "class_label"
    images: list[dict[str, Any]] = []
    runs: list[Any] = []
    seconds = 0.0
    try:
        for start in range(0, len(jobs), batch_size):
            batch = jobs[start : start + batch_size]
            last = start + len(batch)
            label = f"image {last}" if len(batch) == 1 else f"images {start + 1}-{last}"
            hidden = True if quiet else None  # None: hidden where stderr is no terminal
            pipe.set_progress_bar_config(desc=f"{label} of {len(jobs)}", disable=hidden, leave=False, file=sys.stderr)
            generators = [torch.Generator().manual_seed(job.seed) for job in batch]
            subjects: dict[str, Any] = {key if key == "prompt" else "class_labels": [job.subject for job in batch]}
            started = time.perf_counter()
            result = pipe(**subjects, generator=generators, **options)
            seconds += time.perf_counter() - started
            runs.append(result.stats)
            before = len(images)
            for job, image in zip(batch, result.images, strict=True):
                try:
                    path = save_image(image, job.target, {key: job.subject, "seed": job.seed, **parameters})
                except OSError as error:
                    say(not_written(f"output {str(job.target.path)!r}", error))
                    continue
                images.append({"file": str(path), key: job.subject, "seed": job.seed})
                if not silent:
                    print(path, flush=True)
            if len(images) == before:
                break
        if len(images) < len(jobs):
            say(f"{len(images)} of {len(jobs)} images were written")
    except BaseException:
        if images:
            say(f"{len(images)} of {len(jobs)} images were written before this")
        raise
    return images, runs, seconds


def _write_sheet(images: list[dict[str, Any]], place: Target, parameters: dict[str, Any]) -> None:
    from PIL import Image

    from vargen.evaluation.sheet import contact_sheet

    captions = [str(image.get("prompt", image.get("class_label"))) for image in images]
    pictures = []
    for image in images:
        with Image.open(image["file"]) as opened:  # an open file for each picture would meet the system's limit
            pictures.append(opened.convert("RGB"))
    save_image(contact_sheet(pictures, captions), place, parameters)
