"""`vargen compare` and `vargen eval` for video models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vargen.cli.bench import setup_device
from vargen.cli.console import print_status, progress_bar, table
from vargen.cli.inputs import packaged_prompts, read_prompts
from vargen.cli.options import Device, Dtype
from vargen.cli.outputs import OutputFile, validate_writable
from vargen.cli.results import ResultWriter, Write, save_image, write_json
from vargen.files import atomic_file

if TYPE_CHECKING:
    from vargen.evaluation.video import VideoComparison


@dataclass(frozen=True)
class VideoComparisonOptions:
    """Options of a comparison; see `vargen compare --help`.

    Attributes:
        scorers, extractor: what measures the finished videos; see `vargen eval --help`.
    """

    model: str
    methods: list[str] | None = None
    num_blocks: int | None = None
    tau: float | None = None
    scorer: str | None = None
    seed: int = 0
    scorers: list[str] | None = None
    extractor: str | None = None
    device: Device = Device.auto
    dtype: Dtype = Dtype.auto
    quantization: str | None = None


def select_video_methods(options: VideoComparisonOptions) -> dict[str, Any]:
    """Return the methods by name, the baseline first; by default all that the model supports, and its drafts alone."""
    from vargen.decoding import list_methods, resolve_method
    from vargen.evaluation.video import DRAFTS
    from vargen.pipelines.loading import inspect_model
    from vargen.specs import split_specs

    model = inspect_model(options.model)
    names = split_specs(options.methods or [])
    found = {name: DRAFTS if name == DRAFTS.name else resolve_method(name, model.paradigm) for name in (model.baseline, *names)}
    for method in () if names else (*list_methods(model.paradigm), DRAFTS):
        try:
            model.validate_method(method)
        except ValueError as error:
            print_status(f"{method.name} was left out: {error}")
            continue
        found[method.name] = method
    for method in found.values():
        model.validate_method(method)
    if options.tau is None:
        return found
    return {name: each.with_tau(options.tau) if each.threshold is not None else each for name, each in found.items()}


def run_video_comparison(options: VideoComparisonOptions, prompts: list[str]) -> VideoComparison:
    """Generate the videos and compare the methods."""
    from vargen.evaluation.features import load_extractor
    from vargen.evaluation.video import compare_video_methods
    from vargen.pipelines.loading import open_pipeline
    from vargen.scoring import open_scorer
    from vargen.specs import split_specs

    methods = select_video_methods(options)
    place, kind, _ = setup_device(options.device, options.dtype, None, [options.model], options.quantization)
    scorers = [name for name in split_specs(options.scorers or []) if name != "none"]
    if len(scorers) > 1:
        raise ValueError(f"scorers must be at most one for video, got {', '.join(scorers)}")
    scorer = open_scorer(scorers[0], place) if scorers else None
    extractor = None if options.extractor in (None, "none") else load_extractor(str(options.extractor), place)
    pipe: Any = open_pipeline(options.model, device=place, torch_dtype=kind, quantization=options.quantization)
    for method in methods.values():
        pipe.validate_method(method)
    call = {} if options.scorer is None else {"scorer": pipe.resolve_frame_scorer(options.scorer)}
    with progress_bar("videos") as show:
        return compare_video_methods(
            pipe, prompts, methods, num_blocks=options.num_blocks, seed=options.seed, scorer=scorer, extractor=extractor,
            options=call, progress=show,
        )  # fmt: skip


def compare_and_write(
    options: VideoComparisonOptions, prompts: list[str], strips_file: OutputFile, results: ResultWriter
) -> VideoComparison:
    """Compare the methods, and write the table, the frame strips and the other requested outputs."""
    found = run_video_comparison(options, prompts)
    results.write(comparison_text(found), found.to_dict(), [_strips(found, strips_file, results)])
    return found


def evaluate_videos(
    options: VideoComparisonOptions,
    folder: Path,
    prompt_file: Path | None,
    num_videos: int | None,
    threads: int | None,
    results: ResultWriter,
) -> None:
    """Compare methods, and write metrics.json, report.md and strips.png to a folder."""
    from vargen.device import set_threads
    from vargen.evaluation.report import video_to_markdown

    validate_writable(folder, "output")
    set_threads(threads)
    prompts = read_prompts(prompt_file or packaged_prompts())
    found = run_video_comparison(options, [prompts[k % len(prompts)] for k in range(num_videos or len(prompts))])
    folder.mkdir(parents=True, exist_ok=True)

    def write_report() -> None:
        with atomic_file(folder / "report.md") as temporary:
            temporary.write_text(video_to_markdown(found, describe_setup(found)), "utf-8")

    metrics = folder / "metrics.json"
    others = [
        _strips(found, OutputFile(folder / "strips.png", explicit=True), results),
        (f"json {str(metrics)!r}", lambda: write_json(metrics, found.to_dict())),
        (f"report in {str(folder)!r}", write_report),
    ]
    results.write(comparison_text(found), found.to_dict(), others)


def _strips(comparison: VideoComparison, file: OutputFile, results: ResultWriter) -> Write:
    from vargen.evaluation.contact_sheets import frame_strips

    def save() -> None:
        parameters = {"methods": list(comparison.frames), "seed": comparison.seed}
        results.print_path(save_image(frame_strips(comparison), file, parameters))

    return f"output {str(file.path)!r}", save


def describe_setup(comparison: VideoComparison) -> str:
    """Describe the machine and the seeds in one line."""
    from vargen.device import describe_machine

    machine = describe_machine()
    return f"{machine['cpu']}, {machine['threads']} CPU threads, torch {machine['torch']}; seeds from {comparison.seed}"


def comparison_text(comparison: VideoComparison) -> str:
    """Format the comparison as a table for the terminal."""
    from vargen.evaluation.report import VIDEO_COLUMNS, table_cells

    head = f"{len(comparison.prompts)} videos of {comparison.blocks} blocks, scored by {comparison.scorer}\n\n"
    heads, rows = table_cells(VIDEO_COLUMNS, comparison.methods)
    return head + table(heads, rows, "<<" + ">" * (len(heads) - 2))
