"""`vargen check`: what vargen promises, tested with a model's real weights, on one page that can be attached to an issue."""

from __future__ import annotations

import hashlib
import json
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vargen import __version__
from vargen.cli import common, inputs
from vargen.cli.common import OutputFile
from vargen.cli.console import print_status, progress_bar, table, to_json

if TYPE_CHECKING:
    from vargen.pipelines.base import VisualPipeline
    from vargen.verify.model_check import ModelCheck

FILES = ("report.md", "report.json", "images.png")
_SUBJECTS, _FRAMES = 8, 8  # prompts or classes, and frames of a row of images
_PACKAGES = ("torch", "transformers", "diffusers", "safetensors", "numba", "triton")
_HASHED_PER_SECOND = 4e8  # bytes, of a slow disk
# An absolute path: its folders are left out. Addresses, and slashes within words, are none.
_FOLDERS = re.compile(r"(?<![\w/.:~])(?:[A-Za-z]:)?[/\\](?:[^\s/\\'\"`|]+[/\\]+)+")


def check(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A packaged model, a folder, or a hub id.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Folder of report.md and its images. Default: check-NAME."),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.05, max=1440, metavar="M", help="Limit of all checks, after the model is open.")
    ] = 10.0,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="One prompt per line, of which eight are used. Default: packaged ones."),
    ] = None,
    seed: common.Seed = 0,
    dtype: common.Dtype = "auto",
    device: common.Device = "auto",
    threads: common.Threads = None,
) -> None:
    """Check a model with its real weights.

    Compares tokens with those of plain loops and of the model's own generate, methods with one another, and int8 with the
    model's dtype; measures passes. Writes a page without paths and names of users, to attach to an issue. Exits with 1 if
    something that is promised, in float32 or int8, is not equal.
    """
    title = common.title_of(model)
    folder = output or Path(f"check-{common.slugify(title)}")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output must be a folder, got the file {str(folder)!r}")
    common.validate_writable(folder)
    common.check_outputs(ctx.params | {"output": None}, {"output": [OutputFile(folder / name) for name in FILES]})
    prompts = inputs.read_prompts(prompt_file)[:_SUBJECTS] if prompt_file else None
    inspected = common.inspect(ctx, model)
    if inspected.is_class_conditional and prompts:
        raise ValueError("prompt_file must be left out: this model generates classes")
    machine, about = common.loading(ctx, inspected.folder), common.machine_for_timing()
    from vargen.pipelines.loading import open_pipeline
    from vargen.verify.model_check import ModelCheck

    arguments = {name: value for name, value in machine.items() if name != "quantization"}
    pipe: Any = open_pipeline(inspected.folder, **arguments)
    found, begun = ModelCheck(pipe, select_subjects(pipe, prompts), seed, minutes), time.monotonic()
    head = describe_run(ctx, title, pipe, found, about, machine["device"])
    try:
        with progress_bar("checking", "%") as show:
            found.run(show)
    except KeyboardInterrupt:
        found.notes.append("the run was interrupted, so that later checks are missing")
        write_report(folder, pipe, found, head, begun)
        raise
    write_report(folder, pipe, found, head, begun)
    print(table(["check", "result", "details"], [[each.name, each.result, each.text] for each in found.findings], "<<<"))
    print(folder / FILES[0], flush=True)
    if any(each.is_failure for each in found.findings):
        print_status("something that is promised is not equal, or failed: please attach the folder to an issue")
        raise typer.Exit(1)


def select_subjects(pipe: VisualPipeline, prompts: list[str] | None) -> list[Any]:
    """Return prompts, or as many classes from all over their numbers."""
    if pipe.is_class_conditional:
        count = min(_SUBJECTS, pipe.num_classes)
        return [number * pipe.num_classes // count for number in range(count)]
    return prompts or inputs.read_prompts(None)[:_SUBJECTS]


def describe_run(
    ctx: typer.Context, title: str, pipe: Any, found: ModelCheck, machine: dict[str, Any], device: Any
) -> dict[str, Any]:
    """Return what was checked where, with what: without folders."""
    from vargen.compat import installed_version
    from vargen.device import describe_place

    options = common.chosen(ctx, "minutes", "prompt_file", "seed", "dtype", "device", "threads")
    shown = {
        name: f"{value:g}" if isinstance(value, float) else getattr(value, "name", value) for name, value in options.items()
    }
    words = [f"--{name.replace('_', '-')} {value}" for name, value in shown.items()]
    versions = {name: version for name in _PACKAGES if (version := installed_version(name)) is not None}
    return {
        "model": title,
        "class": type(pipe.transformer).__name__,
        "dtype": found.dtype,
        "command": " ".join(["vargen check", title, *words]),
        "date": time.strftime("%Y-%m-%d"),
        "place": describe_place(device),
        "machine": machine,
        "versions": {"vargen": __version__, **versions, "python": machine["python"]},
        "subjects": [str(each) for each in found.subjects],
        "seed": found.seed,
        "weights": digest_weights(pipe.folder, 0.1 * (found.end - time.monotonic())),
    }


def digest_weights(folder: Path, seconds: float) -> dict[str, str]:
    """Return the SHA-256 of each weight file by name, as the hub lists them; only sizes if that would take longer."""
    files = [file for file in sorted(folder.rglob("*.safetensors")) if file.is_file()]
    sizes = {file: file.stat().st_size for file in files}
    if sum(sizes.values()) > seconds * _HASHED_PER_SECOND:
        return {file.relative_to(folder).as_posix(): f"{size:,} bytes, no digest" for file, size in sizes.items()}
    found = {}
    for file in files:
        with open(file, "rb") as opened:
            found[file.relative_to(folder).as_posix()] = hashlib.file_digest(opened, "sha256").hexdigest()
    return found


def remove_folders(text: str) -> str:
    """Return a text without the folders of its absolute paths, which may contain the name of a user."""
    for place, short in ((Path.cwd(), "."), (Path.home(), "~")):
        text = text.replace(str(place), short) if len(str(place)) > 1 else text
    return _FOLDERS.sub("", text)


def write_report(folder: Path, pipe: Any, found: ModelCheck, head: dict[str, Any], begun: float) -> None:
    """Write the page, its figures and its images."""
    folder.mkdir(parents=True, exist_ok=True)
    head = {**head, "seconds": round(time.monotonic() - begun, 1)}
    try:
        has_images = save_images(folder / FILES[2], pipe, found)
    except Exception as error:
        found.notes.append(f"images: {type(error).__name__}: {error}")
        has_images = False
    if not has_images:
        (folder / FILES[2]).unlink(missing_ok=True)  # of an earlier run
    milliseconds = {str(width): value for width, value in found.milliseconds.items()}
    results = {name: [asdict(each) for each in getattr(found, name)] for name in ("findings", "methods")}
    document = {**head, **results, "milliseconds": milliseconds, "notes": found.notes}
    document = json.loads(json.dumps(document), parse_constant=str)  # JSON has no NaN, which a broken model may return
    common.write_text(folder / FILES[1], remove_folders(to_json(document)) + "\n")
    common.write_text(folder / FILES[0], remove_folders("\n".join(format_page(found, head, has_images))) + "\n")


def save_images(file: Path, pipe: Any, found: ModelCheck) -> bool:
    """Write the images of all methods, or frames of their first videos; returns whether there are any."""
    import numpy as np
    from PIL import Image

    from vargen.eval.contact_sheets import labeled_grid, method_grid

    if found.frames:
        last = len(next(iter(found.frames.values()))) - 1
        numbers = np.linspace(0, last, min(_FRAMES, last + 1)).round().astype(int)
        images = [Image.fromarray(frames[number]) for frames in found.frames.values() for number in numbers]
        captions = [f"frame {number}" for number in numbers] * len(found.frames)
        sheet = labeled_grid([(name,) for name in found.frames], images, captions)
    elif found.comparison is None:
        return False
    elif not pipe.makes_images:
        found.notes.append("images: another pipeline decodes the tokens of this model")
        return False
    elif next(iter(found.comparison.tokens.values())).shape[1] < pipe.num_tokens:
        found.notes.append("images: none was finished, because of --minutes")
        return False
    else:
        sheet = method_grid(pipe, found.comparison)
    common.save_image(sheet, OutputFile(file), {"model": type(pipe.transformer).__name__, "seed": found.seed})
    return True


def format_page(found: ModelCheck, head: dict[str, Any], has_images: bool) -> list[str]:
    """Return the lines of the page."""
    from vargen.eval.report import format_table

    results = [[each.name, f"**{each.result}**" if each.is_failure else each.result, each.text] for each in found.findings]
    lines = [f"# Check of {head['model']}", ""]
    facts = [("command", f"`{head['command']}`"), ("model", f"{head['class']}, {head['dtype']}"), ("machine", head["place"]),
             ("versions", ", ".join(f"{name} {version}" for name, version in head["versions"].items())),
             ("system", f"{head['machine']['system']}, CPU threads: {head['machine']['threads']}"),
             ("date", f"{head['date']}, {head['seconds']:.0f} s")]  # fmt: skip
    lines += [f"- {name}: {value}" for name, value in facts]
    lines += ["", "## Results", "", *format_table(["check", "result", "details"], results), ""]
    promise = "Equality is promised in this dtype." if found.is_promised else f"In {head['dtype']}, equality is not promised."
    lines += [f"{promise} A tie is a difference between tokens whose logits are equal within rounding."]
    if found.methods:
        lines += ["", "## Methods", "", "Means or medians, one image or video at a time.", "", *format_methods(found)]
    if has_images:
        shown = f"Frames of the first video, {head['subjects'][0]!r}: " if found.frames else ""
        lines += ["", "## Images", "", f"{shown}![images by method]({FILES[2]})"]
    missing = [f"{each.name}: {each.text}" for each in found.findings if each.result in ("not checked", "failed")]
    lines += ["", "## Not checked", "", *(f"- {line}" for line in [*missing, *found.notes] or ["Nothing was left out."])]
    weights = [[name, f"`{digest}`"] for name, digest in head["weights"].items()]
    lines += ["", "## Weights", "", *format_table(["file", "SHA-256"], weights)]
    return lines


def format_methods(found: ModelCheck) -> list[str]:
    """Return the table of methods; for video without the columns of tokens and of equal images."""
    from vargen.eval.report import Column, markdown_table

    columns = [
        Column("method", lambda row: row.name),
        Column("kind", lambda row: row.kind),
        Column("passes", lambda row: f"{row.passes_per_batch:.1f}"),
        Column("ms per pass", lambda row: f"{1e3 * row.seconds_per_image / row.passes_per_batch:.1f}"),
        Column("seconds", lambda row: f"{row.seconds_per_image:.2f}"),
        Column("speedup", lambda row: f"{row.speedup:.2f}"),
    ]
    if found.comparison is not None:
        columns.insert(2, Column("tokens per pass", lambda row: f"{row.tokens_per_pass:.2f}"))
        title = f"equal to {found.comparison.baseline}"
        columns.append(Column(title, lambda row: f"{row.num_identical_images} of {row.images}"))
    return markdown_table(columns, found.methods)
