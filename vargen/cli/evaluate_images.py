"""`vargen eval --images`: score images from any source, or write the report of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vargen.cli.console import print_status, progress_bar, table
from vargen.cli.inputs import read_prompts
from vargen.cli.options import reject_options
from vargen.cli.outputs import result_file, validate_run_outputs
from vargen.cli.results import ResultWriter, Write
from vargen.files import expand_user
from vargen.values import short_repr

if TYPE_CHECKING:
    from vargen.evaluation.evaluate import EvaluationResult
    from vargen.evaluation.generation import Backend as RunBackend
    from vargen.evaluation.image_files import ImageFile
    from vargen.evaluation.measurement import MetricModels
    from vargen.evaluation.reference_statistics import FeatureStatistics
    from vargen.evaluation.run_directory import RunDirectory

_MAX_SIDE = 2048  # pixels; several copies of a chunk of 64 such images fit in memory

Scorers = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME,...",
        help="emoji-scorer; clip:model=ViT-L-14,weights=FILE; image-reward:weights=FILE; module:function; or none. "
        "Default: the packaged scorer of the model of a run; a folder of other images has none.",
    ),
]
Extractor = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Network whose features distances compare: inception:weights=FILE, clip:model=NAME,weights=FILE, the name of a "
        "scorer, module:function, or none. Default: the packaged scorer of the model of a run.",
    ),
]
Reference = Annotated[
    Path | None,
    typer.Option(metavar="FILE.npz|DIR", help="Real images: statistics or samples in ADM's layout, or a folder of images."),
]
Resize = Annotated[
    int | None,
    typer.Option(
        min=16, max=_MAX_SIDE, metavar="N", help="Crop images to their center square and resize it to N x N (bicubic) first."
    ),
]


def load_metrics(
    model: str,
    scorers: list[str] | None,
    extractor: str | None,
    resize: int | None,
    skip_unreadable: bool = False,
    *,
    device: str,
    threads: int | None,
) -> MetricModels:
    """Load each scorer and extractor once, so that missing weights are reported before anything else.

    Args:
        model: provides the default scorer and extractor; empty for none.
    """
    from vargen.evaluation.measurement import MetricModels
    from vargen.scoring import default_scorer
    from vargen.specs import split_specs

    packaged = default_scorer(model) if model else None
    names = ([packaged] if packaged else []) if scorers is None else split_specs(scorers)
    network = packaged if extractor is None else None if extractor == "none" else extractor
    named = tuple(name for name in names if name != "none")
    loaded = MetricModels(named, network, False, resize, skip_unreadable, device, threads)
    loaded.load()
    return loaded


@dataclass(frozen=True)
class ImageFiles:
    """Images from any source and what to write of them; see `vargen eval --help`.

    Attributes:
        folder: of a run, of images, or a file of samples.
    """

    folder: Path
    prompt_file: Path | None
    reference: Path | None
    export_samples: Path | None
    save_reference: Path | None
    reference_features: int | None

    def check(self, results: ResultWriter) -> ImageFiles:
        """Return it with expanded names. Raises ValueError for outputs that cannot be written or would overwrite an input."""
        found = replace(
            self,
            folder=expand_user(self.folder, "images"),
            export_samples=result_file(self.export_samples, ".npz", "export_samples"),
            save_reference=result_file(self.save_reference, ".npz", "save_reference"),
        )
        outputs = {
            "json": results.json_file,
            "export_samples": found.export_samples,
            "save_reference": found.save_reference,
        }
        inputs = {"images": found.folder, "prompt_file": self.prompt_file, "reference": self.reference}
        validate_run_outputs(outputs, inputs, "")
        return found

    @property
    def run(self) -> RunDirectory | None:
        """The run of `vargen eval` in the folder, if there is one."""
        from vargen.evaluation.run_directory import RUN_FILE, RunDirectory

        return RunDirectory(self.folder) if (self.folder / RUN_FILE).is_file() else None


def evaluate_images(files: ImageFiles, metrics: MetricModels, run_on: RunBackend, results: ResultWriter) -> None:
    """Score images from any source. For a run of `vargen eval`, its report is written."""
    from vargen.evaluation.evaluate import evaluate_folder, evaluate_samples, export_adm_samples
    from vargen.evaluation.image_files import list_images
    from vargen.evaluation.run_directory import MEASUREMENTS

    path, prompt_file, reference = files.folder, files.prompt_file, files.reference
    samples_file, reference_file = files.export_samples, files.save_reference
    for_folders = {"prompt_file": prompt_file, "export_samples": samples_file}
    if (run := files.run) is not None:
        where = f"{str(path)!r} is a run; name one of its images/ folders"
        reject_options(f"is for a folder of images, and {where}", save_reference=reference_file, **for_folders)
        score_run(run, metrics, load_reference_or_default(reference, metrics, path / MEASUREMENTS), run_on, results)
        return
    others: list[Write] = []
    if path.is_file():
        reject_options(f"is for a folder of images, and {str(path)!r} is a file", **for_folders)
        found = evaluate_samples(path, metrics, load_reference_or_default(reference, metrics, None))
    else:
        images = list_images(path, None if prompt_file is None else read_prompts(prompt_file))
        if prompt_file is not None:
            print_status(f"prompts by natural order of file names: {_describe_matching(images)}")
        if not metrics.scorers and metrics.extractor is None and samples_file is None:
            raise ValueError("nothing to do: give --scorers, such as emoji-scorer, --extractor or --export-samples")
        statistics = load_reference_or_default(reference, metrics, None)
        with progress_bar("scoring", "images") as show:
            found = evaluate_folder(path.name, images, metrics, statistics, None, run_on, show)
        if (file := samples_file) is not None:
            others.append((f"export_samples {str(file)!r}", lambda: export_adm_samples(file, images, metrics.resize)))
    if reference_file is not None:
        others.insert(0, _statistics_write(found, path.name, reference_file, files.reference_features, metrics))
    results.write(*_describe(found), others)


def _describe_matching(images: Sequence[ImageFile]) -> str:
    """Return the first and the last image with their prompts, so that a wrong order is noticed."""
    ends = images[:1] if len(images) == 1 else (images[0], images[-1])
    return ", ...; ".join(f"{short_repr(Path(image.file).name)} is {short_repr(image.text)}" for image in ends)


def _statistics_write(found: EvaluationResult, name: str, file: Path, num_features: int | None, metrics: MetricModels) -> Write:
    """Return the write of a folder's statistics, for use as a reference."""
    from vargen.evaluation.evaluate import statistics_of
    from vargen.evaluation.features import Extractor

    extractor = metrics.load().get("extractor")
    if not isinstance(extractor, Extractor):
        raise ValueError("save_reference needs --extractor")
    statistics = statistics_of(found.measured[name], extractor)
    if num_features is not None:
        statistics = statistics.subsample_features(num_features)
    return f"save_reference {str(file)!r}", lambda: statistics.write(file, num_features is not None)


def score_run(
    run: RunDirectory, metrics: MetricModels, reference: FeatureStatistics | None, backend: RunBackend, results: ResultWriter
) -> None:
    """Score the images of a run, and write its report, plot and images."""
    from vargen.evaluation.evaluate import evaluate_run, write_report_files

    with progress_bar("scoring", "images") as show:
        found = evaluate_run(run, metrics, reference, backend, show)
    if not metrics.scorers and metrics.extractor is None:
        print_status("only speed and similarity to the baseline were measured: give --scorers and --extractor for quality")

    def write_report() -> None:
        for name in write_report_files(run, found):
            results.print_path(run.path / name)

    results.write(*_describe(found), [(f"report in {str(run.path)!r}", write_report)])


def load_reference_or_default(path: Path | None, metrics: MetricModels, cache: Path | None) -> FeatureStatistics | None:
    """Load the reference of --reference; by default the packaged one of the extractor, if there is one."""
    from vargen.evaluation.evaluate import default_reference, load_reference

    if path is not None:
        return load_reference(expand_user(path, "reference"), metrics, cache)
    found = default_reference(metrics.extractor)
    return None if found is None else load_reference(found, metrics)


def _describe(found: EvaluationResult) -> tuple[str, dict[str, object]]:
    """Return the results as a table for the terminal, and as a JSON document."""
    from vargen.evaluation.report import group_notes, image_columns, table_cells, to_json

    heads, rows = table_cells(image_columns(found.rows, found.baseline), found.rows)
    lines = table(heads, rows, "<" + ">" * (len(heads) - 1)) + "\n"
    lines += "".join(f"note: {note}\n" for note in group_notes(found.rows))
    return lines, to_json(found.rows, found.baseline, found.about)
