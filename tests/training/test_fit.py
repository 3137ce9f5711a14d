"""The training loop, with a toy trainer: killed at any step, a run ends as an uninterrupted one does."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from rejects import rejects
from tiny_training import Killed

from vargen.training.loop import Schedule, Trainer, export, fit

STEPS = 11


@dataclass(frozen=True)
class ToyConfig:
    model: dict = field(default_factory=dict)
    seed: int = 0
    schedule: Schedule = field(default_factory=lambda: Schedule(steps=STEPS, learning_rate=0.1, warmup_steps=2))
    evaluate_every: int = 3
    checkpoint_every: int = 4


class Network(torch.nn.Linear):
    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        torch.save(self.state_dict(), folder / "weights.pt")


class ToyTrainer(Trainer):
    """Its state is a network, an optimizer with momenta, and an average of the weights."""

    def __init__(self, folder: Path, config: ToyConfig, killed_at: int | None):
        torch.manual_seed(config.seed)
        super().__init__(config, Network(3, 2), folder, torch.device("cpu"), "toy")
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), lr=0.1)]
        self.average, self.killed_at = self.model.weight.detach().clone(), killed_at

    def state_dict(self) -> dict:
        return {**super().state_dict(), "average": self.average}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.average = state["average"]

    def step(self, step: int) -> dict:
        if step == self.killed_at:
            raise Killed
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        loss = self.model(x).square().mean()
        self.update(step, loss)
        self.average = self.average.lerp(self.model.weight.detach(), 0.1)
        return {"loss": loss.detach()}

    def evaluate(self) -> dict:
        return {"average": float(self.average.abs().sum())}


def train(folder: Path, killed_at: int | None = None, config: ToyConfig | None = None) -> tuple[dict, bytes, list]:
    trainer = ToyTrainer(folder, config or ToyConfig(), killed_at)
    fit(trainer)
    metrics = export(trainer.run, trainer.model, "network", trainer.evaluate())
    log = [{**line, "seconds": 0} for line in trainer.run.read_log()]
    return metrics, (folder / "network" / "weights.pt").read_bytes(), log


@pytest.mark.parametrize("checkpoint_every", [1, 4])
def test_a_run_killed_at_any_step_ends_as_an_uninterrupted_one(tmp_path: Path, checkpoint_every: int) -> None:
    config = ToyConfig(checkpoint_every=checkpoint_every)
    expected = train(tmp_path / "whole", config=config)
    assert {line["step"] for line in expected[2] if "average" in line} == {3, 6, 9, STEPS}
    for step in range(STEPS):
        with pytest.raises(Killed):
            train(tmp_path / str(step), step, config)
        assert train(tmp_path / str(step), config=config) == expected, step
    assert train(tmp_path / "whole", config=config)[:2] == expected[:2], "a finished run is exported again"


def test_metrics_that_are_not_finite_are_not_exported(tmp_path: Path) -> None:
    trainer = ToyTrainer(tmp_path, ToyConfig(), None)
    rejects(lambda: export(trainer.run, trainer.model, "network", {"loss": float("nan")}), "diverged")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.lock"]
