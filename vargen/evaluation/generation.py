"""Generation of the images of an evaluation: any number of methods, on many processes, resumable after any interruption.

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
from vargen.evaluation.run_directory import ManifestWriter, Record, RunDirectory, describe_write_error, hash_files
from vargen.files import atomic_file
from vargen.pipelines.quantization import resolve_quantization
from vargen.pipelines.registry import inspect_model, open_pipeline, pipeline_class
from vargen.pipelines.validation import MAX_SEED, resolve_class_labels, validate_batch_size, validate_sampling
from vargen.values import parse_int, short_repr

PromptOrClass = str | int


def select_classes(chosen: str, classes: int, names: dict[int, str], seed: int = 0, count: int = 0) -> list[PromptOrClass]:
    """Select the classes of an evaluation.

    Args:
        chosen: `each` (all classes in turn, equally often), `random` (uniformly sampled, as in published LlamaGen samples), or
            a comma-separated list of numbers and names.
        count: number of classes sampled for `random`; the class of index i depends only on the seed and i.

    Raises:
        ValueError: the model does not have a class.
    """
    if chosen == "each":
        return list(range(classes))
    if chosen == "random":
        return [_uniform(seed, index, classes) for index in range(max(count, 1))]
    parts = [part.strip() for part in chosen.split(",")]
    labels = [int(part) if part.lstrip("-").isdecimal() and len(part) < 1000 else part for part in parts]
    return list(resolve_class_labels(labels, classes, names))


def _uniform(seed: int, index: int, below: int) -> int:
    digest = hashlib.sha256(f"class {seed} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % below  # 2^64 values: modulo bias below 1e-16


@dataclass(frozen=True)
class PendingBatch:
    """A batch of indices and a method, with the images that are still missing."""

    method: str
    indices: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True)
class GenerationPlan:
    """Settings of the images to generate: plain values, which can be sent to another machine.

    Index i has the prompt or class i modulo their number, and the seed `seed` + i. Image i is thus the one that
    `vargen generate` returns for its prompt and seed, and a longer run contains a shorter one.

    Attributes:
        model: name, folder or hub id. output: run directory, reachable by every process under this path.
        methods: presets with settings, see `resolve_method`. num: number of images of each method.
        sampling: guidance_scale, temperature, top_k, top_p where they differ from the model's.
        batch: images per batch. threads: number of CPU threads; None: autotuned.
        dtype: of the transformer, such as `"float32"`; None is the model's default. device: such as `"cpu"`.
        quantization: such as `"int8"`, see `VisualPipeline.from_pretrained`; None is that of the folder.

    Raises:
        ValueError: `num` is below 1, there are no prompts or classes, or a seed does not fit in 63 bits.
    """

    model: str
    output: str
    methods: tuple[str, ...]
    prompts: tuple[PromptOrClass, ...]
    num: int
    seed: int = 0
    batch: int = 8
    sampling: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    quantization: str | None = None
    device: str = "cpu"
    threads: int | None = None

    def __post_init__(self) -> None:
        if parse_int(self.num, 1) is None:
            raise ValueError(f"num must be a whole number of at least 1, got {short_repr(self.num)}")
        if not self.prompts:
            raise ValueError("prompts must hold at least one prompt or class")
        if parse_int(self.seed, 0, MAX_SEED - self.num + 1) is None:
            allowed = MAX_SEED - self.num + 1
            raise ValueError(f"seed must be from 0 to {allowed} for {self.num} images, got {short_repr(self.seed)}")

    def prompt_at(self, index: int) -> PromptOrClass:
        return self.prompts[index % len(self.prompts)]

    def validate(self) -> dict[str, Any]:
        """Return all settings that determine the images, for the run directory; weights are read for their digest only.

        Raises:
            ValueError: the model cannot generate images with the settings or methods.
        """
        info = inspect_model(self.model)
        family = pipeline_class(info.pipeline)
        resolve_quantization(self.quantization)
        _, sampling = validate_sampling(self.sampling)
        sampling.validate_top_k(info.vocab_size)
        validate_batch_size(self.batch)
        by_class = info.condition == "class"
        if any(isinstance(prompt, str) == by_class for prompt in self.prompts):
            wanted, given = ("classes", "prompts") if by_class else ("prompts", "classes")
            raise ValueError(f"model {self.model} generates images of {wanted}, and {given} are given")
        specs: dict[str, Any] = {}
        for name in self.methods:
            method = resolve_method(name, family.paradigm)
            family.validate_method_for(info, method)
            if isinstance(getattr(method, "drafter", None), Speculative) and "draft_transformer" not in info.components:
                raise ValueError(f"method {name} needs a draft_transformer, and model {self.model} has none")
            specs[name] = {**method.spec(), "kind": method.kind}
        if not specs or len(specs) < len(self.methods):
            raise ValueError(f"methods must be at least one, and each once, got {', '.join(self.methods) or 'none'}")
        return {
            "model": Path(self.model).resolve().name if Path(self.model).is_dir() else self.model,
            "weights": hash_files(info.folder.rglob("*.safetensors")),
            "baseline": family.baseline,
            "sampling": self.sampling,
            "seed": self.seed,
            "batch": self.batch,
            "dtype": self.dtype,
            **({} if self.quantization is None else {"quantization": self.quantization}),
            "device": torch.device(self.device).type,
            "subjects": list(self.prompts),
            "num": self.num,
            "methods": specs,
        }

    def pending_batches(self, complete: Iterable[tuple[str, int]], shard: int = 1, shards: int = 1) -> list[PendingBatch]:
        """Return the batches that one of several shards has yet to generate, ordered by batch, then by method.

        Methods alternate, so that a gradual change in the machine's speed affects all of them equally.

        Args:
            complete: method and index of the images that exist.
        """
        done = set(complete)
        batches = []
        for number, start in enumerate(range(0, self.num, self.batch)):
            if number % shards != shard - 1:
                continue
            indices = tuple(range(start, min(start + self.batch, self.num)))
            first = number % len(self.methods)
            for method in self.methods[first:] + self.methods[:first]:
                missing = tuple(index for index in indices if (method, index) not in done)
                if missing:
                    batches.append(PendingBatch(method, indices, missing))
        return batches


class ImageGenerator:
    """Generates pending batches; opens its pipeline once. Each generating process has one."""

    def __init__(self, plan: GenerationPlan):
        self.plan, self.run = plan, RunDirectory(Path(plan.output))
        set_threads(plan.threads)
        dtype = None if plan.dtype is None else getattr(torch, plan.dtype)
        self.pipe = open_pipeline(plan.model, torch_dtype=dtype, quantization=plan.quantization).to(plan.device)
        self.pipe.set_progress_bar_config(disable=True)
        self.methods = {method: resolve_method(method, self.pipe.paradigm) for method in plan.methods}
        for method in self.methods.values():
            self.pipe.validate_method(method)  # checks that need the weights, before the first batch

    def __call__(self, batch: PendingBatch) -> list[Record]:
        """Write the missing images of a batch; returns a manifest record for each.

        Raises:
            OSError: an image cannot be written; says which one and what to do. Earlier ones are complete, but generated again.
        """
        prompts = [self.plan.prompt_at(index) for index in batch.indices]
        seeds = [self.plan.seed + index for index in batch.indices]
        result = self.pipe(
            **{"class_labels" if self.pipe.is_class_conditional else "prompt": prompts},
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            accelerator=self.methods[batch.method],
            **self.plan.sampling,
        )
        records = []
        for row, (index, prompt, seed) in enumerate(zip(batch.indices, prompts, seeds, strict=True)):
            if index in batch.missing:
                about = {**self._describe_prompt(prompt), "seed": seed, "method": batch.method}
                sha256 = self._write(result.images[row], batch.method, index, about)
                records.append({"index": index, **about, "sha256": sha256, **per_image_statistics(result.stats, row)})
        return records

    def _describe_prompt(self, prompt: PromptOrClass) -> dict[str, Any]:
        """Return the prompt or class, and the text for scorers."""
        if isinstance(prompt, int):
            names = self.pipe.class_names.get(prompt, "")
            return {"class": prompt, "text": names.split(",")[0].strip() or f"class {prompt}"}
        return {"prompt": prompt, "text": self.pipe.normalize_prompt(prompt).text}

    def _write(self, image: Any, method: str, index: int, about: dict[str, Any]) -> str:
        name = self.run.image(method, index)
        chunk = PngInfo()
        model = Path(self.plan.model).name  # image metadata must not reveal anyone's folders
        chunk.add_text("vargen", json.dumps({**about, "model": model, **self.plan.sampling}))
        file = io.BytesIO()
        image.save(file, format="PNG", pnginfo=chunk)
        try:
            with atomic_file(self.run.path / name) as temporary:
                temporary.write_bytes(file.getvalue())
        except OSError as error:
            raise describe_write_error(name, error) from error
        return hashlib.sha256(file.getvalue()).hexdigest()


def per_image_statistics(stats: DecodeStats, row: int) -> dict[str, Any]:
    """Return one image's share of the cost of its batch; `active_passes` is the number of passes it took part in."""
    committing = sum(stats.committed_histogram)
    return {
        "seconds": stats.seconds / stats.images,
        "tokens": stats.tokens / stats.images,
        "active_passes": committing / stats.images if committing else float(stats.passes),
        "passes": stats.passes,
        "relaxation": float(stats.relaxation[row]) if stats.relaxation else 0.0,
        "batch": stats.images,
        "threads": stats.threads,
    }


Backend = Callable[[Callable[[Any], Any], Any, list[Any]], Iterator[Any]]


def run_locally(worker: Callable[[Any], Any], argument: Any, units: list[Any]) -> Iterator[Any]:
    """Yield `worker(argument)(unit)` for each unit, in order, in this process. Other backends run elsewhere, in any order."""
    if units:
        work = worker(argument)
        yield from map(work, units)


def generate_missing_images(
    plan: GenerationPlan,
    shard: int = 1,
    shards: int = 1,
    backend: Backend = run_locally,
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
    settings = plan.validate()
    run = RunDirectory(Path(plan.output))
    run.open_or_create(settings)
    with ManifestWriter(run.manifest_path(shard, shards)) as manifest:
        pending = plan.pending_batches(run.complete_records(), shard, shards)
        total = sum(len(batch.missing) for batch in plan.pending_batches((), shard, shards))
        done = first = total - sum(len(batch.missing) for batch in pending)
        if progress:
            progress(done, total)
        for records in backend(ImageGenerator, plan, pending):
            try:
                manifest.append(*records)
            except OSError as error:
                raise describe_write_error(str(manifest.path), error) from error
            done += len(records)
            if progress:
                progress(done, total)
    return done - first
