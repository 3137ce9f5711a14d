"""The example of CONTRIBUTING.md is run as it stands: a new rule takes one function, one preset line and one test."""

import re
from dataclasses import replace
from pathlib import Path

import torch

from vargen.decoding import Accelerator, Draft, Grouped, Jacobi, Noise, Tree, decode
from vargen.evaluation.table_model import TableModel


def test_the_example_of_a_new_rule_works(repo_root: Path) -> None:
    text = (repo_root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Adding an acceptance rule")[1].split("\n## ")[0]
    function, preset, test = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    scope = {"torch": torch, "replace": replace, "Accelerator": Accelerator, "Jacobi": Jacobi}
    scope |= {"Draft": Draft, "Noise": Noise, "Tree": Tree}
    for block in (function, preset, test):
        exec(block, scope)
    scope["test_typical_accepts_what_the_target_finds_typical"]()
    accelerator = scope["typical_preset"]
    assert accelerator.kind == "relaxed" and accelerator.name == "typical"
    result = decode(TableModel(vocab=4, tokens=30), torch.zeros(8, dtype=torch.int64), torch.arange(8), accelerator)
    assert result.finished and result.stats.tokens_per_pass > 1.1 and max(result.stats.relaxation) > 0


def test_relaxation_is_counted_alike_by_every_rule(repo_root: Path) -> None:
    """Where an image has no valid draft, no rule has granted anything."""
    text = (repo_root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    scope: dict = {"replace": replace}
    exec(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0], scope)
    probs = torch.full((1, 3, 4), 0.25)
    invalid = torch.zeros(1, 2, dtype=torch.bool)
    draft = Draft(torch.tensor([[0, 1]]), Tree.of_chain(2), torch.full((1, 2, 4), 0.9), invalid)
    noise = Noise(torch.arange(1), torch.arange(3)[None], step=1)
    for rule in (scope["typical"], Grouped(size=2, delta=1.0)):
        assert rule(probs, draft, noise, torch.zeros(1)).relaxation.tolist() == [0.0]
