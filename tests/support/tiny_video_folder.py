"""A folder of a video model of random weights."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_video import SHAPE, randomised
from transformers import BertTokenizerFast

import vargen.assets
from vargen.convert.state_dicts import write_model_index
from vargen.decoding.video.denoising import shifted_levels
from vargen.models.causal_video.network import CausalVideoTransformer
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.tokenizers.video_vae import CausalVideoVAE, PreviewDecoder
from vargen.pipelines.loading import SHAREABLE, SHARED_FILE

SHARED_FROM = vargen.assets.packaged_model_path("emoji")
OWN = {**SHAPE, "dim": 64, "text_dim": 384, "motion_levels": 2}
HOW = {"levels": list(shifted_levels()), "euler": False, "guidance": 1.0}


def video_folder(runs: Path) -> Path:
    """A folder of random weights, stored as the packaged models are, that shares the text encoder of `emoji`."""
    folder = runs / "out"
    networks = {
        "vae": randomised(CausalVideoVAE(size=16, widths=(8, 16, 64), transformer_blocks=1), 3, 0.2),
        "transformer": randomised(CausalVideoTransformer(**OWN), 0),
        "draft_transformer": randomised(CausalVideoTransformer(**{**OWN, "dim": 32}), 1),
        "preview_decoder": randomised(PreviewDecoder(4, (16, 16)), 5),
    }
    for part, network in networks.items():
        network.register_to_config(weight_format="int6")
        network.save_pretrained(folder / part)
    parts = {**networks, "text_encoder": MiniLMTextEncoder, "tokenizer": BertTokenizerFast}
    defaults = {**HOW, "image": True, "num_blocks": 3, "tau": -0.5}
    write_model_index(folder, "CausalVideoPipeline", parts, defaults=defaults, prompt_styles=["3d"])
    (folder / SHARED_FILE).write_text(json.dumps(dict.fromkeys(SHAREABLE, SHARED_FROM.name)))
    return folder
