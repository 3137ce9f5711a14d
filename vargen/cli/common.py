"""What commands share: options, names of models and methods, prompts and other inputs, and the files that they write."""

from __future__ import annotations

import itertools
import os
import re
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from vargen import device
from vargen.cli.console import import_libraries, print_status, to_json
from vargen.files import atomic_file, expand_user
from vargen.specs import split_specs
from vargen.values import MAX_SEED, OPTIONS, short_repr, suggest_names

if TYPE_CHECKING:
    from vargen.pipelines.base import VisualPipeline

# The names of the presets of `vargen.decoding`, so that a wrong one is reported without importing torch.
METHODS = (
    "auto", "ar", "sjd", "scd", "gumbel", "gsd", "mulo-exact", "mulo", "speculative", "eagle", "lantern", "medusa",
    "lantern-jacobi", "diversed", "wavefront", "pac", "gumbel-tree", "speculative-tree", "layer-skip", "lookup", "recycle",
    "eagle-gumbel", "eagle-2", "plain", "code", "economy", "target", "sdvg", "sdvg-learned", "stride", "early-exit",
)  # fmt: skip
MAX_IMAGES = 1_000_000  # per command: more than any published evaluation has, and small enough for memory
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
MAX_SLUG = 40  # characters
_MAX_NAME = 200  # bytes; file systems allow 255, and the temporary name is longer
# Lower-case suffix -> Pillow's options; the format has the suffix's name.
_SAVING: dict[str, dict[str, Any]] = {".jpg": {"quality": 95}, ".jpeg": {"quality": 95}, ".webp": {"lossless": True}}

# -- options -----------------------------------------------------------------------------------------------------------

# The groups of the help, by which commands also reject options that a model has no use for.
SAMPLING, IMAGE_MODELS, VIDEO, MACHINE = "Sampling of image models", "Image models", "Video models", "Machine"
image_option = partial(typer.Option, rich_help_panel=IMAGE_MODELS)
video_option = partial(typer.Option, rich_help_panel=VIDEO)
machine_option = partial(typer.Option, rich_help_panel=MACHINE)


def _sampling(name: str, metavar: str) -> Any:
    option = OPTIONS[name]
    bounds = option.range.allowed.removesuffix(", or None").capitalize()
    text = f"{bounds}; {option.help}. Default: the model's."
    return typer.Option(metavar=metavar, help=text, rich_help_panel=SAMPLING)


Guidance = Annotated[float | None, _sampling("guidance_scale", "X")]
Temperature = Annotated[float | None, _sampling("temperature", "X")]
TopK = Annotated[int | None, _sampling("top_k", "N")]
TopP = Annotated[float | None, _sampling("top_p", "X")]
MinP = Annotated[float | None, _sampling("min_p", "X")]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, metavar="N", help="Seed of the first image; the next has seed + 1.")]
ModelName = Annotated[
    str, typer.Option(metavar="NAME|DIR|HUB ID", help="A packaged model (see `vargen info`), a folder, or a hub id.")
]
Method = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD",
        help="Method, also with settings as in gumbel:window=8; `vargen info presets` lists them. Default: the model's.",
    ),
]
NumBlocks = Annotated[int | None, video_option(min=1, metavar="N", help="Number of blocks. Default: the model's.")]
Tau = Annotated[float | None, video_option(metavar="X", help="Score that a drafted block needs, on the scorer's scale.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], machine_option(help="auto: a GPU if there is one.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    machine_option(help="Of the transformer's weights. auto: the fastest on this device."),
]
Quantization = Annotated[
    str | None,
    machine_option(metavar="int8|float8", help="8-bit products on a CPU, or weights on a GPU. Default: the folder's."),
]
Threads = Annotated[
    int | None,
    machine_option(min=1, metavar="N", help="CPU threads. Default: autotuned; for training and measurements, torch's."),
]
Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE|-", help="Write JSON to a file, or to stdout (-) instead of the table.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


class Verb(TyperCommand):
    """A command: checks what needs no torch, which takes a second to import. Its help lists options by `rich_help_panel`.

    rich itself would double the time to start.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            self._check(ctx)
            return super().invoke(ctx)
        except (ValueError, TypeError, OSError) as error:  # whose messages begin with the name of an argument
            options = {each[2:].replace("-", "_"): each for option in self.params for each in option.opts if each[:2] == "--"}
            error.args = (re.sub(r"^(\w+)(\[0])?", lambda found: options.get(found[1], found[0]), str(error)),)
            raise

    def _check(self, ctx: Any) -> None:
        for name, value in ctx.params.items():
            if name in OPTIONS and value is not None:
                OPTIONS[name].range.check(name, value)
            if isinstance(value, Path):
                ctx.params[name] = expand_user(value, name)
            if isinstance(value, list):
                ctx.params[name] = [expand_user(each, name) if isinstance(each, Path) else each for each in value]
        methods = split_specs(ctx.params.get("methods") or [])
        check_names(ctx.params.get("model"), [*methods, *chosen(ctx, "accelerator").values()])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            usual = f"{parameter.param_type_name.capitalize()}s"
            if (record := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _given(ctx: typer.Context, groups: Iterable[str]) -> list[Any]:
    options = (each for each in ctx.command.params if {each.name, getattr(each, "rich_help_panel", None)} & {*groups})
    return [each for each in options if str(ctx.get_parameter_source(str(each.name))).endswith("COMMANDLINE")]


def chosen(ctx: typer.Context, *groups: str) -> dict[str, Any]:
    """Return the options of these groups or names that were given; the model's defaults apply to the others."""
    return {each.name: ctx.params[each.name] for each in _given(ctx, groups)}


def reject(ctx: typer.Context, reason: str, *groups: str) -> None:
    """Raise ValueError if an option of these groups or names was given."""
    for option in _given(ctx, groups):
        raise ValueError(f"{max(option.opts, key=len)} {reason}")


def check_names(model: Any, methods: Iterable[str] = ()) -> None:
    """Raise ValueError for a model or a preset that does not exist; lists of models, and module:name, are left out."""
    from vargen.pipelines.model_names import locate_folder

    for method in methods:
        name, _, rest = method.partition(":")
        if name.strip() not in (*METHODS, "draft") and ("=" in rest or not rest):
            raise ValueError(f"unknown accelerator {short_repr(name)}; {suggest_names(name, METHODS)}")
    if isinstance(model, str):
        locate_folder(model, {})


def inspect(ctx: typer.Context, model: str) -> VisualPipeline:
    """Return a model without weights, and reject the options of the others."""
    from vargen.pipelines.default_format import start_compiling
    from vargen.pipelines.model_names import packaged_model_path, packaged_models

    # Beside the imports, which take seconds. The device node is there where torch sees a GPU.
    if ctx.params.get("dtype") == "auto" and model in packaged_models() and not os.path.exists("/dev/nvidiactl"):
        start_compiling(packaged_model_path(model))
    import_libraries()
    device.set_threads(ctx.params["threads"])
    from vargen.pipelines.loading import inspect_model

    found = inspect_model(model)
    if found.fps is None:
        reject(ctx, "is for video models, such as emoji-video", VIDEO)
    else:
        reject(ctx, "is for image models, and this model generates video", SAMPLING, IMAGE_MODELS)
    return found


def loading(ctx: typer.Context, folder: Path | None) -> dict[str, Any]:
    """Return the arguments of `open_pipeline` that the options say; defaults are those of the machine and of the folder."""
    import torch

    from vargen.kernels.dispatch import explain_kernels
    from vargen.models.quantization import validate_quantization
    from vargen.pipelines.default_format import default_quantization
    from vargen.pipelines.loading import default_dtype

    place = device.select_device(ctx.params["device"])
    explain_kernels(place)  # logged before weights are loaded
    name, quantization = ctx.params["dtype"], ctx.params.get("quantization")
    validate_quantization(quantization, place)
    if name == "auto" and quantization is None and place.type == "cpu" and folder is not None:
        quantization = default_quantization(folder)
    if name != "auto":
        dtype = getattr(torch, name)
    elif quantization is not None and place.type == "cpu":
        dtype = torch.float32
    else:
        dtype = device.preferred_dtype(place) if folder is None else default_dtype(folder, place)
    return {"device": place, "torch_dtype": dtype, "quantization": quantization}


def title_of(model: str) -> str:
    """Return the model's name for others: without local folders."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def machine_for_timing() -> dict[str, Any]:
    """Describe the machine, and warn if others use it."""
    machine = device.describe_machine()
    if (load := machine["load"]) is not None and load > 0.5 * machine["cores"]:
        print_status(f"warning: the load average is {load:.1f}, so the measured times will vary")
    return machine


# -- outputs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputFile:
    """A file to write. `explicit`: the user gave the name, so an existing file is overwritten."""

    path: Path
    explicit: bool = True


def slugify(text: str) -> str:
    """Turn a prompt into a file name of 1 to 40 characters of a-z, 0-9 and single inner hyphens, which no system reserves."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    short = re.sub("[^a-z0-9]+", "-", plain).strip("-")[:MAX_SLUG].strip("-")
    reserved = re.fullmatch(r"con|prn|aux|nul|(com|lpt)\d", short)
    return f"image-{short}" if reserved else short or "image"


def resolve_outputs(
    output: str | None, stems: list[str], name: str = "output", suffixes: tuple[str, ...] = IMAGE_SUFFIXES
) -> list[OutputFile]:
    """Return the file of each image; `stems` name the files that the user does not name.

    `output` is a folder if it is an existing folder, ends with a separator or has no suffix; otherwise it is a file, numbered
    from 1 if there are several images. None means the current folder.

    Args:
        name: the option's name, for errors. suffixes: of the files that are allowed; those in a folder have the first.
    """
    path = expand_user(output or ".", name)
    if output in ("", "-"):
        raise ValueError(f"{name} must name a file or a folder, got {output!r}")
    if output is None or os.path.isdir(path) or output.endswith(("/", os.sep)) or not path.suffix:
        validate_writable(path, name)
        return [OutputFile(path / f"{stem}{suffixes[0]}", explicit=False) for stem in stems]
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"{name} must be a folder (end it with /) or a file of {', '.join(suffixes)}, got {output!r}")
    if len(os.fsencode(path.name)) > _MAX_NAME:
        raise ValueError(f"{name} must have a name of at most {_MAX_NAME} bytes, got {len(os.fsencode(path.name))}")
    validate_writable(path.parent, name)
    numbers = [f"-{number}" for number in range(1, len(stems) + 1)] if len(stems) > 1 else [""]
    files = [OutputFile(path.with_name(f"{path.stem}{number}{path.suffix}")) for number in numbers]
    if folders := [str(file.path) for file in files if file.path.is_dir()]:
        raise ValueError(f"{name} {folders[0]!r} is a folder; give another file name")
    return files


def result_file(path: str | Path | None, suffix: str = ".json", name: str = "json") -> OutputFile | None:
    """Return a result file; None if no file is requested, or for `-`, standard output."""
    if path is None or isinstance(path, bool) or str(path) == "-":
        return None
    file = expand_user(path, name)
    if file.suffix.lower() != suffix or file.is_dir():
        raise ValueError(f"{name} must be a file ending in {suffix}, got {str(path)!r}")
    validate_writable(file.parent, name)
    return OutputFile(file)


def validate_writable(folder: Path, name: str = "output") -> None:
    """Raise ValueError unless files can be created in `folder`, or the folder itself can be. Leaves no file on disk."""
    try:
        nearest = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(each))
        with tempfile.TemporaryFile(dir=nearest):  # the only check that also works for root and on read-only disks
            pass
    except OSError as error:
        raise ValueError(f"{name} folder {str(folder)!r} cannot be written: {error.strerror or error}") from error


def check_outputs(
    params: Mapping[str, Any], outputs: Mapping[str, Iterable[OutputFile | None]], run: Path | None = None
) -> None:
    """Raise ValueError if two outputs are the same file, or if one would overwrite an input, a model or a file of a run.

    Args:
        params: of the command; its paths are inputs, and `as_json` is an output. outputs: by option.
        run: folder of a run that need not exist.
    """
    given = ((value if isinstance(value, list) else [value]) for name, value in params.items() if name not in outputs)
    inputs = [path for path in itertools.chain(*given) if isinstance(path, Path) and path != run]
    read = {path.resolve(): f"the input {str(path)!r}" for path in inputs}
    model = params.get("model")
    for folder in map(Path, model if isinstance(model, list) else [model or ""]):
        files = itertools.chain(folder.glob("*.json"), folder.glob("*/*.json"))
        read |= {file.resolve(): f"a file of model {str(folder)!r}" for file in files if model}
    outputs = {**outputs, "json": [result_file(params.get("as_json"))]}
    used: dict[Path, OutputFile] = {}
    for name, file in ((name, file) for name, files in outputs.items() for file in files if file is not None):
        path, title = file.path.resolve(), f"{name} {str(file.path)!r}"
        there = used.setdefault(path, file)
        if there is not file and (there.explicit or file.explicit):
            raise ValueError(f"{title} is the file of another option, too; name two files")
        if file.explicit and path in read:
            raise ValueError(f"{title} would overwrite {read[path]}; name another file")
        own = [each for each in path.parents if (each / "run.json").is_file() or (run and each == run.resolve())]
        if file.explicit and own:
            raise ValueError(f"{title} would be a file of the run in {str(own[0])!r}; name one elsewhere")


def unused_path(file: OutputFile) -> Path:
    """Return the path to write to: a derived name that exists gets a number, as in `apple-7-2.png`."""
    numbered = (file.path.with_name(f"{file.path.stem}-{number}{file.path.suffix}") for number in itertools.count(2))
    paths = itertools.chain([file.path], numbered)
    return next(path for path in paths if file.explicit or not os.path.lexists(path))


def save_image(image: Any, file: OutputFile, parameters: dict[str, Any]) -> Path:
    """Write a PIL image atomically and return its path. PNG files carry `parameters`: see `vargen.image_metadata`."""
    from vargen.image_metadata import png_chunks

    path = unused_path(file)
    suffix = path.suffix.lower()
    options = {"pnginfo": png_chunks(parameters, image.size)} if suffix == ".png" else _SAVING[suffix]
    with atomic_file(path) as temporary:
        image.save(temporary, format="JPEG" if suffix == ".jpg" else suffix[1:], **options)
    return path


def write_results(ctx: typer.Context, text: str, document: Any, *others: Callable[[], Iterable[Path]]) -> None:
    """Print the table, or JSON for `-`, and write the file of --json and others. What fails does not prevent the rest.

    Args:
        others: each writes files and returns their names, which are printed: to stderr if stdout is for JSON.
    """
    as_json = ctx.params["as_json"]
    with ExitStack() as last_to_first:
        for write in reversed(others):
            last_to_first.callback(_write, write, as_json == "-")
        if (file := result_file(as_json)) is not None:
            last_to_first.callback(write_text, file.path, to_json(document) + "\n")
        print(to_json(document) if as_json == "-" else text, flush=True)


def _write(write: Callable[[], Iterable[Path]], to_stderr: bool) -> None:
    for file in write():
        print(file, file=sys.stderr if to_stderr else sys.stdout, flush=True)


def write_text(file: Path, text: str) -> None:
    with atomic_file(file) as temporary:
        temporary.write_text(text, encoding="utf-8")
