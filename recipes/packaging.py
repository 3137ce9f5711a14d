"""What packaging has in common: finished runs, what they logged, and folders that appear whole and free of local paths."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from recipes.emoji.evaluation import COUNTS
from vargen.files import atomic_file, atomic_folder, atomic_merge
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.pipelines.loading import SHAREABLE, SHARED_FILE
from vargen.pipelines.prompts import PROMPT_NAMES_FILE as NAMES
from vargen.training.run import TrainingRun
from vargen.weight_files import load_pickle_safely

_RECALL = [f"top{count}_{group}" for group in COUNTS for count in (1, 5)]


def finished(runs: Mapping[str, Path | None], **parts: str) -> dict[str, Path]:
    """Those that are given; FileNotFoundError for one without the network that its end writes, a `transformer` unless named."""
    given = {name: run for name, run in runs.items() if run is not None}
    for name, run in given.items():
        part = run / parts.get(name, "transformer")
        if not part.is_dir():
            raise FileNotFoundError(f"{part} is missing: finish the training run first")
    return given


def read_metrics(run: Path, part: str | None = None) -> dict[str, float]:
    """The last logged value of everything in a run, with its steps and seconds; of a packaged model, what it says of a part."""
    packaged = run / "training.json"
    if part is not None and packaged.is_file():
        return dict(json.loads(packaged.read_text("utf-8"))[part])
    metrics: dict[str, float] = {}
    for record in TrainingRun(run, {}, 0).records():
        metrics.update(record)
    return metrics


def final_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of the exported weights, by their names alone."""
    return {name.removeprefix("final_"): value for name, value in metrics.items() if name.startswith("final_")}


def read_recall(file: Path) -> dict[str, float]:
    """`top1_seen`, `top5_styles` and so on of what `python -m recipes recall` printed; ValueError where they are missing."""
    found = json.loads(file.read_text("utf-8"))
    given = found if isinstance(found, dict) else {}
    shares = {key: float(given[key]) for key in _RECALL if isinstance(given.get(key), int | float) and 0 <= given[key] <= 1}
    if len(shares) < len(_RECALL):
        raise ValueError(f"recall: {file} is not what `recipes recall` prints: shares from 0 to 1 as {', '.join(_RECALL)}")
    return shares


def fingerprint(run: Path) -> dict[str, Any]:
    """What a run's checkpoint says it was made with."""
    return load_pickle_safely(run / "state.pt", if_damaged="repeat the recipe, which resumes the run")["fingerprint"]


def text_parts(lender: Path) -> dict[str, Any]:
    """The text encoder and its tokenizer of a model folder, as components of a pipeline."""
    return {
        "text_encoder": MiniLMTextEncoder.from_pretrained(lender / "text_encoder"),
        "tokenizer": AutoTokenizer.from_pretrained(lender / "tokenizer"),
    }


def store_as(weight_format: str, *networks: Any) -> None:
    """Save these in a compact format from now on; None is skipped."""
    for network in networks:
        if network is not None:
            network.register_to_config(weight_format=weight_format)


def write_model(
    output: Path,
    save: Callable[[Path], Any],
    metrics: Mapping[str, Any],
    card: Callable[[int], str],
    lender: Path | None = None,
    max_bytes: int | None = None,
) -> Path:
    """Write a model folder whole, in the place of the model that is there, whose other files stay.

    Args:
        save: writes the model into a folder. card: the model card, of the folder's bytes. metrics: kept as `training.json`.
        lender: a packaged model whose text encoder is shared instead of copied.
    """
    with atomic_folder(output, inputs=[], overwrite=True) as staged:
        save(staged)
        if lender is not None:
            for part in ("text_encoder", "tokenizer"):
                shutil.rmtree(staged / part, ignore_errors=True)
            shared = [part for part in SHAREABLE if part != "prompt_names" or (lender / NAMES).is_file()]
            (staged / SHARED_FILE).write_text(json.dumps(dict.fromkeys(shared, lender.name), indent=1) + "\n", "utf-8")
        strip_local_paths(staged)
        size = folder_bytes(staged)
        if max_bytes is not None:
            check_size(output.name, size, max_bytes)
        (staged / "README.md").write_text(card(size), "utf-8")
        (staged / "training.json").write_text(json.dumps(metrics, indent=1) + "\n", "utf-8")
    return output


def add_component(folder: Path, name: str, network: Any, card: str) -> None:
    """Write a network and its card into a model's folder, of which it is the component `name` from then on."""
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    with atomic_merge(folder / name) as staged:
        network.save_pretrained(staged)
        strip_local_paths(staged)
        (staged / "README.md").write_text(card, "utf-8")
    index[name] = [type(network).__module__, type(network).__name__]
    with atomic_file(folder / "model_index.json") as temporary:
        temporary.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")


def strip_local_paths(folder: Path) -> None:
    """Remove what saving leaves of a machine in networks under `folder`: where they were trained, and who may read them."""
    for config in folder.rglob("config.json"):
        values = json.loads(config.read_text("utf-8"))
        if values.pop("_name_or_path", None) is not None:
            config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", "utf-8")
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)  # diffusers leaves them readable to their owner alone


def folder_bytes(folder: Path) -> int:
    """Of all files under it."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def check_size(name: str, size: int, most: int) -> None:
    """Raise ValueError for more bytes than a packaged model may have."""
    if size > most:
        raise ValueError(
            f"{name} takes {size / 2**20:.1f} MiB, and may take {most / 2**20:g} MiB: make it smaller, or store it as int8"
        )
