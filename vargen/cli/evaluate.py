"""`vargen eval`, and its two parts `draw` and `score`: what methods save, and what they cost in quality."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vargen.cli.compare_video import VideoSetting, evaluate_videos
from vargen.cli.console import say, table
from vargen.cli.evaluation_options import (
    EngineName,
    bar,
    find_reference,
    make_drawing,
    make_instruments,
    pick_engine,
    read_sampling,
    read_shard,
)
from vargen.cli.generate_video import check_picture_options
from vargen.cli.inputs import read_prompts
from vargen.cli.options import Device, Dtype, check_range, makes_video, parse_integer, select_device
from vargen.cli.outputs import Write, json_writes, result_file, write_each
from vargen.cli.run_outputs import check_run_outputs
from vargen.files import expand_user

if TYPE_CHECKING:
    from vargen.evaluation.evaluate import Evaluation
    from vargen.evaluation.generation import Drawing, Engine
    from vargen.evaluation.measurement import Instruments
    from vargen.evaluation.reference_statistics import Statistics
    from vargen.evaluation.run_directory import RunFolder


_Model = Annotated[str, typer.Option(metavar="NAME|DIR|HUB ID", help="A packaged model, a folder, or a hub id.")]
_Methods = Annotated[
    list[str] | None,
    typer.Option(metavar="PRESET,...", help="Presets, with settings as in gsd:budget=5. Default: the baseline alone."),
]
_Num = Annotated[int | None, typer.Option(metavar="N", help="Pictures of each method. Default: one per prompt or class.")]
_Output = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Of the run; one found there goes on.")]
_Prompts = Annotated[
    Path | None, typer.Option(metavar="FILE|-", help="One a line, drawn in turn. Default, for text: the packaged 64.")
]
_Classes = Annotated[
    str | None,
    typer.Option(metavar="each|random|N,...", help="All in turn (default), uniformly random, or those numbers and names."),
]
_Batch = Annotated[int, typer.Option(metavar="N", help="Pictures at once.")]
_Shard = Annotated[str, typer.Option(metavar="I/N", help="Draw the I-th of N parts, I from 1, beside other processes.")]
_EngineName = Annotated[EngineName, typer.Option(help="ray: several processes or machines (extra ray).")]
_Actors = Annotated[int | None, typer.Option(metavar="N", help="Processes of ray. Default: one per GPU, or core.")]
_Seed = Annotated[int, typer.Option(parser=parse_integer, metavar="N", help="Of picture 0; the next has seed + 1.")]
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
    """Generate the images of an evaluation. Run the same command again to resume an interrupted run.

    Image k has the seed --seed + k, regardless of batch, shard and engine.
    """
    sampling = read_sampling(guidance_scale, temperature, top_k, top_p)
    part = read_shard(shard)
    place = select_device(device)
    drawing = make_drawing(output, model, methods, num, prompts, classes, batch, seed, sampling, dtype, str(place), threads)
    drawn = _draw(drawing, part, pick_engine(engine, actors, place, threads))
    say(f"{drawn} pictures drawn; score them with: vargen score {output}")


def score(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR|FILE", help="A run of vargen, a folder of pictures, or samples: .npz, .npy.")
    ],
    scorers: _Scorers = None,
    extractor: _Extractor = None,
    reference: _Reference = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE|-", help="Of a folder: one a line, in the order of the files' names.")
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
    reference_features: Annotated[
        int | None,
        typer.Option(metavar="N", help="Keep features of N pictures in it, rounded: a small file. Default: of all, exactly."),
    ] = None,
    engine: _EngineName = EngineName.local,
    actors: _Actors = None,
    device: _DeviceName = Device.auto,
    threads: _Threads = None,
) -> None:
    """Score images from any source; for a run, write its report."""
    from vargen.evaluation.run_directory import RUN_FILE, RunFolder

    place = select_device(device)
    path = expand_user(folder, "folder")
    check_range(reference_features, "reference_features", 0)
    outputs = {
        "json": result_file(as_json, ".json", "json"),
        "samples": result_file(samples, ".npz", "samples"),
        "save_reference": result_file(save_reference, ".npz", "save_reference"),
    }
    check_run_outputs(outputs, {"folder": path, "prompts": prompts, "reference": reference}, "")
    run = RunFolder(path) if (path / RUN_FILE).is_file() else None
    model = "" if run is None else str(run.settings()["model"])
    instruments = make_instruments(scorers, extractor, resize, keep_going, str(place), threads, model)
    chosen = pick_engine(engine, actors, place, threads)
    if run is not None:
        if prompts is not None or samples is not None or save_reference is not None:
            given = "--prompts" if prompts is not None else "--samples" if samples is not None else "--save-reference"
            raise ValueError(
                f"{given} is for a folder of pictures, and {str(folder)!r} is a run; name one of its images/ folders"
            )
        statistics = find_reference(reference, instruments, run.path / "measured")
        _score_run(run, instruments, statistics, chosen, as_json, outputs["json"])
        return
    _score_folder(path, instruments, reference, prompts, as_json, outputs, reference_features, chosen)


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
    """Generate images with several methods, score them, and report what each method saves and costs: `draw` and `score` in one.

    Writes metrics.json, metrics.csv, report.md, plot.png and sheets/ to DIR. Run the same command again to resume an
    interrupted run.
    """
    sampling = read_sampling(guidance_scale, temperature, top_k, top_p)
    part = read_shard(shard)
    json_file = result_file(as_json, ".json", "json")
    check_run_outputs({"json": json_file}, {"prompts": prompts, "reference": reference}, model, expand_user(output, "output"))
    if makes_video(model):
        check_picture_options(classes=classes, resize=resize, reference=reference, shard=part[1] > 1, **sampling)
        setting = VideoSetting(model, methods, seed=seed, judges=scorers, extractor=extractor)
        evaluate_videos(setting, output, prompts, num, device, dtype, threads, as_json, json_file)
        return
    place = select_device(device)
    drawing = make_drawing(output, model, methods, num, prompts, classes, batch, seed, sampling, dtype, str(place), threads)
    drawing.check()
    instruments = make_instruments(scorers, extractor, resize, False, str(place), threads, model)
    chosen = pick_engine(engine, actors, place, threads)

    from vargen.evaluation.run_directory import RunFolder

    run = RunFolder(Path(drawing.output))
    # Checked before hours of generation: missing weights, and statistics of another extractor.
    statistics = find_reference(reference, instruments, run.path / "measured")
    _draw(drawing, part, chosen)
    if part[1] > 1:
        missing = len(drawing.units(run.drawn()))
        if missing:
            say(f"shard {shard} is drawn; {missing} batches of others are not yet. When they are: vargen score {output}")
            return
    _score_run(run, instruments, statistics, chosen, as_json, json_file)


def _draw(drawing: Drawing, part: tuple[int, int], engine: Engine) -> int:
    from vargen.evaluation.generation import draw as run

    with bar("drawing") as show:
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

    with bar("measuring") as show:
        found = evaluate_run(run, instruments, reference, engine, show)

    if not instruments.scorers and instruments.extractor is None:
        say("speed and drift alone were measured: give --scorers and --extractor for quality, of the same pictures")

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
    outputs: dict[str, Path | None],
    reference_features: int | None,
    engine: Engine,
) -> None:
    from vargen.evaluation.evaluate import evaluate_folder, evaluate_samples, export_samples, statistics_of
    from vargen.evaluation.features import Extractor
    from vargen.evaluation.image_files import folder_pictures

    samples = outputs["samples"]
    idle = not instruments.scorers and instruments.extractor is None and samples is None
    if path.is_file():
        if prompts is not None or samples is not None:
            raise ValueError(f"--prompts and --samples are for a folder of pictures, and {str(path)!r} is a file")
        pictures = []
        found = evaluate_samples(path, instruments, find_reference(reference, instruments, None))
    else:
        pictures = folder_pictures(path, None if prompts is None else read_prompts(prompts, "prompts"))
        if idle:
            raise ValueError("nothing to do: give --scorers, --extractor or --samples")
        statistics = find_reference(reference, instruments, None)
        with bar("measuring") as show:
            found = evaluate_folder(path.name, pictures, instruments, statistics, None, engine, show)
    writes = _told(found, as_json, outputs["json"])
    if (file := outputs["save_reference"]) is not None:
        extractor = instruments.opened().get("extractor")
        if not isinstance(extractor, Extractor):
            raise ValueError("--save-reference needs --extractor")
        held = statistics_of(found.measured[path.name], extractor)
        compact = reference_features is not None
        small = held if reference_features is None else held.with_features(reference_features)
        writes.append((f"save_reference {str(file)!r}", lambda: small.write(file, compact)))
    if samples is not None:
        writes.append((f"samples {str(samples)!r}", lambda: export_samples(samples, pictures, instruments.resize)))
    write_each(writes)


def _told(found: Evaluation, as_json: str | None, json_file: Path | None) -> list[Write]:
    """Return the writes of the table, or of JSON."""
    from vargen.evaluation.report import all_notes, document, table_rows

    heads, rows = table_rows(found.rows, found.baseline)
    lines = table(heads, rows, "<" + ">" * (len(heads) - 1)) + "\n"
    lines += "".join(f"note: {note}\n" for note in all_notes(found.rows))
    writes: list[Write] = [] if as_json == "-" else [("table", lambda: print(lines, flush=True))]
    return [*writes, *json_writes(as_json, json_file, document(found.rows, found.baseline, found.about))]
