"""Generating the images of an evaluation: any number of methods, on many processes, resumable after any interruption.

The unit of work is a batch of indices, fixed by their numbers, for one method. Batches are independent of each other, so
shards and backends may divide them freely. If some images of a batch are missing, the whole batch is generated again and only
the missing images are written. Each image is thus always generated in the same batch, and interruptions do not change a bit.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL.PngImagePlugin import PngInfo

from vargen.decoding import DecodeStats, Speculative, resolve_method
from vargen.device import set_threads
from vargen.evaluation.items import Items, Subject
from vargen.evaluation.run_directory import Journal, Record, RunFolder, cannot_write, folder_digest
from vargen.files import atomic_file
from vargen.pipelines.registry import describe, open_pipeline, pipeline_class
from vargen.pipelines.validation import check_batch, check_sampling
from vargen.values import short_repr


@dataclass(frozen=True)
class Unit:
    """A batch of indices and a method, with the images that are still missing."""

    method: str
    items: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True)
class Drawing:
    """Settings of the images to generate: plain values, which can be sent to another machine.

    Attributes:
        model: name, folder or hub id. output: run directory, reachable by every process under this path.
        methods: presets with settings, see `resolve_method`.
        sampling: guidance_scale, temperature, top_k, top_p where they differ from the model's.
        batch: images per batch. threads: number of CPU threads; None: autotuned.
        dtype: of the transformer, such as `"float32"`; None is the model's default. device: such as `"cpu"`.
    """

    model: str
    output: str
    methods: tuple[str, ...]
    subjects: tuple[Subject, ...]
    num: int
    seed: int = 0
    batch: int = 8
    sampling: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    device: str = "cpu"
    threads: int | None = None

    @property
    def items(self) -> Items:
        return Items(self.subjects, self.num, self.seed)

    def check(self) -> dict[str, Any]:
        """Return all settings that determine the images, for `RunFolder.claim`; weights are only read to compute their digest.

        Raises:
            ValueError: the model cannot generate images with the settings or methods.
        """
        opened = describe(self.model)
        kind = pipeline_class(opened.pipeline)
        _, sampling = check_sampling(self.sampling)
        sampling.check_vocabulary(opened.vocab)
        check_batch(self.batch)
        by_class = opened.condition == "class"
        if any(isinstance(subject, str) == by_class for subject in self.subjects):
            wanted, given = ("classes", "prompts") if by_class else ("prompts", "classes")
            raise ValueError(f"model {self.model} draws {wanted}, and {given} are given")
        specs: dict[str, Any] = {}
        for method in self.methods:
            accelerator = resolve_method(method, kind.paradigm)
            kind.check_method(opened, accelerator)
            if isinstance(getattr(accelerator, "drafter", None), Speculative) and not opened.has_draft:
                raise ValueError(f"method {method} needs a draft_transformer, and model {self.model} has none")
            specs[method] = {**accelerator.spec(), "kind": accelerator.kind}
        if not specs or len(specs) < len(self.methods):
            raise ValueError(f"methods must be at least one, and each once, got {', '.join(self.methods) or 'none'}")
        weights = folder_digest(file for file in opened.folder.rglob("*.safetensors"))
        return {
            "model": Path(self.model).resolve().name if Path(self.model).is_dir() else self.model,
            "weights": weights,
            "baseline": kind.baseline,
            "sampling": self.sampling,
            "seed": self.seed,
            "batch": self.batch,
            "dtype": self.dtype,
            "device": torch.device(self.device).type,
            "subjects": list(self.subjects),
            "num": self.items.count,
            "methods": specs,
        }

    def units(self, drawn: Iterable[tuple[str, int]], shard: int = 1, shards: int = 1) -> list[Unit]:
        """Return the units that one of several shards has yet to generate, ordered by batch, then by method.

        Methods alternate, so that a gradual change in the machine's speed affects all of them equally.
        """
        done = set(drawn)
        found = []
        for number, start in enumerate(range(0, self.num, self.batch)):
            if number % shards != shard - 1:
                continue
            items = tuple(range(start, min(start + self.batch, self.num)))
            turn = number % len(self.methods)
            for method in self.methods[turn:] + self.methods[:turn]:
                missing = tuple(item for item in items if (method, item) not in done)
                if missing:
                    found.append(Unit(method, items, missing))
        return found


class Drawer:
    """Generates units of work; opens its pipeline once. Each generating process has one."""

    def __init__(self, drawing: Drawing):
        self.drawing, self.folder, self.items = drawing, RunFolder(Path(drawing.output)), drawing.items
        set_threads(drawing.threads)
        dtype = None if drawing.dtype is None else getattr(torch, drawing.dtype)
        self.pipe = open_pipeline(drawing.model, torch_dtype=dtype).to(drawing.device)
        self.pipe.set_progress_bar_config(disable=True)
        self.methods = {method: resolve_method(method, self.pipe.paradigm) for method in drawing.methods}
        for accelerator in self.methods.values():
            self.pipe.check_runs(accelerator)  # checks that need the weights, before the first batch

    def __call__(self, unit: Unit) -> list[Record]:
        """Write the missing images of a unit; returns a manifest record for each.

        Raises:
            OSError: an image cannot be written; says which one and what to do. Earlier ones are complete, but generated again.
        """
        subjects = [self.items.subject(item) for item in unit.items]
        seeds = [self.drawing.seed + item for item in unit.items]
        result = self.pipe(
            **{"class_labels" if self.pipe.is_class_conditional else "prompt": subjects},
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            accelerator=self.methods[unit.method],
            **self.drawing.sampling,
        )
        records = []
        for row, (item, subject, seed) in enumerate(zip(unit.items, subjects, seeds, strict=True)):
            if item not in unit.missing:
                continue
            about = {**self._subject(subject), "seed": seed, "method": unit.method}
            sha256 = self._write(result.images[row], unit.method, item, about)
            measured = per_picture(result.stats, row)
            records.append({"item": item, **about, "sha256": sha256, **measured})
        return records

    def _subject(self, subject: Subject) -> dict[str, Any]:
        """Return the prompt or class, and the text for scorers."""
        if isinstance(subject, int):
            names = self.pipe.class_names.get(subject, "")
            return {"class": subject, "text": names.split(",")[0].strip() or f"class {subject}"}
        return {"prompt": subject, "text": self.pipe.normalize_prompt(subject).text}

    def _write(self, image: Any, method: str, item: int, about: dict[str, Any]) -> str:
        name = self.folder.image(method, item)
        chunk = PngInfo()
        model = Path(self.drawing.model).name  # image metadata must not reveal anyone's folders
        chunk.add_text("vargen", json.dumps({**about, "model": model, **self.drawing.sampling}))
        file = io.BytesIO()
        image.save(file, format="PNG", pnginfo=chunk)
        try:
            with atomic_file(self.folder.path / name) as temporary:
                temporary.write_bytes(file.getvalue())
        except OSError as error:
            raise cannot_write(name, error) from error
        return hashlib.sha256(file.getvalue()).hexdigest()


def per_picture(stats: DecodeStats, row: int) -> dict[str, Any]:
    """Return one image's share of the cost of its batch; `turns` is the number of passes it took part in."""
    turns = sum(stats.accepted_histogram) / stats.images if sum(stats.accepted_histogram) else float(stats.passes)
    return {
        "seconds": stats.seconds / stats.images,
        "tokens": stats.tokens / stats.images,
        "turns": turns,
        "passes": stats.passes,
        "relaxation": float(stats.relaxation[row]) if stats.relaxation else 0.0,
        "batch": stats.images,
        "threads": stats.threads,
    }


Engine = Callable[[Callable[[Any], Any], Any, list[Any]], Iterator[Any]]


def locally(worker: Callable[[Any], Any], argument: Any, units: list[Any]) -> Iterator[Any]:
    """Yield `worker(argument)(unit)` for each unit, in order, in this process. Other backends run elsewhere, in any order."""
    if units:
        work = worker(argument)
        yield from map(work, units)


def draw(
    drawing: Drawing,
    shard: int = 1,
    shards: int = 1,
    engine: Engine = locally,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Generate the missing images of a shard and append them to its manifest; returns the number of images generated.

    Args:
        shard: from 1 to `shards`.
        progress: called with the numbers of finished images, including those of earlier runs, and of all images.

    Raises:
        ValueError: the shard is invalid or in use by another process, the model cannot use the settings, or the folder has
            other contents.
        OSError: the disk is full; finished images are kept, and the next call resumes.
    """
    if not 1 <= shard <= shards:
        raise ValueError(f"shard must be from 1/{shards} to {shards}/{shards}, got {short_repr(shard)}/{shards}")
    settings = drawing.check()
    folder = RunFolder(Path(drawing.output))
    folder.claim(settings)
    with Journal(folder.journal(shard, shards)) as journal:
        done = folder.drawn()
        units = drawing.units(done, shard, shards)
        total = sum(len(unit.missing) for unit in drawing.units((), shard, shards))
        written = 0
        first = total - sum(len(unit.missing) for unit in units)
        if progress:
            progress(first, total)
        for records in engine(Drawer, drawing, units):
            try:
                journal.append(*records)
            except OSError as error:
                raise cannot_write(str(journal.path), error) from error
            written += len(records)
            if progress:
                progress(first + written, total)
    return written
