"""A packaged video model of random weights."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_video import SHAPE, randomised

import vargen.assets
from recipes.emoji_video.batches import hash_encoder
from recipes.package import package_video
from vargen.decoding.video.denoising import shifted_levels
from vargen.models.causal_video import CausalVideoTransformer
from vargen.models.tokenizers.preview_decoder import PreviewDecoder
from vargen.models.tokenizers.video_vae import CausalVideoVAE

SHARED_FROM = vargen.assets.packaged_model_path("emoji")
OWN = {**SHAPE, "dim": 64, "text_dim": 384, "motion_levels": 2}
HOW = {"levels": list(shifted_levels()), "euler": False, "guidance": 1.0}


def video_folder(runs: Path) -> Path:
    """A folder as `python -m recipes package emoji-video` makes it, of random weights, in the empty folder `runs`."""
    vae = randomised(CausalVideoVAE(size=16, widths=(8, 16, 64), transformer_blocks=1), 3, 0.2)
    vae.save_pretrained(runs / "vae" / "vae")
    (runs / "vae" / "log.jsonl").write_text(json.dumps({
        "step": 30, "seconds": 7200.0, "psnr": 27.5, "seen_psnr": 29.25, "motion": 0.97, "flicker": 0.012}) + "\n")  # fmt: skip
    losses = {"loss_seen": 0.25, "loss_held_out": 0.5}
    figures = {"step": 40, "seconds": 3600.0, **losses, "motion": 0.8, "static_fraction": 0.1, "recall": 19.5}
    for number, (name, width) in enumerate((("target", 64), ("drafter", 32))):
        network = randomised(CausalVideoTransformer(**{**OWN, "dim": width}), number)
        network.save_pretrained(runs / name / "transformer")
        (runs / name / "sampling.json").write_text(json.dumps(HOW))
        (runs / name / "log.jsonl").write_text(json.dumps(figures) + "\n")
        (runs / name / f"latents-{hash_encoder(vae)}.npy").write_bytes(b"")
    randomised(PreviewDecoder(4, (16, 16)), 5).save_pretrained(runs / "preview" / "preview")
    (runs / "preview" / "log.jsonl").write_text(json.dumps({"step": 3, "seconds": 60.0, "psnr": 22.0}) + "\n")
    parts = (runs / "vae", runs / "target", runs / "out", SHARED_FROM, runs / "drafter", runs / "preview")
    return package_video(*parts, defaults={"num_blocks": 3, "tau": -0.5, "image": True})
