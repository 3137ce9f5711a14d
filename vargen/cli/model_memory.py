"""`vargen info --model`: the memory that a video model needs, by part, before its weights are read."""

from __future__ import annotations

from dataclasses import asdict

from vargen.cli.console import print_json, table


def print_memory(model: str, device: str, as_json: bool) -> None:
    """Print the predicted bytes of a video model on a type of device, which need not exist here.

    Raises:
        ValueError: for an unknown model, one whose files are damaged, or one that generates images.
    """
    from vargen.device import select_device
    from vargen.pipelines.loading import default_dtype, validate_model_folder
    from vargen.pipelines.registry import paradigm_of
    from vargen.pipelines.video_memory import predict_memory

    if paradigm_of(model) != "video":
        raise ValueError(f"model must be a video model: memory is predicted for these only, got {model!r}")
    folder, place = validate_model_folder(model), select_device("auto").type if device == "auto" else device
    found, dtype = predict_memory(folder, place), str(default_dtype(folder.path, place)).removeprefix("torch.")
    if as_json:
        print_json({"model": model, "device": place, "dtype": dtype, **asdict(found), "peak": found.peak})
        return
    sizes = {f"weights: {part}": size for part, size in found.weights.items()}
    sizes |= {f"cache: {part}": size for part, size in found.caches.items()}
    sizes |= {"state of the decoder": found.decoder, "peak: prompt": found.prompt, "peak: denoising": found.denoising}
    sizes |= {"peak: decoding": found.decoding, "peak": found.peak}
    rows = [[name, f"{size / 1e6:,.1f}"] for name, size in sizes.items()]
    print(table([f"{place}, {dtype}", "MB"], rows, "<>").lstrip("\n"))
