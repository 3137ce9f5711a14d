"""`vargen regenerate`: generate images again from the parameters in their PNG files, and say whether they are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vargen.cli.console import import_libraries, print_json, print_status, quiet_libraries
from vargen.cli.options import Device, DeviceName, Dtype, Threads, require_device, select_dtype
from vargen.cli.outputs import OutputFile, resolve_outputs, validate_distinct_paths
from vargen.cli.results import save_image
from vargen.device import set_threads
from vargen.files import expand_user


def regenerate(
    image: Annotated[Path, typer.Argument(metavar="IMAGE.png", help="A PNG that `vargen generate` or the demo wrote.")],
    model: Annotated[
        str | None, typer.Option(metavar="NAME|DIR", help="Default: the model that the image names, if it is packaged.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE|DIR", help="Also write the new image there.")
    ] = None,
    device: DeviceName = Device.auto,
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of sentences.")] = False,
) -> None:
    """Generate a shared image again and print whether its tokens and pixels are the same, or why they are not.

    Exit code 1: another image.
    """
    from vargen.assets import packaged_models
    from vargen.image_metadata import read_parameters

    file = expand_user(image, "image")
    if not file.is_file():
        raise FileNotFoundError(f"image {str(file)!r} does not exist")
    try:
        parameters = read_parameters(file)
    except ValueError as error:
        raise ValueError(f"image {str(file)!r}: {error}") from error
    name = model or parameters.get("model")
    if model is None and name not in packaged_models():
        raise ValueError(f"image {str(file)!r} is of the model {name!r}, which is not packaged: give it with --model")
    files: list[OutputFile] = [] if output is None else resolve_outputs(output, [f"{file.stem}-regenerated"])
    validate_distinct_paths({"output": files}, {"image": [file]})
    import_libraries()
    set_threads(threads)
    quiet_libraries()
    found = _regenerate(file, parameters, str(name), device)
    for target in files:
        save_image(found.image, target, parameters)
    if as_json:
        same = {"same_tokens": found.same_tokens, "same_pixels": found.same_pixels}
        print_json({"image": str(file), **same, "reasons": list(found.reasons)})
    else:
        print(found.describe(), flush=True)
    if not found.same_pixels:
        raise typer.Exit(1)


def _regenerate(file: Path, parameters: dict[str, Any], model: str, device: Device) -> Any:
    from vargen.pipelines import regeneration
    from vargen.pipelines.loading import inspect_model, open_pipeline
    from vargen.reading import open_image

    regeneration.validate_regenerable(parameters)
    place = require_device(device)
    folder = inspect_model(model).folder
    recorded = parameters.get("dtype")
    dtype = Dtype(recorded) if recorded in {each.value for each in Dtype} else Dtype.auto
    quantization = parameters.get("quantization")
    dtype_here = select_dtype(dtype, place, folder, quantization)
    pipe = open_pipeline(folder, device=place, torch_dtype=dtype_here, quantization=quantization)
    pipe.set_progress_bar_config(disable=True)
    with open_image(file) as original:
        print_status(f"generating {parameters.get('prompt', parameters.get('class_label'))!r} again, seed {parameters['seed']}")
        return regeneration.regenerate(pipe, parameters, original.convert("RGB"))
