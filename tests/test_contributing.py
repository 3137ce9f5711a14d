"""The example of CONTRIBUTING.md is run as it stands: a new rule takes one function, one preset line and one test."""

import re
from dataclasses import replace
from pathlib import Path

import torch
from table_model import TableModel

from vargen.decoding import Accelerator, Draft, Jacobi, Noise, Tree, decode


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
    assert result.finished and result.stats.tokens_per_pass > 1.1 and max(result.stats.relaxation_spent) > 0
