"""A training run on disk: checkpoint, log and curves. A run killed at any moment resumes from its last checkpoint.

Batches are functions of (seed, step), so no random state needs saving, and a resumed run sees the same data as an uninterrupted
one.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from tqdm.auto import tqdm

from vargen.compat import check_matplotlib
from vargen.files import atomic_file
from vargen.weight_files import load_pickle_safely


class TrainingRun:
    """Checkpoint, log and plots in one folder: `state.pt`, `log.jsonl`, `curves.png`.

    Args:
        folder: the run directory; `resume` creates it if missing.
        fingerprint: settings that must be equal to resume (the model's shape, the seed).
        steps: total number of steps, for the progress bar.
    """

    def __init__(self, folder: Path, fingerprint: dict[str, Any], steps: int):
        self.folder = folder
        self.fingerprint = json.loads(json.dumps(fingerprint))
        self.steps = steps
        self.started = time.monotonic()
        self.seconds_before = 0.0

    @property
    def seconds(self) -> float:
        """Training time so far, over all resumes."""
        return self.seconds_before + time.monotonic() - self.started

    def resume(self, map_location: torch.device | str = "cpu", needs: Iterable[str] = ()) -> dict[str, Any] | None:
        """Return the last checkpoint (`{"step": ..., ...}`), or None for a new run.

        Creates the folder if it is missing, and locks it for this process.

        Args:
            needs: keys that the checkpoint must contain.

        Raises:
            ImportError: without matplotlib, which the curves need.
            ValueError: if another process trains in the folder, or if it contains a run with another fingerprint, a run that is
                already past this run's last step, or a checkpoint that is damaged or of another kind.
        """
        check_matplotlib("the curves of a run need")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock()
        path = self.folder / "state.pt"
        if not path.is_file():
            return None
        other = "remove it to begin anew, or give another --output"
        state = load_pickle_safely(path, map_location=map_location, if_damaged=other, if_foreign=other)
        kinds = {"step": int, "seconds": float, "fingerprint": dict}
        if (
            not isinstance(state, dict)
            or not all(isinstance(state.get(name), kind) for name, kind in kinds.items())
            or not all(name in state for name in needs)
        ):
            raise ValueError(f"{path} is no checkpoint of such a run; {other}")
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"{self.folder} holds a run of another recipe ({state['fingerprint']}); give another --output or remove it"
            )
        if state["step"] > self.steps:
            raise ValueError(
                f"the run in {self.folder} has {state['step']} steps behind it and cannot end at {self.steps}: "
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

    def checkpoint(self, step: int, **state: Any) -> None:
        """Save `state` after the completed `step`, atomically."""
        record = {"step": step, "seconds": self.seconds, "fingerprint": self.fingerprint, **state}
        with atomic_file(self.folder / "state.pt") as temporary:
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

    def records(self) -> list[dict[str, float]]:
        path = self.folder / "log.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def progress(self, start: int) -> tqdm:
        return tqdm(range(start, self.steps), initial=start, total=self.steps, desc=self.folder.name, mininterval=5)

    def plot(self, *panels: tuple[str, ...]) -> Path:
        """Write `curves.png`: one panel per tuple of logged names, against steps."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 3.6), squeeze=False)
        records = self.records()
        for axis, names in zip(axes[0], panels, strict=True):
            for name in names:
                points = [(r["step"], r[name]) for r in records if name in r]
                if points:
                    axis.plot(*zip(*points, strict=True), label=name.replace("_", " "), linewidth=1.2)
            axis.set_xlabel("step")
            axis.grid(alpha=0.3)
            axis.legend()
        figure.tight_layout()
        target = self.folder / "curves.png"
        with atomic_file(target) as temporary:
            figure.savefig(temporary, format="png", dpi=100)
        pyplot.close(figure)
        return target
