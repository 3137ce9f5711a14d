"""`vargen generate` for image models: check the request, load the model, and generate batch by batch."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from vargen.cli.console import print_json, print_status
from vargen.cli.inputs import SourceFiles, parse_class_labels, report_emoji_names
from vargen.cli.options import require_device, select_dtype
from vargen.cli.outputs import OutputFile, model_files, resolve_outputs, slugify, validate_distinct_paths
from vargen.cli.results import Write, describe_failed_write, save_image, write_each

if TYPE_CHECKING:
    from vargen.cli.generate import GenerateOptions
    from vargen.pipelines.base import VisualPipeline


@dataclass(frozen=True)
class ImageOptions:
    """Options of `vargen generate` that only image models have."""

    by_class: bool
    contact_sheet: str | None
    source: SourceFiles
    sampling: dict[str, Any]
    negative_prompt: str | None
    best_of: int
    batch_size: int


ImageJob = tuple[str | int, int, OutputFile]  # prompt or class, seed, file
# What each image has of its own in the JSON document.
_OWN = ("file", "prompt", "class_label", "seed", "scorer", "score", "candidates", "asked_seed", "tokens_digest")


@dataclass
class GenerationRecords:
    """What a run has generated: a record per saved image, statistics per batch, and the seconds spent on generation."""

    records: list[dict[str, Any]] = field(default_factory=list)
    stats: list[Any] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        seconds = sum(stats.seconds for stats in self.stats)
        return sum(stats.tokens for stats in self.stats) / seconds if seconds else 0.0


def generate_image_files(options: GenerateOptions, own: ImageOptions) -> None:
    """Generate an image for each prompt or class and seed; print the name of each file."""
    device = require_device(options.device)
    requested = options.jobs()
    kind = "class " if own.by_class else ""
    files = resolve_outputs(options.output, [f"{slugify(kind + subject)}-{seed}" for subject, seed in requested])
    sheet = None if own.contact_sheet is None else resolve_outputs(own.contact_sheet, ["sheet"], "contact_sheet")[0]
    inputs = {"prompt_file": [options.prompt_file], **own.source.files(), "a file of model": model_files(options.model)}
    validate_distinct_paths({"output": files, "contact_sheet": [sheet]}, inputs)
    model, method = _check_request(options, own)
    source_images = own.source.load(model)
    subjects: list[Any] = [subject for subject, _ in requested]
    if own.by_class:
        subjects = parse_class_labels(subjects, model)
    jobs = [(subject, seed, file) for subject, (_, seed), file in zip(subjects, requested, files, strict=True)]

    from vargen.pipelines.loading import open_pipeline
    from vargen.scoring import DEFAULT_SCORER, open_scorer

    scorer = open_scorer(options.scorer or DEFAULT_SCORER, device) if own.best_of > 1 or options.scorer else None
    dtype = select_dtype(options.dtype, device, model.folder, options.quantization)
    started = time.perf_counter()
    pipe = open_pipeline(model.folder, device=device, torch_dtype=dtype, quantization=options.quantization)
    seconds_load = time.perf_counter() - started
    call: dict[str, Any] = {**own.sampling, "accelerator": method, "negative_prompt": own.negative_prompt}
    call |= source_images
    if scorer is not None:
        call |= {"num_candidates": own.best_of, "scorer": scorer}
    if not options.quiet:
        texts = [] if own.by_class else options.prompts
        report_emoji_names(pipe, [*texts, *([own.negative_prompt] if own.negative_prompt else [])])
    made = _generate_batches(pipe, jobs, call, own, options)
    writes: list[Write] = []
    if options.as_json:
        seconds = {"seconds_load": seconds_load, "seconds_generate": made.seconds, "tokens_per_second": made.tokens_per_second}
        document = _document(made, {"device": str(device), **seconds})
        writes.append(("json", lambda: print_json(document)))
    if sheet is not None and made.records:
        writes.append((f"contact_sheet {str(sheet.path)!r}", lambda: _write_contact_sheet(made.records, sheet)))
    write_each(writes)
    if len(made.records) < len(jobs):
        raise typer.Exit(1)
    if not options.quiet:
        count = f"{len(jobs)} image{'s' if len(jobs) > 1 else ''}"
        seed = str(options.first_seed)
        if own.best_of > 1 and len(jobs) == 1:
            seed = f"{made.records[0]['seed']}, the best candidate of {seed}"
        rate = f"{made.tokens_per_second:.0f} tokens per second, seed {seed}"
        print_status(f"{count} in {made.seconds:.1f} s (and {seconds_load:.1f} s to load), {rate}")


def _check_request(options: GenerateOptions, own: ImageOptions) -> tuple[VisualPipeline, str]:
    """Check the request against the model's files, without reading weights.

    Returns:
        The pipeline without weights, and the name of the method to use.
    """
    from vargen.decoding import Sampling, resolve_method
    from vargen.pipelines.loading import inspect_model

    model = inspect_model(options.model)
    method = resolve_method(model.default_method if options.accelerator is None else options.accelerator, model.paradigm)
    Sampling(top_k=own.sampling.get("top_k")).validate_top_k(model.vocab_size)
    if not model.makes_images:
        raise ValueError("model must make images itself; another pipeline decodes the tokens of this one: see docs/models.md")
    if model.is_class_conditional and not own.by_class:
        labels = f"--class-label 0 to {model.num_classes - 1}"
        raise ValueError(f"this model generates classes: give {labels} instead of a prompt")
    if model.is_class_conditional and own.negative_prompt is not None:
        raise ValueError("negative_prompt must be left out: this model generates classes, not text")
    if not model.is_class_conditional and own.by_class:
        raise ValueError("this model generates from text: give a prompt instead of --class-label")
    return model, method.name


def _generate_batches(
    pipe: Any,
    jobs: list[ImageJob],
    call: dict[str, Any],
    own: ImageOptions,
    options: GenerateOptions,
) -> GenerationRecords:
    """Generate and save images batch by batch.

    An image that cannot be written is reported and the others are still saved; if no image of a batch can be written,
    generation ends after that batch.
    """
    import torch

    argument, batch_size = "class_labels" if own.by_class else "prompt", max(1, own.batch_size // own.best_of)
    made = GenerationRecords()
    try:
        for start in range(0, len(jobs), batch_size):
            batch = jobs[start : start + batch_size]
            last = start + len(batch)
            label = f"image {last}" if len(batch) == 1 else f"images {start + 1}-{last}"
            hidden = True if options.quiet else None  # None: hidden if stderr is not a terminal
            pipe.set_progress_bar_config(desc=f"{label} of {len(jobs)}", disable=hidden, leave=False, file=sys.stderr)
            generators = [torch.Generator().manual_seed(seed) for _, seed, _ in batch]
            subjects: dict[str, Any] = {argument: [subject for subject, _, _ in batch]}
            started = time.perf_counter()
            result = pipe(**subjects, generator=generators, **call)
            made.seconds += time.perf_counter() - started
            made.stats.append(result.stats)
            before = len(made.records)
            for number, ((_, _, file), image) in enumerate(zip(batch, result.images, strict=True)):
                parameters = {**result.parameters(number), **own.source.metadata()}
                try:
                    path = save_image(image, file, parameters)
                except OSError as error:
                    print_status(describe_failed_write(f"output {str(file.path)!r}", error))
                    continue
                made.records.append({"file": str(path), **parameters})
                if not options.as_json:
                    print(path, flush=True)
            if len(made.records) == before:
                break
        if len(made.records) < len(jobs):
            print_status(f"{len(made.records)} of {len(jobs)} images were written")
    except BaseException as error:
        if made.records:
            what = "the interruption" if isinstance(error, KeyboardInterrupt) else "the following error"
            print_status(f"{len(made.records)} of {len(jobs)} images were written before {what}")
        raise
    return made


def _document(made: GenerationRecords, run: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON document: of each image what is its own, and what all have in common."""
    from vargen.decoding import DecodeStats

    images = [{name: value for name, value in record.items() if name in _OWN} for record in made.records]
    return {"images": images, **_common(made.records), **run, "stats": DecodeStats.merge(made.stats).to_dict()}


def _common(records: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in records[-1].items() if name not in _OWN} if records else {}


def _write_contact_sheet(records: list[dict[str, Any]], file: OutputFile) -> None:
    from vargen.evaluation.contact_sheets import contact_sheet
    from vargen.reading import on_white, open_image

    captions = [str(record.get("prompt", record.get("class_label"))) for record in records]
    images = []
    for record in records:
        with open_image(record["file"]) as opened:  # one open file at a time: systems limit them
            images.append(on_white(opened))
    save_image(contact_sheet(images, captions), file, _common(records))
