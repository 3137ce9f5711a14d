"""The tiny VAR that the official code ran, and what it gave."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.var.decoding import VARScaleModel
from vargen.models.var.network import VARTransformer, is_derived_buffer

_GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "var"


def official_networks() -> tuple[VARTransformer, MultiScaleVQModel, dict[str, Tensor]]:
    config = json.loads((_GOLDEN / "config.json").read_text())
    scales = tuple(config["patch_nums"])
    vqvae = MultiScaleVQModel(
        codebook_size=config["vocab_size"],
        codebook_embed_dim=config["z_channels"],
        ch=config["ch"],
        scales=scales,
        shared_phi=config["share_quant_resi"],
    ).eval()
    vqvae.load_state_dict({k: v.float() for k, v in load_file(_GOLDEN / "vae.safetensors").items()})
    sizes = {"vocab_size": config["vocab_size"], "code_dim": config["z_channels"], "num_classes": config["num_classes"]}
    transformer = VARTransformer(depth=config["depth"], scales=scales, **sizes).eval()
    state = load_file(_GOLDEN / "var.safetensors")
    transformer.load_state_dict({name: value.float() for name, value in state.items() if not is_derived_buffer(name)})
    return transformer, vqvae, load_file(_GOLDEN / "io.safetensors")


def official(guidance_scale: float) -> tuple[VARScaleModel, dict[str, Tensor]]:
    """As a `ScaleModel` with so much guidance."""
    transformer, vqvae, io = official_networks()
    return VARScaleModel(transformer, vqvae.quantize, guidance_scale), io
