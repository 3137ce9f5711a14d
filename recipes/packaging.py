"""Helpers of packaging: finished runs and their metrics, and model folders that are written atomically, without local paths."""

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
from vargen.pipelines.prompts import PROMPT_NAMES_FILE
from vargen.training.run import TrainingRun, find_checkpoint, read_training_checkpoint

_RECALL = [f"top{count}_{group}" for group in COUNTS for count in (1, 5)]


def validate_finished(runs: Mapping[str, Path | None], **parts: str) -> dict[str, Path]:
    """Return the runs that are not None; FileNotFoundError if one lacks its trained network.

    Args:
        parts: the sub-folder with the network, if not `transformer`.
    """
    present = {name: run for name, run in runs.items() if run is not None}
    for name, run in present.items():
        part = run / parts.get(name, "transformer")
        if not part.is_dir():
            raise FileNotFoundError(f"{part} is missing: finish the training run first")
    return present


def read_metrics(run: Path, part: str | None = None) -> dict[str, float]:
    """Return the last logged value of each metric of a run, with its steps and seconds.

    Args:
        part: if `run` is a packaged model, the metrics of this part.
    """
    packaged = run / "training.json"
    if part is not None and packaged.is_file():
        return dict(json.loads(packaged.read_text("utf-8"))[part])
    metrics: dict[str, float] = {}
    for record in TrainingRun(run, {}, 0).read_log():
        metrics.update(record)
    return metrics


def final_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of the exported weights, without their prefix."""
    return {name.removeprefix("final_"): value for name, value in metrics.items() if name.startswith("final_")}


def read_recall(file: Path) -> dict[str, float]:
    """Return `top1_seen` and so on from the output of `python -m recipes recall`; ValueError if one is missing."""
    output = json.loads(file.read_text("utf-8"))
    values = output if isinstance(output, dict) else {}
    recall = {key: float(values[key]) for key in _RECALL if isinstance(values.get(key), int | float) and 0 <= values[key] <= 1}
    if len(recall) < len(_RECALL):
        raise ValueError(f"recall must be the output of `recipes recall`, with {', '.join(_RECALL)} from 0 to 1, got {file}")
    return recall


def read_settings(run: Path) -> dict[str, Any]:
    """Return the settings in a run's checkpoint."""
    return read_training_checkpoint(find_checkpoint(run))["settings"]


def text_parts(shared_from: Path) -> dict[str, Any]:
    """Load the text encoder and its tokenizer of a model folder, as components of a pipeline."""
    return {
        "text_encoder": MiniLMTextEncoder.from_pretrained(shared_from / "text_encoder"),
        "tokenizer": AutoTokenizer.from_pretrained(shared_from / "tokenizer"),
    }


def store_as(weight_format: str, *networks: Any) -> None:
    """Make networks save their weights in a compact format; None is skipped."""
    for network in networks:
        if network is not None:
            network.register_to_config(weight_format=weight_format)


def write_model(
    output: Path,
    save: Callable[[Path], Any],
    metrics: Mapping[str, Any],
    card: Callable[[int], str],
    shared_from: Path | None = None,
    max_bytes: int | None = None,
) -> Path:
    """Write a model folder atomically; other files of an existing model folder are kept.

    Args:
        save: writes the model into a folder. metrics: written as `training.json`.
        card: maps the size of the folder in bytes to the model card.
        shared_from: a packaged model whose text encoder is shared instead of copied.
    """
    with atomic_folder(output, inputs=[], overwrite=True) as staged:
        save(staged)
        if shared_from is not None:
            for part in ("text_encoder", "tokenizer"):
                shutil.rmtree(staged / part, ignore_errors=True)
            shared = [part for part in SHAREABLE if part != "prompt_names" or (shared_from / PROMPT_NAMES_FILE).is_file()]
            (staged / SHARED_FILE).write_text(json.dumps(dict.fromkeys(shared, shared_from.name), indent=1) + "\n", "utf-8")
        strip_local_paths(staged)
        size = folder_bytes(staged)
        if max_bytes is not None:
            validate_size(output.name, size, max_bytes)
        (staged / "README.md").write_text(card(size), "utf-8")
        (staged / "training.json").write_text(json.dumps(metrics, indent=1) + "\n", "utf-8")
    return output


def add_component(folder: Path, name: str, network: Any, card: str) -> None:
    """Write a network and its card into a model's folder as its component `name`."""
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    with atomic_merge(folder / name) as staged:
        network.save_pretrained(staged)
        strip_local_paths(staged)
        (staged / "README.md").write_text(card, "utf-8")
    index[name] = [type(network).__module__, type(network).__name__]
    with atomic_file(folder / "model_index.json") as temporary:
        temporary.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")


def strip_local_paths(folder: Path) -> None:
    """Remove from saved networks what depends on the machine: local paths and restricted file permissions."""
    for config in folder.rglob("config.json"):
        values = json.loads(config.read_text("utf-8"))
        if values.pop("_name_or_path", None) is not None:
            config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", "utf-8")
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)  # diffusers makes them readable only by their owner


def folder_bytes(folder: Path) -> int:
    """Return the size of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def validate_size(name: str, size: int, max_bytes: int) -> None:
    """Raise ValueError if a packaged model is too large."""
    if size > max_bytes:
        raise ValueError(
            f"{name} must have at most {max_bytes / 2**20:g} MiB, got {size / 2**20:.1f}: make it smaller, or store it as int8"
        )
