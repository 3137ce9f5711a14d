"""Networks of sizes that cannot be are refused by the name of the argument, before a weight is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rejects import rejects

from vargen.models.causal_video.cache import VideoGeometry
from vargen.models.causal_video.network import CausalVideoLoRA, CausalVideoTransformer
from vargen.models.heads.network import EagleDrafter, MedusaDrafter, TokenUpsampler
from vargen.models.llamagen.network import LlamaGenTransformer
from vargen.models.text_encoder import MiniLMTextEncoder
from vargen.models.tokenizers.multi_scale_vq import MultiScaleVQModel
from vargen.models.tokenizers.video_vae import CausalVideoVAE, PreviewDecoder
from vargen.models.tokenizers.vq import VQModel
from vargen.models.var.network import VARTransformer

VIDEO, UPSAMPLER = (
    {"dim": 24, "height": 4, "width": 6, "patch": 2},
    {"vocab_size": 32, "low_grid": 4, "grid_size": 8, "dim": 16},
)
# By class: arguments, and the one that the error names.
REFUSED: dict[Any, list[tuple[dict[str, Any], str]]] = {
    LlamaGenTransformer: [
        ({"condition": "image"}, "condition"), ({"dim": 50, "n_head": 4}, "n_head"), ({"dim": 24, "n_head": 4}, "n_head"),
    ],
    VARTransformer: [
        ({"condition": "words"}, "condition"), ({"dim": 50, "n_head": 3}, "dim"), ({"scales": (1, 3, 2)}, "scales"),
        ({"scales": ()}, "scales"),
    ],
    VQModel: [
        ({"ch": 48}, "ch"), ({"encoder_ch_mult": (1, 2)}, "encoder_ch_mult"), ({"decoder_ch_mult": [1]}, "decoder_ch_mult"),
    ],
    MultiScaleVQModel: [
        ({"architecture": "cnn"}, "architecture"), ({"scales": (1, 2, 2)}, "scales"), ({"scales": ()}, "scales"),
        ({"scales": (0, 2)}, "scales"), ({"scales": (1, 2), "scale_codes": (8,)}, "scale_codes"),
        *(({"scales": (1, 2), "scale_codes": codes}, "scale_codes") for codes in ((8, 5000), (9, 8), (0, 8))),
        ({"shared_phi": 0}, "shared_phi"), ({"ch": 48}, "ch"),
        ({"architecture": "hybrid", "ch": 8, "ch_mult": (1, 2)}, "ch_mult"),
    ],
    CausalVideoTransformer: [
        *(({**VIDEO, "num_heads": heads}, "num_heads") for heads in (5, 6, 8)), ({**VIDEO, "patch": 4}, "patch"),
    ],
    CausalVideoVAE: [({"size": 20}, "size"), ({"size": 0}, "size"), ({"size": 16, "widths": (8, 16, 24)}, "widths")],
    VideoGeometry: [({name: value}, name) for name, value in {
        "patch": 7, "block_frames": 0, "channels": True, "height": 2.0}.items()],
    PreviewDecoder: [({"stride": 5}, "stride")],
    CausalVideoLoRA: [({"dim": 24, "ffn_dim": 32, "num_layers": 2, "rank": rank}, "rank") for rank in (0, 25)],
    EagleDrafter: [
        ({"dim": 30, "n_head": 2}, "n_head"), ({"dim": 32, "n_head": 2, "grid_size": 0}, "grid_size"),
        ({"dim": 32, "n_head": 2, "grid_size": 10**6}, "grid_size"),
    ],
    MedusaDrafter: [({"heads": 0}, "heads")],
    TokenUpsampler: [({**UPSAMPLER, "grid_size": side}, "grid_size") for side in (9, 4)] + [({**UPSAMPLER, "dim": 12}, "dim")],
    MiniLMTextEncoder: [({"weight_format": "int7"}, "int7")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("network", "sizes", "named"),
    [(network, sizes, named) for network, rows in REFUSED.items() for sizes, named in rows],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_sizes_that_cannot_be_are_refused(network: Any, sizes: dict[str, Any], named: str) -> None:
    with torch.device("meta"):
        rejects(lambda: network(**sizes), named, ValueError)
