"""`vargen compare` and `vargen eval` for video models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vargen.cli.console import say, table
from vargen.cli.inputs import MOST_PICTURES, read_prompts
from vargen.cli.options import Device, Dtype, check_range
from vargen.cli.outputs import Target, Write, check_writable, json_writes, save_image, write_each
from vargen.files import atomic_file, expand_user

if TYPE_CHECKING:
    from vargen.evaluation.video import VideoComparison


@dataclass(frozen=True)
class VideoSetting:
    """Settings of a comparison; see `vargen compare --help`, and `vargen eval --help` for `judges` and `extractor`."""

    model: str
    methods: list[str] | None = None
    num_blocks: int | None = None
    tau: float | None = None
    scorer: str | None = None
    seed: int = 0
    judges: list[str] | None = None
    extractor: str | None = None


def chosen_methods(setting: VideoSetting) -> dict[str, Any]:
    """Return the methods by name, the baseline first; by default all that the model supports.

    Raises:
        ValueError: for a method that is unknown or that the model does not support.
    """
    from vargen.decoding import list_methods, resolve_method
    from vargen.pipelines.registry import describe, pipeline_class
    from vargen.specs import split_specs

    described = describe(setting.model)
    kind = pipeline_class(described.pipeline)
    names = split_specs(setting.methods or [])
    found = {name: resolve_method(name, kind.paradigm) for name in (kind.baseline, *names)}
    for method in () if names else list_methods(kind.paradigm):
        try:
            kind.check_method(described, method)
        except ValueError as error:
            say(f"{method.name} is left out: {error}")
            continue
        found[method.name] = method
    for method in found.values():
        kind.check_method(described, method)
    if setting.tau is None:
        return found
    return {name: each.with_tau(setting.tau) if each.threshold is not None else each for name, each in found.items()}


def compared(setting: VideoSetting, prompts: list[str], device: Device, dtype: Dtype) -> VideoComparison:
    """Generate the videos and compare the methods.

    Raises:
        ValueError: for unknown methods, scorers or extractors, before any weight of the model is read.
    """
    from vargen.cli.bench import prepare
    from vargen.cli.evaluation_options import bar
    from vargen.evaluation.features import open_extractor
    from vargen.evaluation.video import compare_videos
    from vargen.pipelines.registry import open_pipeline
    from vargen.scoring.registry import open_scorer
    from vargen.specs import split_specs

    check_range(setting.num_blocks, "num_blocks", 1)
    methods = chosen_methods(setting)
    place, kind, _ = prepare(device, dtype, None, [setting.model])
    judges = [name for name in split_specs(setting.judges or []) if name != "none"]
    if len(judges) > 1:
        raise ValueError(f"scorers must be one, of video, got {', '.join(judges)}")
    judge = open_scorer(judges[0], place) if judges else None
    extractor = None if setting.extractor in (None, "none") else open_extractor(str(setting.extractor), place)
    pipe: Any = open_pipeline(setting.model, torch_dtype=kind).to(place)
    for method in methods.values():
        pipe.check_runs(method)
    options = {} if setting.scorer is None else {"scorer": pipe.resolve_frame_scorer(setting.scorer)}
    with bar("videos") as show:
        return compare_videos(
            pipe, prompts, methods, num_blocks=setting.num_blocks, seed=setting.seed, judge=judge, extractor=extractor,
            options=options, progress=show,
        )  # fmt: skip


def head_line(comparison: VideoComparison) -> str:
    """Describe the setup of the measurement in one line."""
    from vargen.evaluation.machine import describe_machine

    machine = describe_machine()
    return f"{machine['cpu']}, {machine['threads']} CPU threads, torch {machine['torch']}; seeds from {comparison.seed}"


def comparison_text(comparison: VideoComparison) -> str:
    """Format the comparison as a table for the terminal."""
    from vargen.evaluation.video_report import HEAD, table_rows

    head = f"{len(comparison.prompts)} videos of {comparison.blocks} blocks, scored by {comparison.scorer}\n\n"
    return head + table(HEAD, table_rows(comparison), "<<" + ">" * (len(HEAD) - 2))


def video_writes(
    comparison: VideoComparison, place: Target, as_json: str | None, json_file: Path | None, plot_file: Path | None
) -> list[Write]:
    """Return the writes of the table, the frame strips and the other requested outputs."""
    from vargen.evaluation.video_report import plot_comparison, strips

    def save_strips() -> None:
        path = save_image(strips(comparison), place, {"methods": list(comparison.frames), "seed": comparison.seed})
        if as_json != "-":
            print(path, flush=True)

    writes: list[Write] = [] if as_json == "-" else [("table", lambda: print(comparison_text(comparison), flush=True))]
    writes += [*json_writes(as_json, json_file, comparison.to_dict()), (f"output {str(place.path)!r}", save_strips)]
    if plot_file:
        writes.append((f"plot {str(plot_file)!r}", lambda: plot_comparison(comparison, plot_file)))
    return writes


def evaluate_videos(
    setting: VideoSetting,
    output: Path,
    prompt_file: Path | None,
    num: int | None,
    device: Device,
    dtype: Dtype,
    threads: int | None,
    as_json: str | None,
    json_file: Path | None,
) -> None:
    """Compare methods, and write metrics.json, report.md and strips.png to the folder `output`."""
    import vargen.assets
    from vargen.device import set_threads
    from vargen.evaluation.video_report import markdown

    folder = expand_user(output, "output")
    check_writable(folder, "output")
    check_range(num, "num", 1, MOST_PICTURES)
    set_threads(threads)
    prompts = read_prompts(prompt_file or Path(vargen.assets.__file__).parent / "prompts.txt", "prompts")
    asked = [prompts[number % len(prompts)] for number in range(num or len(prompts))]
    found = compared(setting, asked, device, dtype)
    folder.mkdir(parents=True, exist_ok=True)

    def report() -> None:
        with atomic_file(folder / "report.md") as temporary:
            temporary.write_text(markdown(found, head_line(found)), "utf-8")

    writes = video_writes(found, Target(folder / "strips.png", named=True), as_json, json_file, None)
    writes += json_writes("file", folder / "metrics.json", found.to_dict())
    write_each([*writes, (f"report in {str(folder)!r}", report)])
