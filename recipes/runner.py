"""Runs a recipe, after checking its settings, inputs and device."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.emoji.dataset import load_emoji_dataset
from recipes.package import package_emoji, package_scorer, package_var, package_video
from recipes.package_components import package_head, package_low_res, package_router, package_video_loras
from recipes.registry import PACKAGED, RECIPES, Input, output_folder, resolve_network_folder
from vargen.cli.options import Device, require_device, validate_range
from vargen.device import set_threads
from vargen.files import expand_user
from vargen.pipelines.validation import validate_sampling
from vargen.training.config import CONFIGS, from_dict, load_config

FOLDERS = (Path(__file__).parent / "configs", CONFIGS)


def run_recipe(
    name: str,
    config: str | None = None,
    steps: int | None = None,
    output: Path | None = None,
    inputs: Mapping[str, Path] | None = None,
    settings: Mapping[str, Any] | None = None,
    device: Device = Device.auto,
    threads: int | None = None,
) -> dict[str, Any]:
    """Train, resuming a run in `output`; returns the metrics and the folder of the network.

    Args:
        config: a TOML file that replaces the recipe's. steps, settings: override its values. inputs: folders by name.

    Raises:
        ValueError: for an unknown input or setting. FileNotFoundError: for an input that does not exist.
    """
    recipe = RECIPES[name]
    folder = expand_user(output, "output") if output else output_folder(name)
    loaded = load_settings(name, config, steps, settings)
    folders = {key: expand_user(path, key) for key, path in (inputs or {}).items()}
    if unknown := folders.keys() - recipe.inputs.keys():
        known = ", ".join(recipe.inputs) or "none"
        raise ValueError(f"{name} has no input {min(unknown)!r}; its inputs: {known}")
    place = require_device(device)
    resolved = {item.argument: resolve_input(key, item, folders.get(key)) for key, item in recipe.inputs.items()}
    set_threads(threads)
    arguments = {argument: value for argument, value in resolved.items() if value is not None}
    metrics = recipe.run(loaded, folder=folder, device=place, **arguments)
    return {"output": str(folder / recipe.produces), **metrics}


def load_settings(
    name: str, config: str | None = None, steps: int | None = None, settings: Mapping[str, Any] | None = None
) -> Any:
    """Return the config of a recipe, from its file or another one; raises like `run_recipe`."""
    recipe = RECIPES[name]
    if recipe.cached:
        if config is not None or steps is not None:
            raise ValueError(f"{name} builds a data set: leave steps and config out")
        return from_dict(recipe.config, dict(settings or {}), name)
    validate_range(steps, "steps", 1)
    source = expand_user(config, "config") if config else recipe.file or name
    return load_config(source, recipe.config, steps, settings, FOLDERS)


def resolve_input(key: str, item: Input, path: Path | None) -> Any:
    """Return the trainer's argument for an input: a checked folder, its loaded contents, or None for an omitted optional input.

    Raises:
        FileNotFoundError: if the folder does not exist; the message names the recipe that makes it.
    """
    if path is None and not (item.recipe or item.packaged):
        return None
    folder = path or (PACKAGED / item.packaged if item.packaged else output_folder(item.recipe))
    try:
        if item.load is not None:
            return item.load(folder)
        if item.part:
            return resolve_network_folder(folder, item.part, key)
        if not folder.is_dir() and item.packaged:
            raise FileNotFoundError(f"{key} must be a folder, got {str(folder)!r}")
        if item.argument == "text_encoder_folder":
            validate_parts(key, folder, "text_encoder", "tokenizer")
        elif item.argument == "model":
            validate_parts(key, folder, "text_encoder", "tokenizer", "vqvae")
    except FileNotFoundError as error:
        hint = f": run `python -m recipes {item.recipe}` first, or give --input {key}=DIR" if item.recipe and not path else ""
        raise FileNotFoundError(f"{error}{hint}") from None
    return folder


def validate_parts(key: str, folder: Path, *parts: str) -> None:
    """Raise FileNotFoundError unless a folder contains these sub-folders."""
    if not all((folder / part).is_dir() for part in parts):
        raise FileNotFoundError(f"{key} {str(folder)!r} must contain {', '.join(f'{part}/' for part in parts)}")


def parse_pairs(option: str, words: Sequence[str]) -> dict[str, str]:
    """Parse the `KEY=VALUE` words of a repeatable option."""
    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals and value):
            raise ValueError(f"{option} must be KEY=VALUE, got {word!r}")
        pairs[key] = value
    return pairs


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """Parse `KEY=VALUE` words with values as in TOML; a bare word is a string."""
    settings: dict[str, Any] = {}
    for key, text in parse_pairs("--set", words).items():
        try:
            settings[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            settings[key] = text
    return settings


def summaries() -> list[tuple[str, str, str]]:
    """Return the name, the inputs and the first comment of the TOML file of each recipe."""
    rows = []
    for name, recipe in RECIPES.items():
        files = [folder / f"{recipe.file or name}.toml" for folder in FOLDERS]
        texts = [file.read_text("utf-8") for file in files if file.is_file()]
        comment = texts[0].splitlines()[0].lstrip("# ") if texts else recipe.config.__doc__ or ""
        rows.append((name, " ".join(recipe.inputs), comment))
    return rows


# The recipes whose runs make up each package, by their names on the command line; and the optional ones. The run `router` is of
# `vargen train router`.
PACKAGES = {
    "emoji": {"tokenizer": "emoji-tokenizer", "generator": "emoji-generator", "drafter": "emoji-drafter"},
    "emoji-low-res": {"low-res": "emoji-low-res", "upsampler": "emoji-upsampler"},
    "emoji-eagle": {"head": "emoji-eagle"},
    "emoji-medusa": {"head": "emoji-medusa"},
    "emoji-scorer": {"scorer": "emoji-scorer"},
    "emoji-var": {"tokenizer": "emoji-var-tokenizer", "model": "emoji-var", "small": "emoji-var-small"},
    "emoji-video": {
        "vae": "emoji-video-vae",
        "target": "emoji-video-target-steps",
        "drafter": "emoji-video-drafter-steps",
        "preview": "emoji-video-preview",
    },
    "emoji-video-motions": {"target": "emoji-video-motions", "drafter": "emoji-video-motions-drafter"},
    "emoji-video-router": {"router": "router"},
}
_OPTIONAL = {"drafter", "small", "preview"}
_MODELS = {
    "emoji-low-res": "emoji", "emoji-eagle": "emoji", "emoji-medusa": "emoji",
    "emoji-video-motions": "emoji-video", "emoji-video-router": "emoji-video",
}  # fmt: skip


def package_model(
    name: str,
    runs: Mapping[str, Path] | None = None,
    output: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
    note: str = "",
    recall: Path | None = None,
) -> dict[str, Any]:
    """Make the packaged model `name` from finished runs; returns the runs, the folder and metrics.

    Args:
        runs: folders by name; by default the outputs of the recipes. A drafter, a small model and a preview decoder are omitted
            if there is no such folder.
        output: the model's folder; for components, the folder of the model they belong to.
        defaults: of the model's calls. note, recall: see `package_emoji`.

    Raises:
        ValueError: for an unknown package, run or default. FileNotFoundError: if a run is not finished.
    """
    if name not in PACKAGES:
        raise ValueError(f"name must be one of {', '.join(PACKAGES)}, got {name!r}")
    named = PACKAGES[name]
    folders = {key: expand_user(path, key) for key, path in (runs or {}).items()}
    if unknown := folders.keys() - named.keys():
        raise ValueError(f"{name} has no run {min(unknown)!r}; its runs: {', '.join(named)}")
    for key, recipe in named.items():
        place = output_folder(recipe) if recipe in RECIPES else Path("runs") / recipe
        if key not in folders and (key not in _OPTIONAL or place.is_dir()):
            folders[key] = place
    if defaults and name not in ("emoji", "emoji-var", "emoji-video"):
        raise ValueError(f"{name} has no call defaults: leave --set out")
    if recall is not None and name != "emoji":
        raise ValueError("recall is only for the card of emoji")
    _check_defaults(name, dict(defaults or {}))
    place = expand_user(output, "output") if output else PACKAGED / _MODELS.get(name, name)
    found = _package(name, folders, place, dict(defaults or {}), note, recall and expand_user(recall, "recall"))
    return {"output": str(place), "runs": {key: str(folder) for key, folder in folders.items()}, **found}


def _check_defaults(name: str, defaults: dict[str, Any]) -> None:
    if name != "emoji-video":
        validate_sampling(defaults)
        return
    for key, value in defaults.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if key not in ("tau", "scored_frames", "num_blocks"):
            raise ValueError(f"emoji-video has no default {key!r}: tau, scored_frames or num_blocks")
        if not number or (key != "tau" and (not isinstance(value, int) or value < 1)):
            raise ValueError(
                f"{key} must be a {'finite number' if key == 'tau' else 'whole number of at least 1'}, got {value!r}"
            )


def _package(
    name: str, runs: dict[str, Path], output: Path, defaults: dict[str, Any], note: str, recall: Path | None
) -> dict[str, Any]:
    emoji = PACKAGED / "emoji"
    if name == "emoji":
        package_emoji(runs["tokenizer"], runs["generator"], emoji, output, defaults, note, runs.get("drafter"), recall)
    elif name == "emoji-var":
        package_var(runs["tokenizer"], runs["model"], output, emoji, runs.get("small"), defaults, note)
    elif name == "emoji-video":
        drafter, preview = runs.get("drafter"), runs.get("preview")
        package_video(runs["vae"], runs["target"], output, emoji, drafter, preview, defaults, note=note)
    elif name == "emoji-scorer":
        return package_scorer(runs["scorer"], emoji, load_emoji_dataset(output_folder("emoji-data")), output, note)
    elif name == "emoji-low-res":
        return package_low_res(runs["low-res"], runs["upsampler"], output, note)
    elif name == "emoji-video-motions":
        return package_video_loras(runs["target"], output, runs.get("drafter"), note)
    elif name == "emoji-video-router":
        return package_router(runs["router"], output, note)
    else:
        return package_head(runs["head"], output, note)
    return {}
