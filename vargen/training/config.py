"""Training configs: frozen dataclasses read from TOML files and validated before anything is loaded."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import tomllib
import types
import typing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

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


def at_least(config: Any, least: int, *names: str) -> None:
    """Raise ValueError if a field is less than `least` or not a number."""
    for name in names:
        if not getattr(config, name) >= least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(config, name)!r}")


def validate_fractions(config: Any, *names: str) -> None:
    """Raise ValueError if a field is not a number from 0 to 1."""
    for name in names:
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"{name} must be from 0 to 1, got {getattr(config, name)!r}")


R = TypeVar("R")


def _clip_warmup(config: R) -> R:
    """Shorten a warm-up that exceeds the run; otherwise the run would never reach its learning rate."""
    changed: Any = config
    schedule: Schedule = changed.schedule
    if schedule.warmup_steps <= schedule.steps:
        return config
    logger.warning("the warm-up of %d steps is shortened to the run's %d", schedule.warmup_steps, schedule.steps)
    return replace(changed, schedule=replace(schedule, warmup_steps=schedule.steps))


def load_config(source: str | Path, kind: type[R], steps: int | None = None) -> R:
    """Read a config from a TOML file, or a packaged one by name (`eagle`, `low-res`, ...).

    Args:
        steps: length of the run, overriding the file's. A warm-up longer than the run is shortened to it, with a warning.

    Raises:
        FileNotFoundError: if there is neither a file nor a packaged config of that name.
        ValueError: for malformed TOML, an unknown key (with the nearest known one), or a value of a wrong type.
    """
    path = Path(source)
    if not path.is_file():
        packaged = {file.stem: file for file in CONFIGS.glob("*.toml")}
        if str(source) not in packaged:
            known = ", ".join(sorted(packaged))
            raise FileNotFoundError(f"recipe {str(source)!r} is neither a file nor a packaged recipe ({known})")
        path = packaged[str(source)]
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {path}: not valid TOML: {error}") from error
    if steps is not None:
        schedule = values.setdefault("schedule", {})
        if not isinstance(schedule, dict):
            raise ValueError(f"recipe {path}: schedule must be a table, got {schedule!r}")
        schedule["steps"] = steps
    return _clip_warmup(from_dict(kind, values, str(path)))


def from_dict(kind: type[R], values: dict[str, Any], where: str) -> R:
    """Create an instance of the dataclass `kind` from nested `values`; unknown keys and wrong types are errors."""
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a table, got {values!r}")
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
