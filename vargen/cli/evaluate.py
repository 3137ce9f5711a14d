"""`vargen eval`, and its halves `draw` and `score`: what methods cost in quality, and what they save."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm

from vargen.cli.console import quiet_libraries, say, table
from vargen.cli.options import Device, Dtype, check_range, pick_device
from vargen.cli.outputs import Write, check_apart, check_writable, json_writes, result_file, write_each
from vargen.cli.subjects import read_prompts
from vargen.files import expanded
from vargen.values import shown

if TYPE_CHECKING:
    from vargen.evaluation.drawing import Drawing, Engine
    from vargen.evaluation.evaluate import Evaluation
    from vargen.evaluation.measuring import Instruments
    from vargen.evaluation.run_folder import RunFolder
    from vargen.evaluation.statistics_files import Statistics


class EngineName(StrEnum):
    local = "local"
    ray = "ray"


_Model = Annotated[str, typer.Option(metavar="NAME|DIR|HUB ID", help="A packaged model, a folder, or a hub id.")]
_Methods = Annotated[
    list[str] | None,
    typer.Option(metavar="PRESET,...", help="Presets, with settings as in gsd:budget=5. Default: the baseline alone."),
]
_Num = Annotated[int | None, typer.Option(metavar="N", help="Pictures of each method. Default: one per prompt or class.")]
_Output = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Of the run; one found there goes on.")]
_Prompts = Annotated[
    Path | None, typer.Option(metavar="FILE", help="One a line, drawn in turn. Default, for text: the packaged 64.")
]
_Classes = Annotated[
    str | None,
    typer.Option(metavar="each|random|N,...", help="All in turn (default), uniformly random, or those numbers and names."),
]
_Batch = Annotated[int, typer.Option(metavar="N", help="Pictures at once.")]
_Shard = Annotated[str, typer.Option(metavar="I/N", help="Draw the I-th of N parts, I from 1, beside other processes.")]
_EngineName = Annotated[EngineName, typer.Option(help="ray: several processes or machines (extra ray).")]
_Actors = Annotated[int | None, typer.Option(metavar="N", help="Processes of ray. Default: one per GPU, or core.")]
_Seed = Annotated[int, typer.Option(metavar="N", help="Of picture 0; the next has seed + 1.")]
_Setting = typer.Option(metavar="X", help="Default: the model's.")
_DeviceName = Annotated[Device, typer.Option()]
_Threads = Annotated[int | None, typer.Option(metavar="N", help="CPU threads. Default: as many as pay, measured.")]
_Scorers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME,...",
        help="emoji-scorer; clip:model=ViT-L-14,weights=FILE; image-reward:weights=FILE; module:function; or none. "
        "Default: the packaged scorer of the model.",
    ),
]
_Extractor = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of distances: inception:weights=FILE, clip:model=NAME,weights=FILE, a scorer's tower, module:function, or none.",
    ),
]
_Reference = Annotated[
    Path | None, typer.Option(metavar="FILE.npz|DIR", help="Statistics or samples in ADM's layout, or a folder of pictures.")
]
_Resize = Annotated[int | None, typer.Option(metavar="N", help="Measure pictures of N x N, the centre, by bicubic scaling.")]
_KeepGoing = Annotated[bool, typer.Option("--keep-going", help="Pass over files that cannot be read; they are named.")]
_Json = Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write JSON, or print it instead of the table.")]


def draw(
    output: _Output,
    model: _Model = "emoji",
    methods: _Methods = None,
    num: _Num = None,
    prompts: _Prompts = None,
    classes: _Classes = None,
    batch: _Batch = 8,
    shard: _Shard = "1/1",
    engine: _EngineName = EngineName.local,
    actors: _Actors = None,
    seed: _Seed = 0,
    guidance_scale: Annotated[float | None, _Setting] = None,
    temperature: Annotated[float | None, _Setting] = None,
    top_k: Annotated[int | None, _Setting] = None,
    top_p: Annotated[float | None, _Setting] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the transformer; auto is the fastest here.")] = Dtype.auto,
    device: _DeviceName = Device.auto,
    threads: _Threads = None,
) -> None:
    """Draw the pictures of an evaluation. Stopped in any way, the same command goes on.

    Picture k has the seed --seed + k, whatever the batch, the shard or the engine.
    """
    sampling = _sampling(guidance_scale, temperature, top_k, top_p)
    part = _shard(shard)
    place = pick_device(device)
    drawing = _drawing(output, model, methods, num, prompts, classes, batch, seed, sampling, dtype, str(place), threads)
    drawn = _draw(drawing, part, _engine(engine, actors, place, threads))
    say(f"{drawn} pictures drawn; score them with: vargen score {output}")


def score(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run of vargen, or any folder of pictures.")],
    scorers: _Scorers = None,
    extractor: _Extractor = None,
    reference: _Reference = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of a folder: one a line, in the order of the files' names.")
    ] = None,
    resize: _Resize = None,
    keep_going: _KeepGoing = False,
    as_json: _Json = None,
    samples: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Also write the folder's pictures as a batch in ADM's layout.")
    ] = None,
    save_reference: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Also write the folder's statistics, to be a --reference.")
    ] = None,
    engine: _EngineName = EngineName.local,
    actors: _Actors = None,
    device: _DeviceName = Device.auto,
    threads: _Threads = None,
) -> None:
    """Score pictures, whoever made them; of a run, write its report."""
    from vargen.evaluation.run_folder import RUN_FILE, RunFolder

    place = pick_device(device)
    path = expanded(folder, "folder")
    json_file = result_file(as_json, ".json", "json")
    run = RunFolder(path) if (path / RUN_FILE).is_file() else None
    model = "" if run is None else str(run.settings()["model"])
    instruments = _instruments(scorers, extractor, resize, keep_going, str(place), threads, model)
    chosen = _engine(engine, actors, place, threads)
    if run is not None:
        if prompts is not None or samples is not None or save_reference is not None:
            given = "--prompts" if prompts is not None else "--samples" if samples is not None else "--save-reference"
            raise ValueError(
                f"{given} is for a folder of pictures, and {str(folder)!r} is a run; name one of its images/ folders"
            )
        _score_run(run, instruments, _reference(reference, instruments, run.path / "measured"), chosen, as_json, json_file)
        return
    _score_folder(path, instruments, reference, prompts, as_json, json_file, samples, save_reference, chosen)


def evaluate(
    output: _Output,
    model: _Model = "emoji",
    methods: _Methods = None,
    num: _Num = None,
    prompts: _Prompts = None,
    classes: _Classes = None,
    batch: _Batch = 8,
    shard: _Shard = "1/1",
    scorers: _Scorers = None,
    extractor: _Extractor = None,
    reference: _Reference = None,
    resize: _Resize = None,
    engine: _EngineName = EngineName.local,
    actors: _Actors = None,
    seed: _Seed = 0,
    guidance_scale: Annotated[float | None, _Setting] = None,
    temperature: Annotated[float | None, _Setting] = None,
    top_k: Annotated[int | None, _Setting] = None,
    top_p: Annotated[float | None, _Setting] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the transformer; auto is the fastest here.")] = Dtype.auto,
    device: _DeviceName = Device.auto,
    threads: _Threads = None,
    as_json: _Json = None,
) -> None:
    """Draw pictures by several methods, score them, and say what each method saves and costs. `draw` and `score` in one.

    Writes metrics.json, metrics.csv, report.md, plot.png and sheets/ into DIR. Stopped in any way, the same command goes on.
    """
    sampling = _sampling(guidance_scale, temperature, top_k, top_p)
    part = _shard(shard)
    json_file = result_file(as_json, ".json", "json")
    place = pick_device(device)
    drawing = _drawing(output, model, methods, num, prompts, classes, batch, seed, sampling, dtype, str(place), threads)
    instruments = _instruments(scorers, extractor, resize, False, str(place), threads, model)
    chosen = _engine(engine, actors, place, threads)

    from vargen.evaluation.run_folder import RunFolder

    run = RunFolder(Path(drawing.output))
    drawing.check()
    # Before hours of drawing: weights that are missing, statistics of another extractor.
    statistics = _reference(reference, instruments, run.path / "measured")
    _draw(drawing, part, chosen)
    if part[1] > 1:
        missing = len(drawing.units(run.drawn()))
        if missing:
            say(f"shard {shard} is drawn; {missing} batches of others are not yet. When they are: vargen score {output}")
            return
    _score_run(run, instruments, statistics, chosen, as_json, json_file)


# -- what the verbs share --------------------------------------------------------------------------------------------------


def _sampling(*values: float | None) -> dict[str, Any]:
    names = ("guidance_scale", "temperature", "top_k", "top_p")
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


def _shard(text: str) -> tuple[int, int]:
    """Raises ValueError unless `text` is I/N with I from 1 to N."""
    own, slash, of = text.partition("/")
    if not slash or not own.isdecimal() or not of.isdecimal() or not 1 <= int(own) <= int(of) <= 100_000:
        raise ValueError(f"shard must be I/N with I from 1 to N, such as 1/2 and 2/2, got {shown(text)}")
    return int(own), int(of)


def _drawing(
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
    """All that decides the pictures, checked without reading a weight."""
    quiet_libraries()
    check_range(num, "num", 1)
    check_range(threads, "threads", 1)
    folder = expanded(output, "output")
    check_writable(folder, "output")

    import vargen.assets
    from vargen.evaluation.drawing import Drawing
    from vargen.evaluation.items import class_subjects, prompt_subjects
    from vargen.pipelines.registry import describe, pipeline_class
    from vargen.scoring.registry import split_specs

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
        subjects = prompt_subjects(read_prompts(file))
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


def _instruments(
    scorers: list[str] | None,
    extractor: str | None,
    resize: int | None,
    keep_going: bool,
    device: str,
    threads: int | None,
    model: str,
) -> Instruments:
    """What measures, each opened once, so that missing weights are told before anything else."""
    quiet_libraries()
    check_range(resize, "resize", 16)

    from vargen.evaluation.evaluate import default_scorer
    from vargen.evaluation.measuring import Instruments
    from vargen.scoring.registry import split_specs

    packaged = default_scorer(model) if model else None
    chosen = ([packaged] if packaged else []) if scorers is None else [s for s in split_specs(scorers) if s != "none"]
    network = packaged if extractor is None else None if extractor == "none" else extractor
    made = Instruments(tuple(chosen), network, False, resize, keep_going, device, threads)
    made.opened()
    return made


def _reference(path: Path | None, instruments: Instruments, kept: Path | None) -> Statistics | None:
    from vargen.evaluation.evaluate import default_reference, open_reference

    if path is None:
        found = default_reference(instruments.extractor)
        return None if found is None else open_reference(found, instruments)
    return open_reference(expanded(path, "reference"), instruments, kept)


def _engine(name: EngineName, actors: int | None, device: Any, threads: int | None) -> Engine:
    check_range(actors, "actors", 1)
    if name is EngineName.local:
        if actors is not None:
            raise ValueError("actors are of --engine ray; the local engine is one process, of which --shard makes several")
        from vargen.evaluation.drawing import locally

        return locally
    from vargen.evaluation.ray_engine import ray_engine

    return ray_engine(actors, device.type, threads)


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Progress with the time that is left; pictures of earlier runs count as done, not as fast."""
    with tqdm(desc=what, unit="picture", disable=None, leave=False, file=sys.stderr, dynamic_ncols=True) as bar:

        def show(done: int, total: int) -> None:
            if bar.total != total:
                bar.reset(total)
                bar.initial = bar.n = done
            bar.update(done - bar.n)

        yield show


def _draw(drawing: Drawing, part: tuple[int, int], engine: Engine) -> int:
    from vargen.evaluation.drawing import draw as run

    with _bar("drawing") as show:
        return run(drawing, *part, engine=engine, progress=show)


def _score_run(
    run: RunFolder,
    instruments: Instruments,
    reference: Statistics | None,
    engine: Engine,
    as_json: str | None,
    json_file: Path | None,
) -> None:
    from vargen.evaluation.evaluate import evaluate_run, write_all

    with _bar("measuring") as show:
        found = evaluate_run(run, instruments, reference, engine, show)

    def report() -> None:
        for name in write_all(run, found):
            if as_json != "-":
                print(run.path / name, flush=True)

    write_each([*_told(found, as_json, json_file), (f"report in {str(run.path)!r}", report)])


def _score_folder(
    path: Path,
    instruments: Instruments,
    reference: Path | None,
    prompts: Path | None,
    as_json: str | None,
    json_file: Path | None,
    samples: Path | None,
    save_reference: Path | None,
    engine: Engine,
) -> None:
    from vargen.evaluation.evaluate import evaluate_folder, export_samples, statistics_of
    from vargen.evaluation.features import Extractor
    from vargen.evaluation.measuring import folder_pictures

    outputs = {
        "samples": result_file(samples, ".npz", "samples"),
        "save_reference": result_file(save_reference, ".npz", "save_reference"),
    }
    check_apart({name: [file] for name, file in outputs.items()} | {"json": [json_file]}, {"reference": [reference]})
    pictures = folder_pictures(path, None if prompts is None else read_prompts(prompts))
    if not instruments.scorers and instruments.extractor is None and samples is None:
        raise ValueError("nothing to do: give --scorers, --extractor or --samples")
    statistics = _reference(reference, instruments, None)
    with _bar("measuring") as show:
        found = evaluate_folder(path.name, pictures, instruments, statistics, None, engine, show)
    writes = _told(found, as_json, json_file)
    if (file := outputs["save_reference"]) is not None:
        extractor = instruments.opened().get("extractor")
        if not isinstance(extractor, Extractor):
            raise ValueError("--save-reference needs --extractor")
        held = statistics_of(found.measured[path.name], extractor)
        writes.append((f"save_reference {str(file)!r}", lambda: held.write(file)))
    if (batch := outputs["samples"]) is not None:
        writes.append((f"samples {str(batch)!r}", lambda: export_samples(batch, pictures, instruments.resize)))
    write_each(writes)


def _told(found: Evaluation, as_json: str | None, json_file: Path | None) -> list[Write]:
    """The table, or JSON."""
    from vargen.evaluation.report import all_notes, document, table_rows

    heads, rows = table_rows(found.rows, found.baseline)
    lines = table(heads, rows, "<" + ">" * (len(heads) - 1)) + "\n"
    lines += "".join(f"note: {note}\n" for note in all_notes(found.rows))
    writes: list[Write] = [] if as_json == "-" else [("table", lambda: print(lines, flush=True))]
    return [*writes, *json_writes(as_json, json_file, document(found.rows, found.baseline, found.about))]
