"""Video runs join to a folder that is small, borrows its text encoder, and names no folder of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rejects import rejects
from safetensors.torch import load_file

import vargen.assets
from recipes.emoji_video.batches import hash_encoder
from recipes.package import MAX_BYTES, package_video
from recipes.package_components import package_video_loras
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.lora import CausalVideoLoRA
from vargen.models.tokenizers.preview_decoder import PreviewDecoder
from vargen.models.tokenizers.video_vae import CausalVideoVAE
from vargen.pipelines.registry import open_pipeline
from vargen.training.run import TrainingRun
from vargen.weight_files import weights_digest

SHARED_FROM = vargen.assets.packaged_model_path("emoji")
VAE = {"size": 16, "widths": [8, 16, 64], "transformer_blocks": 1}
SHAPE = {
    "dim": 64, "ffn_dim": 64, "num_heads": 2, "num_layers": 1, "channels": 4, "height": 2, "width": 2, "patch": 1,
    "block_frames": 2, "spatial_stride": 8, "temporal_stride": 1, "fps": 12, "text_dim": 384, "text_len": None,
    "text_mask": True, "freq_dim": 16, "motion_levels": 2,
}  # fmt: skip
LOSSES = {"loss_seen": 0.25, "loss_held_out": 0.5}
FIGURES = {"step": 40, "seconds": 3600.0, **LOSSES, "motion": 0.81, "static_fraction": 0.1, "recall": 19.5}
HOW = {"levels": [1.0, 0.75], "euler": False, "guidance": 1.0}


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, Path]:
    found = {name: tmp_path / name for name in ("vae", "target", "drafter", "preview")}
    torch.manual_seed(0)
    vae = CausalVideoVAE(**VAE)
    vae.save_pretrained(found["vae"] / "vae")
    logged = {"step": 30, "seconds": 7200.0, "psnr": 27.5, "seen_psnr": 29.25, "motion": 0.97, "flicker": 0.012}
    (found["vae"] / "log.jsonl").write_text(json.dumps(logged) + "\n")
    for name, shape in (("target", SHAPE), ("drafter", {**SHAPE, "dim": 32})):
        CausalVideoTransformer(**shape).save_pretrained(found[name] / "transformer")
        (found[name] / "sampling.json").write_text(json.dumps(HOW))
        (found[name] / "log.jsonl").write_text(json.dumps(FIGURES) + "\n")
        (found[name] / f"latents-{hash_encoder(vae)}.npy").write_bytes(b"")
    PreviewDecoder(4, (16, 16)).save_pretrained(found["preview"] / "preview")
    (found["preview"] / "log.jsonl").write_text(json.dumps({"step": 3, "seconds": 60.0, "psnr": 22.0}) + "\n")
    return found


def join(runs: dict[str, Path], output: Path, **more) -> Path:
    return package_video(runs["vae"], runs["target"], output, SHARED_FROM, runs["drafter"], runs["preview"], **more)


def test_the_folder_holds_int6_networks_that_open(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = join(runs, tmp_path / "out", note="On a slow machine.", defaults={"num_blocks": 6})
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "CausalVideoPipeline" and index["defaults"] == {**HOW, "image": False, "num_blocks": 6}
    assert index["draft_transformer"] == ["vargen.models.causal_video", "CausalVideoTransformer"]
    assert index["text_encoder"] == ["vargen.models.text_encoder", "MiniLMTextEncoder"]
    assert not (folder / "text_encoder").exists()
    assert json.loads((folder / "borrowed.json").read_text())["text_encoder"] == "emoji"
    kinds = {"vae": CausalVideoVAE, "transformer": CausalVideoTransformer, "draft_transformer": CausalVideoTransformer,
             "preview_decoder": PreviewDecoder}  # fmt: skip
    for part, kind in kinds.items():
        weights = folder / part / "diffusion_pytorch_model.safetensors"
        assert any(value.dtype == torch.int8 for value in load_file(weights).values()), part
        assert kind.from_pretrained(folder / part).config.weight_format == "int6"
        assert weights.stat().st_mode & 0o044 == 0o044
    was = CausalVideoTransformer.from_pretrained(runs["target"] / "transformer").state_dict()
    now = CausalVideoTransformer.from_pretrained(folder / "transformer").state_dict()
    assert all((was[name] - now[name]).abs().max() <= was[name].abs().max() / 61 for name in was)
    card = (folder / "README.md").read_text()
    figures = ("27.50 dB", "29.25 dB on training", "2.00 hours", "0.250, 0.500", "| 0.81 | 10% | 19.5 |", "1.2%", "2 steps")
    for said in (*figures, "On a slow machine."):
        assert said in card, said
    assert not [file for file in folder.rglob("*.json") if str(tmp_path) in file.read_text()], "no folder of this machine"


def test_a_target_alone_is_enough(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = package_video(runs["vae"], runs["target"], tmp_path / "out", SHARED_FROM, weight_format="float16")
    index = json.loads((folder / "model_index.json").read_text())
    assert index["draft_transformer"] == [None, None] == index["preview_decoder"]


def test_an_unfinished_run_leaves_the_old_folder(runs: dict[str, Path], tmp_path: Path) -> None:
    join(runs, tmp_path / "out")
    before = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    (runs["target"] / "sampling.json").unlink()
    with pytest.raises(FileNotFoundError, match="finish the training run first"):
        join(runs, tmp_path / "out")
    assert before == {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}


def test_what_does_not_belong_together_is_not_joined(runs: dict[str, Path], tmp_path: Path, monkeypatch) -> None:
    (runs["drafter"] / "sampling.json").write_text(json.dumps({**HOW, "levels": [1.0]}))
    with pytest.raises(ValueError, match="sampling settings"):
        join(runs, tmp_path / "out")
    (runs["drafter"] / "sampling.json").write_text(json.dumps(HOW))
    CausalVideoTransformer(**{**SHAPE, "block_frames": 3}).save_pretrained(runs["drafter"] / "transformer")
    rejects(lambda: join(runs, tmp_path / "out"), "geometry")
    next(runs["drafter"].glob("latents-*.npy")).rename(runs["drafter"] / "latents-0123456789abcdef.npy")
    rejects(lambda: join(runs, tmp_path / "out"), "latents")
    rejects(lambda: join(runs, tmp_path / "out", weight_format="int4"), "weight_format")
    monkeypatch.setitem(MAX_BYTES, "emoji-video", 1000)
    with pytest.raises(ValueError, match="store it as int8"):
        package_video(runs["vae"], runs["target"], tmp_path / "out", SHARED_FROM)
    assert not (tmp_path / "out").exists()


def lora_run(folder: Path, model: Path, part: str, **settings: Any) -> Path:
    """A finished run of a LoRA for a network of a model folder."""
    network = CausalVideoTransformer.from_pretrained(model / part)
    size = network.config
    CausalVideoLoRA(size.dim, size.ffn_dim, size.num_layers, rank=24).save_pretrained(folder / "lora")
    (folder / "sampling.json").write_text(json.dumps({**HOW, "image": True, "image_frames": 2, **settings}))
    record = {"step": 40, "seconds": 3600.0, "motion": 0.66, "static_fraction": 0.1, "psnr": 21.5, "final_motion": 0.66}
    (folder / "log.jsonl").write_text(json.dumps(record) + "\n")
    TrainingRun(folder, {"network": weights_digest(network)}, 40).save_checkpoint(40)
    return folder


def test_loras_are_added_and_the_rest_is_kept(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = join(runs, tmp_path / "out")
    before = {file.parent.name: file.read_bytes() for file in folder.rglob("*.safetensors")}
    target, drafter = (lora_run(tmp_path / part, folder, part) for part in ("transformer", "draft_transformer"))
    assert package_video_loras(target, folder, note="Moves.")["motion"] == 0.66
    pipe = open_pipeline(folder)
    assert pipe.draft_image_lora is None and pipe.image_lora.config.weight_format == "int6"
    assert pipe.config.defaults == {**HOW, "image": True, "image_frames": 2}
    assert before.items() <= {file.parent.name: file.read_bytes() for file in folder.rglob("*.safetensors")}.items()
    card = (folder / "image_lora" / "README.md").read_text()
    for said in ("Moves.", "motion 0.66", "10% of them static", "21.50 dB", "rank 20", "of the transformer"):
        assert said in card, said
    package_video_loras(target, folder, drafter)
    pipe = open_pipeline(folder)
    assert pipe.draft_image_lora.config.dim == pipe.draft_transformer.config.dim
    assert not [file for file in folder.rglob("*.json") if str(tmp_path) in file.read_text()], "no folder of this machine"


def test_loras_of_other_networks_are_not_added(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = join(runs, tmp_path / "out")
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    target, drafter = (lora_run(tmp_path / part, folder, part) for part in ("transformer", "draft_transformer"))
    rejects(lambda: package_video_loras(drafter, folder), "transformer")
    rejects(lambda: package_video_loras(target, folder, target), "draft_transformer")
    other = lora_run(tmp_path / "levels", folder, "transformer", levels=[1.0])
    rejects(lambda: package_video_loras(other, folder), "levels")
    rejects(
        lambda: package_video_loras(target, folder, lora_run(tmp_path / "frames", folder, "draft_transformer", image_frames=1)),
        "settings",
    )
    (target / "sampling.json").unlink()
    with pytest.raises(FileNotFoundError, match="finish the training run first"):
        package_video_loras(target, folder)
    assert before == {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
