"""Next-scale runs join to a folder that opens, is small, and names no folder of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rejects import rejects
from safetensors.torch import load_file
from tiny_models import tiny_multi_scale_vq, tiny_var

import vargen.assets
from recipes.package import package_var
from vargen.pipelines.registry import open_pipeline

SHARED_FROM = vargen.assets.packaged_model_path("emoji")
FIGURES = {"step": 40, "seconds": 3600.0, "loss_seen": 3.25, "loss_styles": 3.5, "loss_concepts": 4.125, "rank_seen": 1.0,
           "rank_styles": 0.94, "rank_concepts": 0.65}  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, Path]:
    found = {name: tmp_path / name for name in ("tokenizer", "model", "small")}
    tiny_multi_scale_vq().save_pretrained(found["tokenizer"] / "vqvae")
    for seed, name in enumerate(("model", "small")):
        tiny_var("text", seed, caption_dim=384).save_pretrained(found[name] / "transformer")
        (found[name] / "log.jsonl").write_text(json.dumps(FIGURES) + "\n")
    (found["tokenizer"] / "log.jsonl").write_text(json.dumps({"step": 30, "seconds": 7200.0, "psnr": 22.5}) + "\n")
    return found


def test_the_folder_opens_and_generates_with_a_borrowed_encoder(runs: dict[str, Path], tmp_path: Path) -> None:
    named = {"small_run": runs["small"], "defaults": {"temperature": 0.7, "top_k": 32}, "note": "On a slow machine."}
    folder = package_var(runs["tokenizer"], runs["model"], tmp_path / "out", SHARED_FROM, **named)
    assert not (folder / "text_encoder").exists() and not (folder / "tokenizer").exists()
    pipe = open_pipeline(folder, torch_dtype=torch.float32)
    assert pipe.default_sampling == {"guidance_scale": 3.0, "temperature": 0.7, "top_k": 32, "top_p": 1.0}
    assert pipe("😺", accelerator="code", generator=torch.Generator().manual_seed(0)).images[0].size == (8, 8)
    for part in ("vqvae", "transformer", "draft_transformer"):
        weights = folder / part / "diffusion_pytorch_model.safetensors"
        assert any(value.dtype == torch.int8 for value in load_file(weights).values()), part
        assert weights.stat().st_mode & 0o044 == 0o044
    card = (folder / "README.md").read_text()
    for said in ("22.50 dB", "2.00 hours", "3.25, 3.50, 4.12", "100%, 94%, 65%", "| small | 40 |", "On a slow machine."):
        assert said in card, said
    assert not [file for file in folder.rglob("*.json") if str(tmp_path) in file.read_text()], "no folder of this machine"


def test_an_unfinished_run_leaves_the_old_folder(runs: dict[str, Path], tmp_path: Path) -> None:
    package_var(runs["tokenizer"], runs["model"], tmp_path / "out", SHARED_FROM)
    before = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    with pytest.raises(FileNotFoundError, match="finish the training run first"):
        package_var(runs["tokenizer"], tmp_path / "nothing", tmp_path / "out", SHARED_FROM)
    assert before == {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}


def test_runs_of_different_tokenizers_are_not_joined(runs: dict[str, Path], tmp_path: Path) -> None:
    (runs["small"] / "latents-0123456789abcdef-0-8-7.npy").write_bytes(b"")
    rejects(lambda: package_var(runs["tokenizer"], runs["model"], tmp_path / "out", SHARED_FROM, runs["small"]), "small")
    assert not (tmp_path / "out").exists()
