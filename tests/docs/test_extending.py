"""docs/extending.md and examples/extending are run as they stand: files, lines, tests, proofs."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from markdown import blocks, commands, prose
from recorded_graph import RecordedGraph, captured_passes
from rejects import rejects
from tiny_models import class_pipeline, text_pipeline, tiny_transformer
from tiny_targets import take_gpu_paths, tiny_target
from typer.testing import CliRunner

from vargen.cli.main import app
from vargen.decoding import Accelerator, Draft, Engine, GroupedRule, Noise, Sampling, Tree, decode
from vargen.models.guidance import Condition
from vargen.pipelines.families import register_family
from vargen.pipelines.loading import FAMILIES, inspect_model


@pytest.fixture
def guide(repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The files of examples/extending in the current folder."""
    files = {path.name: path.read_text("utf-8") for path in sorted((repo_root / "examples/extending").glob("*.py"))}
    for name, code in files.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    families = dict(FAMILIES)
    yield files
    for name in files:
        sys.modules.pop(name.removesuffix(".py"), None)
    FAMILIES.clear()
    for family in families.values():
        register_family(family)


def test_the_page_shows_the_files(guide: dict[str, str], repo_root: Path) -> None:
    shown = blocks(repo_root / "docs/extending.md", "python")
    assert [block.file for block in shown] == ["typical.py", "methods.py", "lookup.py", "methods.py"]
    for block in shown:
        assert block.code.split("\n", 1)[1] in guide[str(block.file)], block.file


def test_one_file_one_line_one_test(guide: dict[str, str]) -> None:
    tests = [name for name in guide if name.startswith("test_")]
    assert tests == [f"test_{name}.py" for name in ("colorfulness", "linear_heads", "lookup", "palette", "typical")]
    for name in tests:
        module = importlib.import_module(name.removesuffix(".py"))
        (test,) = [value for key, value in vars(module).items() if key.startswith("test_")]
        test()


def test_the_proofs_come_out_as_the_guide_says(guide: dict[str, str], repo_root: Path) -> None:
    asked = [words for words in commands(repo_root / "docs/extending.md", "vargen") if words[0] == "verify"]
    names = [name for words in asked for name in words[1:]]
    assert names == ["methods:lookup", "methods:medusa_like", "dishonest:wrong"]
    result = CliRunner().invoke(app, ["verify", *names, "--json"])
    assert result.exit_code == 1
    lookup, medusa_like, wrong = json.loads(result.stdout)
    assert (lookup["claims"], lookup["exact"], lookup["detects_controls"]) == ("exact", True, True)
    assert (medusa_like["claims"], medusa_like["exact"], medusa_like["keeps_its_claim"]) == ("relaxed", False, True)
    assert (wrong["claims"], wrong["exact"]) == ("exact", False)
    exec(compile(guide["proof.py"], "proof.py", "exec"), {})


def test_the_methods_and_the_scorer_generate_images(guide: dict[str, str], repo_root: Path) -> None:
    methods: Any = importlib.import_module("methods")
    pipe = text_pipeline(grid_size=6)

    def generated(method: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.as_tensor(pipe("a red apple", accelerator=method, generator=generator, output_type="latent").images)

    assert torch.equal(generated(methods.lookup_shared), generated("ar"))
    for method in (methods.medusa_like, methods.lookup):
        assert pipe("a red apple", accelerator=method).stats.accelerator == method.name
    (call,) = re.findall(r"`(pipe\(.*scorer=.*\))`", prose(repo_root / "docs/extending.md"))
    scope = {"pipe": pipe, **vars(importlib.import_module("colorfulness"))}
    assert len(eval(call, scope).images) == 1


@pytest.mark.parametrize("name", ["lookup", "lookup_shared"])
def test_the_drafter_is_captured_and_its_images_join(guide: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of the guide's drafter, repeated as a graph, generate what they generate one by one."""
    take_gpu_paths(monkeypatch)
    monkeypatch.setattr(RecordedGraph, "made", 0)
    monkeypatch.setattr(RecordedGraph, "replays", 0)
    method: Accelerator = getattr(importlib.import_module("methods"), name)
    model, conditions, seeds = tiny_target(), Condition(class_labels=torch.arange(1, 6)), torch.arange(3, 8)
    sampling = Sampling(0.7, top_k=4)  # few tokens, so that they occur again
    expected = decode(model, conditions, seeds, method, sampling)
    with captured_passes():
        found = decode(model, conditions, seeds, method, sampling)
        engine = Engine(model, method, batch_size=2)
    assert torch.equal(found.tokens, expected.tokens) and expected.stats.tokens_per_pass > 1
    assert found.stats.committed_histogram == expected.stats.committed_histogram
    assert RecordedGraph.made == 1 and RecordedGraph.replays == expected.stats.passes - 3, "but the prefill and two passes"
    engine.submit(conditions, seeds, sampling)
    joined = {image.number: image.tokens for image in engine.run()}
    assert all(torch.equal(joined[row], tokens) for row, tokens in enumerate(expected.tokens))
    assert RecordedGraph.made == 2


def test_relaxation_is_counted_alike_by_every_rule(guide: dict[str, str]) -> None:
    """Where an image has no valid draft, no rule has granted anything."""
    typical: Any = importlib.import_module("typical").typical
    probs = torch.full((1, 3, 4), 0.25)
    invalid = torch.zeros(1, 2, dtype=torch.bool)
    draft = Draft(torch.tensor([[0, 1]]), Tree.make_chain(2), torch.full((1, 2, 4), 0.9), invalid)
    noise = Noise(torch.arange(1), torch.arange(3)[None], step=1)
    for rule in (typical, GroupedRule(size=2, delta=1.0)):
        assert rule(probs, draft, noise, torch.zeros(1)).relaxation.tolist() == [0.0]


def test_a_registered_drafter_is_trained_by_its_name(guide: dict[str, str], tmp_path: Path) -> None:
    importlib.import_module("linear_heads")
    class_pipeline().save_pretrained(tmp_path / "model")
    settings = "num_images = 8\nvalidation_images = 2\ngeneration_batch_size = 4\nbatch_size = 2"
    (tmp_path / "tiny.toml").write_text(f"{settings}\n[schedule]\nsteps = 2\nwarmup_steps = 1\n")
    words = ["train", "drafter", "linear", "--model", str(tmp_path / "model"), "--recipe", "tiny.toml", "--output", "run"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    pipe = class_pipeline()
    assert pipe.load_drafter("run") == "linear"


def test_a_folder_of_a_registered_family_is_checked(guide: dict[str, str], tmp_path: Path) -> None:
    palette: Any = importlib.import_module("palette")
    palette.PalettePipeline(vqvae=palette.Palette(64), transformer=tiny_transformer("class")).save_pretrained(
        tmp_path / "model"
    )
    file = tmp_path / "model" / "model_index.json"
    index = json.loads(file.read_text())
    assert isinstance(inspect_model(tmp_path / "model"), palette.PalettePipeline)
    for vqvae in (["vargen.models.tokenizers.vq", "VQModel"], ["palette", "Other"], [None, None]):
        file.write_text(json.dumps({**index, "vqvae": vqvae}))
        rejects(lambda: inspect_model(tmp_path / "model"), "vqvae")
    file.write_text(json.dumps(index))
