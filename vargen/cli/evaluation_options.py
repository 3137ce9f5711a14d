"""Options shared by `vargen eval`, `draw` and `score`: what to generate, what to measure, and where to run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from vargen.cli.console import quiet_libraries
from vargen.cli.inputs import MOST_PICTURES, read_prompts
from vargen.cli.options import Dtype, check_range
from vargen.cli.outputs import check_writable
from vargen.files import expand_user
from vargen.values import short_repr

if TYPE_CHECKING:
    from vargen.evaluation.generation import Drawing, Engine
    from vargen.evaluation.measurement import Instruments
    from vargen.evaluation.reference_statistics import Statistics


_LARGEST_SIDE = 2048  # pixels; several copies of a chunk of 64 such images fit in memory


class EngineName(StrEnum):
    local = "local"
    ray = "ray"


def read_sampling(*values: float | None) -> dict[str, Any]:
    names = ("guidance_scale", "temperature", "top_k", "top_p")
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


def read_shard(text: str) -> tuple[int, int]:
    """Parse a shard I/N; raises ValueError unless I is from 1 to N."""
    own, slash, of = text.partition("/")
    if not slash or not own.isdecimal() or not of.isdecimal() or not 1 <= int(own) <= int(of) <= 100_000:
        raise ValueError(f"shard must be I/N with I from 1 to N, such as 1/2 and 2/2, got {short_repr(text)}")
    return int(own), int(of)


def make_drawing(
    output: Path,
    model: str,
    methods: list[str] | None,
    num: int | None,
    prompts: Path | None,
    classes: str | None,
    batch: int,
    seed: int,
    sampling: dict[str, Any],
    dtype: Dtype,
    device: str,
    threads: int | None,
) -> Drawing:
    """Collect and check everything that determines the images, without reading any weights."""
    quiet_libraries()
    check_range(num, "num", 1, MOST_PICTURES)
    check_range(threads, "threads", 1)
    folder = expand_user(output, "output")
    check_writable(folder, "output")

    import vargen.assets
    from vargen.evaluation.generation import Drawing
    from vargen.evaluation.items import class_subjects, prompt_subjects
    from vargen.pipelines.registry import describe, pipeline_class
    from vargen.specs import split_specs

    opened = describe(model)
    if prompts is not None and classes is not None:
        raise ValueError("give --prompts or --classes, not both")
    if opened.condition == "class":
        if prompts is not None:
            raise ValueError("this model draws classes: give --classes instead of --prompts")
        subjects = class_subjects(classes or "each", opened.num_classes, opened.id2label, seed, num or 0)
    else:
        if classes is not None:
            raise ValueError("this model draws from text: give --prompts instead of --classes")
        file = prompts or Path(vargen.assets.__file__).parent / "prompts.txt"
        subjects = prompt_subjects(read_prompts(file, "prompts"))
    kind = pipeline_class(opened.pipeline)
    return Drawing(
        model=model,
        output=str(folder),
        methods=tuple(split_specs(methods or [kind.baseline])),
        subjects=tuple(subjects),
        num=num or len(subjects),
        seed=seed,
        batch=batch,
        sampling=sampling,
        dtype=None if dtype is Dtype.auto else dtype.value,
        device=device,
        threads=threads,
    )


def make_instruments(
    scorers: list[str] | None,
    extractor: str | None,
    resize: int | None,
    keep_going: bool,
    device: str,
    threads: int | None,
    model: str,
) -> Instruments:
    """Load each scorer and extractor once, so that missing weights are reported before anything else."""
    quiet_libraries()
    check_range(resize, "resize", 16, _LARGEST_SIDE)

    from vargen.evaluation.measurement import Instruments
    from vargen.scoring.registry import default_scorer
    from vargen.specs import split_specs

    packaged = default_scorer(model) if model else None
    chosen = ([packaged] if packaged else []) if scorers is None else [s for s in split_specs(scorers) if s != "none"]
    network = packaged if extractor is None else None if extractor == "none" else extractor
    made = Instruments(tuple(chosen), network, False, resize, keep_going, device, threads)
    made.opened()
    return made


def find_reference(path: Path | None, instruments: Instruments, kept: Path | None) -> Statistics | None:
    from vargen.evaluation.evaluate import default_reference, open_reference

    if path is None:
        found = default_reference(instruments.extractor)
        return None if found is None else open_reference(found, instruments)
    return open_reference(expand_user(path, "reference"), instruments, kept)


def pick_engine(name: EngineName, actors: int | None, device: Any, threads: int | None) -> Engine:
    check_range(actors, "actors", 1)
    if name is EngineName.local:
        if actors is not None:
            raise ValueError("actors are of --engine ray; the local engine is one process, of which --shard makes several")
        from vargen.evaluation.generation import locally

        return locally
    from vargen.evaluation.ray_backend import ray_engine

    return ray_engine(actors, device.type, threads)


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress and the remaining time on stderr; images of earlier runs count as done, but not toward the speed."""
    shown_bar: list[tqdm] = []

    def show(done: int, total: int) -> None:
        if not shown_bar:
            options: dict[str, Any] = {"disable": None, "leave": False, "dynamic_ncols": True, "file": sys.stderr}
            shown_bar.append(tqdm(desc=what, unit=" pictures", total=total, initial=done, **options))
        shown_bar[0].update(done - shown_bar[0].n)

    try:
        yield show
    finally:
        for each in shown_bar:
            each.close()
