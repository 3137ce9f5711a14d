"""Training configs: frozen dataclasses read from TOML files and validated before anything is loaded."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from vargen.training.focus import Focus

logger = logging.getLogger("vargen")

CONFIGS = Path(__file__).parent / "configs"  # TOML files of the drafters that users train


@dataclass(frozen=True)
class Schedule:
    """Number of steps and learning rate: linear warm-up, constant, then linear decay to zero.

    Because the middle is constant, a run can be extended: resuming with more `steps` only moves the decay.
    """

    steps: int = 1000
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    decay_fraction: float = 0.3

    def __post_init__(self) -> None:
        at_least(self, 1, "steps")
        at_least(self, 0, "warmup_steps", "learning_rate", "decay_fraction")

    def factor(self, step: int) -> float:
        """Return the multiplier of the learning rate at `step` (from 0), in [0, 1]."""
        warm = min(1.0, (step + 1) / max(self.warmup_steps, 1))
        decay_steps = max(self.decay_fraction * self.steps, 1.0)
        return max(0.0, min(warm, (self.steps - step) / decay_steps))


@dataclass(frozen=True)
class NextTokenConfig:
    """How to train a `LlamaGenTransformer` on tokens. `model` contains the keyword arguments of its constructor."""

    model: dict[str, Any]
    schedule: Schedule = field(default_factory=Schedule)
    focus: Focus = field(default_factory=Focus)
    seed: int = 0
    batch_size: int = 32
    caption_dropout: float = 0.1
    caption_rows: int = 16  # longer captions are truncated: one shape for all batches
    shift_pixels: int = 8  # augmentation: each image is tokenized at several offsets up to this
    shift_variants: int = 0
    mirrored: float = 0.0  # probability of mirroring images without text or a named side
    recoloured: float = 0.15  # probability of recoloring an image with a dominant color, and its caption
    dropout: float = 0.0
    token_noise: float = 0.1  # share of input tokens from other images, per image uniform from 0 to this
    wrong_starts: float = 0.0  # share of images whose input starts with another image's tokens
    near_noise: float = 0.0  # share of input tokens replaced by near codes, per image uniform from 0 to this
    start_weight: float = 1.0  # loss weight of the first tokens of an image's content; later tokens have weight 1
    optimizer: str = "muon"  # Muon for the matrices, AdamW for the rest; or "adamw" for all
    adamw_learning_rate: float = 3e-3
    adamw_beta2: float = 0.996
    weight_decay: float = 0.05
    averaged: float = 0.05  # final share of training over which weights are averaged
    drawn: int = 64  # images generated and scored at each evaluation; 0 for none
    compile: bool = False
    evaluate_every: int = 250
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "caption_rows", "evaluate_every", "checkpoint_every")
        at_least(self, 1, "start_weight")
        at_least(self, 0, "shift_pixels", "shift_variants", "dropout", "weight_decay", "drawn")
        noise = ("token_noise", "wrong_starts", "near_noise")
        for name in ("caption_dropout", "mirrored", "recoloured", *noise, "averaged", "adamw_beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a share from 0 to 1, got {getattr(self, name)!r}")
        if self.optimizer not in ("muon", "adamw"):
            raise ValueError(f"optimizer must be 'muon' or 'adamw', got {self.optimizer!r}")


def at_least(recipe: Any, least: int, *names: str) -> None:
    """Raise ValueError if a field is less than `least` or not a number."""
    for name in names:
        if not getattr(recipe, name) >= least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(recipe, name)!r}")


R = TypeVar("R")


def _warmed_up(recipe: R) -> R:
    """Shorten a warm-up that exceeds the run; otherwise the run would never reach its learning rate."""
    changed: Any = recipe
    schedule: Schedule = changed.schedule
    if schedule.warmup_steps <= schedule.steps:
        return recipe
    logger.warning("the warm-up of %d steps is cut to the run's %d", schedule.warmup_steps, schedule.steps)
    return replace(changed, schedule=replace(schedule, warmup_steps=schedule.steps))


def load_config(
    source: str | Path,
    kind: type[R],
    steps: int | None = None,
    settings: Mapping[str, Any] | None = None,
    folders: Sequence[Path] = (CONFIGS,),
) -> R:
    """Read a config from a TOML file, or a packaged one by name (`eagle`, `low-res`, ...).

    Args:
        steps: length of the run, overriding the file's. A warm-up longer than the run is shortened to it, with a warning.
        settings: values by dotted key (`schedule.learning_rate`) that override the file's.
        folders: where to look for packaged configs.

    Raises:
        FileNotFoundError: if there is neither a file nor a packaged config of that name.
        ValueError: for malformed TOML, an unknown key (with the nearest known one), a value of a wrong type, or phases that do
            not fit into the steps.
    """
    path = Path(source)
    if not path.is_file():
        packaged = {file.stem: file for folder in folders for file in folder.glob("*.toml")}
        if str(source) not in packaged:
            known = ", ".join(sorted(packaged))
            raise FileNotFoundError(f"recipe {str(source)!r} is neither a file nor a packaged recipe ({known})")
        path = packaged[str(source)]
    try:
        values = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"recipe {path}: not valid TOML: {error}") from error
    for key, value in {**(settings or {}), **({} if steps is None else {"schedule.steps": steps})}.items():
        *tables, name = key.split(".")
        table = values
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ValueError(f"{path}: {key!r} cannot be set: {part!r} is no table")
        table[name] = value
    return _warmed_up(from_dict(kind, values, str(path)))


def from_dict(kind: type[R], values: dict[str, Any], where: str) -> R:
    """Create an instance of the dataclass `kind` from nested `values`; unknown keys and wrong types are errors."""
    hints = typing.get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            raise ValueError(
                f"{where}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(hints)}")
            )
        expected = hints[key]
        if dataclasses.is_dataclass(expected) and isinstance(expected, type):
            value = from_dict(expected, value, f"{where} [{key}]")
        else:
            origin = typing.get_origin(expected) or expected
            accepted: Any = (int, float) if origin is float else origin
            if isinstance(accepted, types.UnionType) or (
                isinstance(value, accepted) and not (isinstance(value, bool) and origin is not bool)
            ):
                value = float(value) if origin is float else value
            else:
                raise ValueError(f"{where}: {key} must be {expected}, got {value!r}")
        arguments[key] = value
    missing = [
        f.name
        for f in dataclasses.fields(kind)  # type: ignore[arg-type]
        if f.name not in arguments and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}")
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
