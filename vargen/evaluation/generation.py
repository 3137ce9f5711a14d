"""Drawing the pictures of an evaluation: any number of methods, over many processes, resumed after any end.

The unit of work is a batch of items, fixed by their numbers, by one method. What a batch draws depends on no other, so shards
and engines may divide the batches as they like. A batch of which a part is missing is drawn whole again and only the missing
pictures are written: each is thus drawn beside the same others, and equal to the last bit, whatever was interrupted.
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
    """A batch of items and a method, with those of its pictures that are missing."""

    method: str
    items: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True)
class Drawing:
    """What is to be drawn; plain values, which another machine can be told.

    Attributes:
        model: name, folder or hub id. output: folder of the run, which every process reaches under this path.
        methods: presets with settings, see `resolve_method`.
        sampling: guidance_scale, temperature, top_k, top_p where they differ from the model's.
        batch: pictures at once. threads: of the CPU; None is measured.
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
        """What decides the pictures, for `RunFolder.claim`; reads no weight but to know their bytes.

        Raises:
            ValueError: for settings or methods that this model cannot draw with.
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
        """What is still to be drawn by one of several shards; batches in turn, methods within a batch.

        Methods take turns, so that a drift of the machine meets all alike.
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
    """Draws units; opens its pipeline once. One lives in each process that draws."""

    def __init__(self, drawing: Drawing):
        self.drawing, self.folder, self.items = drawing, RunFolder(Path(drawing.output)), drawing.items
        set_threads(drawing.threads)
        dtype = None if drawing.dtype is None else getattr(torch, drawing.dtype)
        self.pipe = open_pipeline(drawing.model, torch_dtype=dtype).to(drawing.device)
        self.pipe.set_progress_bar_config(disable=True)
        self.methods = {method: resolve_method(method, self.pipe.paradigm) for method in drawing.methods}
        for accelerator in self.methods.values():
            self.pipe.check_runs(accelerator)  # what only weights tell, before the first batch

    def __call__(self, unit: Unit) -> list[Record]:
        """Write the missing pictures of a unit; returns a line for the manifest of each.

        Raises:
            OSError: if one cannot be written, saying which and what to do. Those before it are whole, and drawn again.
        """
        subjects = [self.items.subject(item) for item in unit.items]
        seeds = [self.drawing.seed + item for item in unit.items]
        result = self.pipe(
            **{"class_labels" if self.pipe.by_class else "prompt": subjects},
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
        """The prompt or class, and what a scorer is to read."""
        if isinstance(subject, int):
            names = self.pipe.class_names.get(subject, "")
            return {"class": subject, "text": names.split(",")[0].strip() or f"class {subject}"}
        return {"prompt": subject, "text": self.pipe.normalize_prompt(subject).text}

    def _write(self, image: Any, method: str, item: int, about: dict[str, Any]) -> str:
        name = self.folder.image(method, item)
        chunk = PngInfo()
        model = Path(self.drawing.model).name  # a picture tells no one's folders
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
    """A picture's share of what its batch took; `turns` is how many passes it took part in."""
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
    """Yield `worker(argument)(unit)` of each unit, in order, in this process. Other engines do so elsewhere, in any order."""
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
    """Draw what is missing of a shard, and append it to its manifest; returns how many pictures that were.

    Args:
        shard: from 1 to `shards`.
        progress: called with pictures done and to do, those of earlier runs included.

    Raises:
        ValueError: for a shard that is none, settings that the model cannot draw with, a folder with other contents, or a
            shard that another process draws.
        OSError: for a full disk; what was drawn before stays, and the next call goes on.
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
