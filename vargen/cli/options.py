"""Options shared by several commands: model, sampling, seed, device, dtype, backend and result files."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vargen import device
from vargen.values import MAX_SEED, OPTIONS, short_repr, suggest_names

if TYPE_CHECKING:
    import torch

    from vargen.evaluation.generation import Backend as RunBackend

# The names of the presets of `vargen.decoding`, so that a wrong one is reported without importing torch.
METHODS = (
    "auto", "ar", "sjd", "scd", "gumbel", "gsd", "mulo-exact", "mulo", "speculative", "eagle", "lantern", "medusa",
    "lantern-jacobi", "wavefront", "pac", "gumbel-tree", "speculative-tree", "layer-skip", "lookup", "recycle", "eagle-gumbel",
    "eagle-2", "plain", "code", "economy", "target", "sdvg", "sdvg-learned", "stride", "early-exit",
)  # fmt: skip


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Backend(StrEnum):
    local = "local"
    ray = "ray"


def _sampling(name: str) -> Any:
    option = OPTIONS[name]
    bounds = option.range.allowed.removesuffix(", or None").capitalize()
    return typer.Option(metavar="N" if option.range.is_integer else "X", help=f"{bounds}; {option.help}. Default: the model's.")


Guidance = Annotated[float | None, _sampling("guidance_scale")]
Temperature = Annotated[float | None, _sampling("temperature")]
TopK = Annotated[int | None, _sampling("top_k")]
TopP = Annotated[float | None, _sampling("top_p")]
ModelName = Annotated[
    str, typer.Option(metavar="NAME|DIR|HUB ID", help="A packaged model (see `vargen info`), a folder, or a hub id.")
]
DeviceName = Annotated[Device, typer.Option(help="auto: a GPU if there is one.")]
DtypeName = Annotated[Dtype, typer.Option(help="Of the transformer's weights. auto: the fastest on this device.")]
QuantizationName = Annotated[
    str | None,
    typer.Option(
        "--quantization", metavar="int8|float8", help="8-bit products on a CPU, or weights on a GPU. Default: the folder's."
    ),
]
Threads = Annotated[int | None, typer.Option(metavar="N", help="CPU threads. Default: autotuned.")]
TorchThreads = Annotated[int | None, typer.Option(metavar="N", help="CPU threads. Default: torch's.")]
BackendName = Annotated[Backend, typer.Option(help="ray: several processes or machines (needs the extra `ray`).")]
NumWorkers = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Processes of --backend ray. Default: one per GPU, or core.")
]
Seed = Annotated[
    int,
    typer.Option(min=0, max=MAX_SEED, metavar="N", help="Seed of the first image; the next has seed + 1."),
]
Json = Annotated[
    str | None, typer.Option("--json", metavar="FILE|-", help="Write JSON to a file, or to stdout (-) instead of the table.")
]


def explicit_options(**values: float | int | str | None) -> dict[str, Any]:
    """Return only the options that were given; the model's defaults apply to the others. Sampling options are validated."""
    given = {name: value for name, value in values.items() if value is not None}
    return {name: OPTIONS[name].range.check(name, value) if name in OPTIONS else value for name, value in given.items()}


def check_names(model: str, methods: Iterable[str] = ()) -> None:
    """Raise ValueError for a model or a preset that does not exist, before torch is imported, which takes a second."""
    from vargen.pipelines.model_names import locate_folder

    for method in methods:
        name = method.partition(":")[0].strip()
        if name not in METHODS:
            raise ValueError(f"unknown accelerator {short_repr(name)}; {suggest_names(name, METHODS)}")
    locate_folder(model, {})


def require_device(name: Device) -> torch.device:
    """Select the device to run on; `auto` uses a GPU if there is one."""
    from vargen.kernels.dispatch import explain_kernels

    selected = device.select_device(name.value)
    explain_kernels(selected)  # logged before weights are loaded
    return selected


def select_dtype(name: Dtype, place: torch.device, folder: Path | None = None, quantization: str | None = None) -> torch.dtype:
    """Select the dtype of the large networks; `auto` takes the default for the device and for the model in `folder`."""
    import torch

    from vargen.models.quantization import validate_quantization
    from vargen.pipelines.loading import default_dtype

    validate_quantization(quantization, place)
    if name is not Dtype.auto:
        return getattr(torch, name.value)
    if quantization is not None and place.type == "cpu":
        return torch.float32
    return device.preferred_dtype(place) if folder is None else default_dtype(folder, place)


def select_backend(name: Backend, num_workers: int | None, place: torch.device, threads: int | None) -> RunBackend:
    """Select where an evaluation runs: in this process, or on Ray."""
    if name is Backend.local:
        if num_workers is not None:
            raise ValueError("num_workers needs --backend ray; the local backend is one process (see --shard for several)")
        from vargen.evaluation.generation import run_locally

        return run_locally
    from vargen.evaluation.ray_backend import ray_backend

    return ray_backend(num_workers, place.type, threads)


def parse_int_list(text: str, name: str, most: int = 10**9) -> list[int]:
    """Parse a comma-separated list of integers such as `"1,2,8"`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and 0 < int(part) <= most for part in parts):
        limit = f" and at most {most}" if most < 10**9 else ""
        allowed = f"whole numbers of at least 1{limit}, separated by commas, such as 1,8"
        raise ValueError(f"{name} must be {allowed}, got {short_repr(text)}")
    return list(dict.fromkeys(int(part) for part in parts))


def makes_video(model: str) -> bool:
    """Whether a model generates video, according to its folder's index alone; other problems of a folder are reported later."""
    from vargen.decoding import VideoMethod
    from vargen.pipelines.loading import find_pipeline_class

    try:
        return find_pipeline_class(model).paradigm == VideoMethod.paradigm
    except ValueError:
        return False


def reject_options(reason: str, **options: Any) -> None:
    """Raise ValueError if any of the options was given."""
    for name, value in options.items():
        if value is not None and value is not False and value != []:
            raise ValueError(f"{name} {reason}")
