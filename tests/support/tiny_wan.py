"""Official files of a tiny random video model with Wan2.1's layout: names, nesting and formats are those of the real ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tiny_video import randomised

from vargen.models.causal_video.network import CausalVideoTransformer

from diffusers import AutoencoderKLWan  # isort: skip  (after the torchvision guard)

State = dict[str, torch.Tensor]
TEXT = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 3}
TARGET = {"dim": 48, "ffn_dim": 64, "num_heads": 4, "num_layers": 2, "text_dim": 16, "freq_dim": 16}
DRAFT = {**TARGET, "dim": 24, "num_heads": 2, "num_layers": 1}
SIZE = (16, 32)  # pixels
VAE_22 = {  # of Wan2.2-TI2V-5B: 48 channels, residual shortcuts, and pixels in patches
    "base_dim": 4, "decoder_base_dim": 4, "z_dim": 48, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1, "is_residual": True,
    "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16, "latents_mean": [0.1] * 48,
    "latents_std": [0.9] * 48,
}  # fmt: skip
VAE = {"base_dim": 4}


@cache
def transformer_state(seed: int = 0, draft: bool = False, **changes: Any) -> State:
    return dict(randomised(CausalVideoTransformer(**{**(DRAFT if draft else TARGET), **changes}), seed).state_dict())


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of T5's kind, whose tokens are letters and a few words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import T5TokenizerFast

    pieces = ["<pad>", "</s>", "<unk>", "\u2581", "\u2581a", "\u2581cat", "\u2581dog", *"abcdefghijklmnopqrstuvwxyz"]
    words = Tokenizer(models.Unigram([(piece, -float(n)) for n, piece in enumerate(pieces)], unk_id=2))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words.post_processor = processors.TemplateProcessing(single=["$A", "</s>"], special_tokens=[("</s>", 1)])
    T5TokenizerFast(tokenizer_object=words, extra_ids=0).save_pretrained(folder)


def save_wan(folder: Path, **vae: Any) -> Path:
    """The parts of Wan2.1, or of another autoencoder, in diffusers' format."""
    from transformers import UMT5Config, UMT5EncoderModel

    encoder = UMT5EncoderModel(UMT5Config(**TEXT, feed_forward_proj="gated-gelu"))
    randomised(AutoencoderKLWan(**(vae or VAE)), 3, 0.2).save_pretrained(folder / "vae")
    randomised(encoder, 4, 0.5).save_pretrained(folder / "text_encoder")
    save_tokenizer(folder / "tokenizer")
    return folder


def save_self_forcing(file: Path, state: State, **others: Any) -> Path:
    """A training file: the weights and their average, under a wrapper's names."""
    named = {f"model.{name}": value for name, value in state.items()}
    torch.save({"generator": {name: value + 1 for name, value in named.items()}, "generator_ema": named, **others}, file)
    return file


def official_files(folder: Path) -> dict[str, Any]:
    """The required arguments of the converter, and a drafter."""
    wan = save_wan(folder / "Wan2.1-T2V-1.3B-Diffusers")
    target = save_self_forcing(folder / "self_forcing_dmd_large.pt", transformer_state())
    draft = save_self_forcing(folder / "self_forcing_dmd.pt", transformer_state(1, draft=True))
    return {"transformer": [target], "wan": wan, "draft": [draft], "size": SIZE, "n_head": TARGET["num_heads"]}
