"""The training scripts at tiny size: what they write opens and generates, and a run killed at any step ends as a whole one."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from rejects import rejects
from tiny_models import teacher_inputs, tiny_encoder, tiny_multi_scale_vq, tiny_vq
from tiny_training import check_resumes, data

from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.tokenizers.vq import VQModel
from vargen.pipelines.loading import open_pipeline
from vargen.training.loop import Schedule
from vargen.training.low_resolution import GeneratorConfig

CPU = torch.device("cpu")
ENCODER = tiny_encoder()
SCRIPTS = ("train_llamagen", "train_tokenizer", "train_var", "train_video")


@pytest.fixture(scope="module")
def scripts(repo_root: Path) -> dict[str, ModuleType]:
    """The scripts as modules; the folder is no package."""
    found = {}
    for name in SCRIPTS:
        spec = importlib.util.spec_from_file_location(f"recipe_{name}", repo_root / "recipes" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        found[name] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = found[name]  # dataclasses look their module up
        spec.loader.exec_module(found[name])
    return found


def short(**changes: Any) -> dict[str, Any]:
    return {
        "schedule": Schedule(steps=8, learning_rate=2e-3, warmup_steps=2), "batch_size": 4, "evaluate_every": 4,
        "checkpoint_every": 3, **changes,
    }  # fmt: skip


def generate(folder: Path, **options: Any) -> Any:
    pipe = open_pipeline(folder)
    return pipe("a red apple", **options)


def test_every_script_is_tried_here(repo_root: Path) -> None:
    assert sorted(file.stem for file in (repo_root / "recipes").glob("*.py")) == sorted(SCRIPTS)


@pytest.mark.parametrize("multi_scale", [False, True])
def test_a_tokenizer_resumes_and_reconstructs(scripts: dict[str, ModuleType], tmp_path: Path, multi_scale: bool) -> None:
    script = scripts["train_tokenizer"]
    model = {"codebook_size": 32, "ch": 32, "codebook_embed_dim": 4}
    levels = {"encoder_ch_mult": (1, 1), "decoder_ch_mult": (1, 1), "num_res_blocks": 1, "z_channels": 32}
    scales = {"architecture": "hybrid", "ch_mult": (1, 2), "num_res_blocks": 1, "transformer_blocks": 1, "patch_size": 2}
    model |= {**scales, "scales": (1, 2, 4), "scale_gains": True} if multi_scale else levels
    schedule = Schedule(steps=12, learning_rate=2e-3, warmup_steps=2)
    config = script.TokenizerConfig(model, **short(schedule=schedule, autoencoder_steps=4, revive_every=2))

    def train(folder: Path) -> dict[str, float]:
        return script.train_tokenizer(data(), folder, config, CPU, multi_scale)

    check_resumes(train, tmp_path, 7, "vqvae")
    opened = (MultiScaleVQModel if multi_scale else VQModel).from_pretrained(tmp_path / "whole" / "vqvae")
    assert multi_scale or 0 <= opened.config.blank_code < 32
    rejects(lambda: script.TokenizerConfig(model, schedule=Schedule(steps=100)), "steps")


def test_a_codebook_finds_clusters_and_revives_codes(scripts: dict[str, ModuleType]) -> None:
    generator = torch.Generator().manual_seed(0)
    centers = torch.tensor([[0.0, 0.0], [5.0, 5.0], [-5.0, 5.0]])
    latents = centers.repeat(200, 1) + 0.01 * torch.randn(600, 2, generator=generator)
    weight = torch.zeros(12, 2)
    codebook = scripts["train_tokenizer"].Codebook(weight, 0.5, unit=False)
    codebook.fit(latents, generator)
    assert torch.cdist(latents, weight).amin(-1).max() < 0.1
    for _ in range(30):  # one code is used for everything
        codebook.update(latents, torch.zeros(600, dtype=torch.long))
    assert (codebook.counts < 0.03).sum() == 11 and codebook.revive(latents, generator) == 11
    assert (codebook.counts >= 0.03).all() and torch.cdist(latents, weight).amin(-1).max() < 0.1
    unit = scripts["train_tokenizer"].Codebook(torch.zeros(4, 2), 0.5, unit=True)
    unit.fit(torch.nn.functional.normalize(latents, dim=-1), generator)
    torch.testing.assert_close(unit.weight.norm(dim=-1), torch.ones(4))


def test_a_llamagen_resumes_opens_and_generates(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    tiny_vq().save_pretrained(tmp_path / "vqvae")
    model = {
        "dim": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "grid_size": 8, "caption_dim": 32, "cls_token_num": 16,
        "multiple_of": 32,
    }  # fmt: skip
    config = GeneratorConfig(model, **short())

    def train(folder: Path) -> dict[str, float]:
        script = scripts["train_llamagen"]
        return script.train_llamagen(data(), tmp_path / "vqvae", folder, config, CPU, ENCODER, guidance_scale=2.0)

    check_resumes(train, tmp_path, 5, "transformer")
    result = generate(tmp_path / "whole" / "model", accelerator="gumbel")
    assert result.images[0].size == (16, 16) and result.stats.passes < 64


def test_a_var_and_its_small_model_resume_open_and_generate(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    script, vq = scripts["train_var"], tiny_multi_scale_vq()
    vq.save_pretrained(tmp_path / "vqvae")
    model = {
        "scales": vq.scales, "depth": 2, "dim": 32, "n_head": 2, "vocab_size": vq.config.codebook_size,
        "code_dim": vq.config.codebook_embed_dim, "caption_dim": 32, "caption_rows": 16, "shared_aln": True,
    }  # fmt: skip
    images = data(size=vq.image_size)

    def train(folder: Path, teacher: Path | None = None, depth: int = 2) -> dict[str, float]:
        config = script.NextScaleConfig({**model, "depth": depth}, **short())
        return script.train_var(images, tmp_path / "vqvae", folder, config, CPU, ENCODER, teacher, guidance_scale=2.0)

    check_resumes(train, tmp_path, 5, "transformer")
    teacher = tmp_path / "whole" / "transformer"
    train(tmp_path / "small", teacher, depth=1)
    result = generate(tmp_path / "small" / "model", accelerator="code")
    assert result.images[0].size == (vq.image_size, vq.image_size) and result.stats.draft_passes_by_width


def test_inputs_of_teacher_forcing_lead_to_the_tokens_of_the_image(scripts: dict[str, ModuleType]) -> None:
    """Without noise they are those of the tokenizer; with noise, the targets of later scales correct the earlier ones."""
    forced, vq = scripts["train_var"].teacher_forcing, tiny_multi_scale_vq()
    latents = torch.randn(3, vq.config.codebook_embed_dim, vq.scales[-1], vq.scales[-1])
    generator = torch.Generator().manual_seed(0)
    inputs, targets = forced(vq, latents, 0.0, generator)
    tokens = vq.quantize.quantize(latents)
    assert torch.equal(targets, torch.cat([each.flatten(1) for each in tokens], 1))
    torch.testing.assert_close(inputs, teacher_inputs(vq, tokens))
    noisy, corrected = forced(vq, latents, 1.0, generator)
    assert not torch.equal(noisy, inputs) and torch.equal(corrected[:, 0], targets[:, 0])
    assert not torch.equal(corrected[:, 1:], targets[:, 1:])


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Squares that move to and fro, with captions."""
    random = np.random.default_rng(0)
    frames = np.full((20, 8, 16, 16, 3), 255, dtype=np.uint8)
    for clip in frames:
        color = random.integers(0, 255, 3)
        for t, frame in enumerate(clip):
            x = round(5 + 5 * np.cos(2 * np.pi * t / len(clip)))
            frame[5:11, x : x + 6] = color
    np.save(tmp_path / "clips.npy", frames)
    (tmp_path / "captions.jsonl").write_text("".join(json.dumps({"caption": f"thing {i}"}) + "\n" for i in range(20)))
    return tmp_path


def test_a_video_model_resumes_opens_and_generates(scripts: dict[str, ModuleType], clips: Path, tmp_path: Path) -> None:
    script = scripts["train_video"]
    given = script.load_clips(clips)
    vae = {"size": 16, "widths": [8, 16, 32], "conv_blocks": 1, "transformer_blocks": 1}
    folder = tmp_path / "vae"
    check_resumes(lambda run: script.train_autoencoder(given, run, script.VideoConfig(vae, **short()), CPU), folder, 5, "vae")
    shape = {
        "dim": 24, "ffn_dim": 32, "num_heads": 2, "num_layers": 1, "channels": 4, "height": 2, "width": 2, "patch": 1,
        "block_frames": 4, "spatial_stride": 8, "temporal_stride": 1, "fps": 12, "text_dim": 32, "text_len": None,
        "text_mask": True, "freq_dim": 16,
    }  # fmt: skip

    def train(run: Path, teacher: Path | None = None) -> dict[str, float]:
        config = script.VideoConfig(shape, **short())
        return script.train_video(given, folder / "whole" / "vae", run, config, CPU, ENCODER, teacher)

    check_resumes(train, tmp_path / "flow", 5, "transformer")
    teacher = tmp_path / "flow" / "whole" / "transformer"
    check_resumes(lambda run: train(run, teacher), tmp_path / "few", 5, "transformer")
    flow, few = (generate(tmp_path / name / "whole" / "model", num_blocks=2) for name in ("flow", "few"))
    assert len(few.frames[0]) == len(flow.frames[0]) == 8 and few.frames[0][0].size == (16, 16)
    assert flow.stats.passes["target"] > few.stats.passes["target"]
