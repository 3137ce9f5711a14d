"""The generation loop of `vargen generate`: batches of images, one file per image."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

from vargen.cli.console import Names, say
from vargen.cli.outputs import Target, not_written, save_image


@dataclass(frozen=True)
class Job:
    """One image: its prompt or class, its seed and its file."""

    subject: str | int
    seed: int
    target: Target


def draw(
    pipe: Any,
    jobs: list[Job],
    options: dict[str, Any],
    parameters: dict[str, Any],
    batch_size: int,
    quiet: bool,
    names: Names,
) -> tuple[list[dict[str, Any]], list[Any], float]:
    """Generate and save images batch by batch.

    An image that cannot be written is reported and the others are still saved; if no image of a batch can be written,
    generation ends after that batch. It continues if the reader of the printed `names` is gone.

    Returns:
        A record per saved image, statistics per batch, and the seconds spent on generation.
    """
    import torch

    key = "class_label" if pipe.is_class_conditional else "prompt"
    images: list[dict[str, Any]] = []
    runs: list[Any] = []
    seconds = 0.0
    try:
        step = max(1, batch_size // options.get("num_candidates", 1))
        for start in range(0, len(jobs), step):
            batch = jobs[start : start + step]
            last = start + len(batch)
            label = f"image {last}" if len(batch) == 1 else f"images {start + 1}-{last}"
            hidden = True if quiet else None  # None: hidden if stderr is not a terminal
            pipe.set_progress_bar_config(desc=f"{label} of {len(jobs)}", disable=hidden, leave=False, file=sys.stderr)
            generators = [torch.Generator().manual_seed(job.seed) for job in batch]
            subjects: dict[str, Any] = {key if key == "prompt" else "class_labels": [job.subject for job in batch]}
            started = time.perf_counter()
            result = pipe(**subjects, generator=generators, **options)
            seconds += time.perf_counter() - started
            runs.append(result.stats)
            before = len(images)
            for number, (job, image) in enumerate(zip(batch, result.images, strict=True)):
                said = {key: job.subject, **result.stats.picture(number)}
                try:
                    path = save_image(image, job.target, {**said, **parameters})
                except OSError as error:
                    say(not_written(f"output {str(job.target.path)!r}", error))
                    continue
                images.append({"file": str(path), **said})
                names.add(path)
            if len(images) == before:
                break
        if len(images) < len(jobs):
            say(f"{len(images)} of {len(jobs)} images were written")
    except BaseException as error:
        if images:
            what = "it was interrupted" if isinstance(error, KeyboardInterrupt) else "the error that follows"
            say(f"{len(images)} of {len(jobs)} images were written before {what}")
        raise
    return images, runs, seconds


def write_sheet(images: list[dict[str, Any]], place: Target, parameters: dict[str, Any]) -> None:
    from vargen.evaluation.contact_sheets import contact_sheet
    from vargen.picture_files import on_white, opened_picture

    captions = [str(image.get("prompt", image.get("class_label"))) for image in images]
    pictures = []
    for image in images:
        with opened_picture(image["file"]) as opened:  # one open file at a time: systems limit them
            pictures.append(on_white(opened))
    save_image(contact_sheet(pictures, captions), place, parameters)
