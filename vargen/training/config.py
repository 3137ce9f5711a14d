"""Training configs: frozen dataclasses read from TOML files and validated before anything is loaded."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

CONFIGS = Path(__file__).parent / "configs"  # TOML files of the drafters that users train


@dataclass(frozen=True)
class Schedule:
    """Number of steps and learning rate: linear warm-up, constant, then linear decay to zero.

    Because the middle is constant, a run can be extended: resuming with more `steps` only moves the decay. A warm-up that is
    longer than the run is shortened to it.
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
        warm = min(1.0, (step + 1) / max(min(self.warmup_steps, self.steps), 1))
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


def load_config(source: str | Path, kind: type[R], steps: int | None = None) -> R:
    """Read a config from a TOML file, or a packaged one by name (`eagle`, `low-res`, ...).

    Args:
        steps: length of the run, overriding the file's.
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
        schedule = {**values.pop("schedule", {}), **({} if steps is None else {"steps": steps})}
        return kind(**values, schedule=Schedule(**schedule))
    except (ValueError, TypeError) as error:  # no TOML, an unknown key, or a value that is out of range
        raise ValueError(f"recipe {path}: {error}") from None
