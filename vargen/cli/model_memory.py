"""`vargen info --model`: the memory that a model needs, by part, before its weights are read."""

from __future__ import annotations

from dataclasses import asdict

from vargen.cli.console import print_json, table


def print_memory(model: str, device: str, as_json: bool) -> None:
    """Print the predicted bytes of a model on a type of device, which need not exist here."""
    import vargen.pipelines.registry  # noqa: F401  (registers the families)
    from vargen.device import select_device
    from vargen.pipelines.loading import default_dtype, validate_model_folder
    from vargen.pipelines.video_memory import predict_memory

    folder, place = validate_model_folder(model), select_device("auto").type if device == "auto" else device
    found, dtype = predict_memory(folder, place), str(default_dtype(folder.path, place)).removeprefix("torch.")
    if as_json:
        print_json({"model": model, "device": place, "dtype": dtype, **asdict(found), "total": found.total})
        return
    sizes = {f"weights: {part}": size for part, size in found.weights.items()}
    sizes |= {f"cache: {part}": size for part, size in found.caches.items()}
    rows = [[name, f"{size / 1e6:,.1f}"] for name, size in {**sizes, "total": found.total}.items()]
    print(table([f"{place}, {dtype}", "MB"], rows, "<>").lstrip("\n"))
