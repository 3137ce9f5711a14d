"""The training loop `fit`, and a training run on disk: checkpoint and log.

A run killed at any moment resumes from its last checkpoint. Batches are functions of (seed, step), so no random state needs
saving, and a resumed run sees the same data as an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn
from tqdm.auto import tqdm

from vargen.device import preferred_dtype
from vargen.files import atomic_file, atomic_merge
from vargen.weight_files import load_pickle_safely

logger = logging.getLogger("vargen")

CHECKPOINT = "checkpoint.pt"
_LOG_EVERY = 10  # steps


class TrainingRun:
    """Checkpoint and log in one folder: `checkpoint.pt`, `log.jsonl`.

    Args:
        folder: the run directory; `load_checkpoint` creates it if missing.
        settings: what must be equal to resume a run (the model's shape, the seed).
        steps: total number of steps.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], steps: int):
        self.folder = folder
        self.settings = json.loads(json.dumps(settings))
        self.steps = steps
        self.started = time.monotonic()
        self.seconds_before = 0.0

    @property
    def seconds(self) -> float:
        """Training time so far, over all resumes."""
        return self.seconds_before + time.monotonic() - self.started

    def load_checkpoint(self, map_location: torch.device | str = "cpu") -> dict[str, Any] | None:
        """Return the last checkpoint (`{"step": ..., ...}`), or None for a new run.

        Creates the folder if it is missing, and locks it for this process.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock()
        path = self.folder / CHECKPOINT
        if not path.is_file():
            self._trim_log(0)  # of a run that was killed before its first checkpoint
            return None
        state = read_training_checkpoint(path, map_location)
        if state["settings"] != self.settings:
            raise ValueError(
                f"{self.folder} contains a run with other settings ({state['settings']}); give another --output or remove it"
            )
        if state["step"] > self.steps:
            raise ValueError(
                f"the run in {self.folder} has already done {state['step']} steps and cannot end at {self.steps}: "
                "give more steps, or another --output"
            )
        self.seconds_before = state["seconds"]
        self._trim_log(state["step"])
        return state

    def _lock(self) -> None:
        """Lock the folder, because two runs would overwrite each other's checkpoints.

        The system releases the lock of a killed process.
        """
        lock = FileLock(self.folder / "run.lock", is_singleton=True)  # this process may lock it again
        try:
            with contextlib.suppress(NotImplementedError):  # the file system has no locks
                lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"another process trains in {self.folder}: stop it first, or give another --output") from None
        self._held = lock  # for the lifetime of this run

    def save_checkpoint(self, step: int, **state: Any) -> None:
        """Save `state` after the completed `step`, atomically."""
        record = {"step": step, "seconds": self.seconds, "settings": self.settings, **state}
        with atomic_file(self.folder / CHECKPOINT) as temporary:
            torch.save(record, temporary)

    def log(self, step: int, **values: float | Tensor) -> None:
        line = {"step": step, "seconds": round(self.seconds, 1)}
        line.update({k: float(v) for k, v in values.items()})
        with open(self.folder / "log.jsonl", "a") as log:
            log.write(json.dumps(line) + "\n")

    def _trim_log(self, step: int) -> None:
        """Remove the log lines after the checkpoint: they will be written again."""
        path = self.folder / "log.jsonl"
        if not path.is_file():
            return
        kept = []
        for line in path.read_text(errors="replace").splitlines():
            try:
                record = json.loads(line)
                if record["step"] <= step:
                    kept.append(line)
            except (ValueError, TypeError, KeyError):  # the process was killed while writing a line, maybe within a number
                continue
        with atomic_file(path) as temporary:
            temporary.write_text("".join(line + "\n" for line in kept))

    def read_log(self) -> list[dict[str, float]]:
        path = self.folder / "log.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def progress(self, start: int) -> tqdm:
        return tqdm(range(start, self.steps), initial=start, total=self.steps, desc=self.folder.name, mininterval=5)


def read_training_checkpoint(path: Path, map_location: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint; ValueError if it is damaged or of another kind."""
    hint = "remove it to start again, or give another --output"
    state = load_pickle_safely(path, map_location=map_location, advice=hint)
    kinds = {"step": int, "seconds": float, "settings": dict}
    if not isinstance(state, dict) or not all(isinstance(state.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"{path} is not a checkpoint of a training run; {hint}")
    return state


class Trainer(ABC):
    """A network, its optimizers and its run directory: what `fit` trains.

    Subclasses create `optimizers`, and extend `state_dict` and `load_state_dict` if a step changes more than the network and
    its optimizers.

    Args:
        config: has `model`, `seed`, `schedule`, `evaluate_every` and `checkpoint_every`.
        model: the network to train. kind: the kind of run.
        identity: further settings that must be equal to resume the run.

    Attributes:
        checkpoint: the checkpoint to resume from, until `fit` loads it.
        dtype: of autocast, bfloat16 where it is fast.
    """

    optimizers: list[torch.optim.Optimizer]

    def __init__(self, config: Any, model: Any, folder: Path, device: torch.device, kind: str, **identity: Any):
        self.config, self.model, self.folder, self.device = config, model.to(device), folder, device
        self.dtype = preferred_dtype(device)
        settings = {"kind": kind, "model": config.model, "seed": config.seed, **identity}
        self.run = TrainingRun(folder, settings, config.schedule.steps)
        self.checkpoint = self.run.load_checkpoint(device)

    @abstractmethod
    def step(self, step: int) -> Mapping[str, float | Tensor]:
        """Run one training step, a function of the state and of the step's number; returns the values to log."""

    @abstractmethod
    def evaluate(self) -> Mapping[str, float]:
        """Return the metrics to log between steps."""

    def amp(self) -> torch.autocast:
        """Return a context that computes in bfloat16 where it is fast."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def update(self, step: int, loss: Tensor) -> None:
        """Take an optimizer step at the schedule's learning rate, with gradients clipped to a norm of 1."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = optimizer.defaults["lr"] * self.config.schedule.factor(step)
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that steps change."""
        return {"model": self.model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)


def fit(trainer: Trainer) -> None:
    """Train from the last checkpoint to the end of the schedule.

    Losses are logged every ten steps. The trainer evaluates every `evaluate_every` steps except after the last, when its
    network is exported with its final metrics.
    """
    run, config, start = trainer.run, trainer.config, 0
    if trainer.checkpoint is not None:
        start = trainer.checkpoint["step"]
        trainer.load_state_dict(trainer.checkpoint)
        trainer.checkpoint = None
    trainer.model.train()
    for step in run.progress(start):
        values = trainer.step(step)
        done = step + 1
        if done % _LOG_EVERY == 0:
            run.log(done, **values)
        if done % config.evaluate_every == 0 and done != run.steps:
            run.log(done, **trainer.evaluate())
            trainer.model.train()
        if done % config.checkpoint_every == 0 or done == run.steps:
            run.save_checkpoint(done, **trainer.state_dict())


def export(run: TrainingRun, network: Any, part: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Save a trained network to the sub-folder `part` and log its metrics, which are returned.

    The metrics are also logged with the prefix `final_`.
    """
    if not all(map(math.isfinite, metrics.values())):
        raise ValueError(f"the run in {run.folder} diverged ({dict(metrics)}): lower the learning rate")
    run.log(run.steps, **metrics, **{f"final_{name}": value for name, value in metrics.items()})
    with atomic_merge(run.folder / part) as staged:
        network.eval().save_pretrained(staged)
    logger.info("%s: %s", run.folder / part, dict(metrics))
    return dict(metrics)


# -- configurations, read from TOML files ----------------------------------------------------------------------------------


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
