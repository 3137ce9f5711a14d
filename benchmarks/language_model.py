"""Seconds of passes of a random language model of the shape of Janus-Pro-1B on a CPU: `generate` of transformers, and int8.

`python benchmarks/language_model.py [--tokens 24] [--threads 1]`. The image of `gumbel` is that of its measured pass at each
width, times the passes that `emoji` needs for an image at this width: random weights accept no drafts.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from typing import Any

import torch

from vargen.decoding import Tree
from vargen.models.transformers.base import PromptRows
from vargen.models.transformers.int8 import quantize_layers
from vargen.models.transformers.int8_decoding import Int8Parts, Int8TokenModel
from vargen.models.transformers.supported import describe_language_model

TOKENS, PROMPT, WIDTHS = 576, 32, (1, 2, 4, 8, 16)
JANUS_PRO_1B = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
                "num_key_value_heads": 16, "vocab_size": 102400, "max_position_embeddings": 16384}  # fmt: skip


def make_model(dtype: torch.dtype) -> Any:
    """A Janus with random weights and a vision tower of one layer, which image calls do not run."""
    from transformers import JanusConfig, JanusForConditionalGeneration  # vargen makes a broken torchvision harmless first

    config = JanusConfig(
        text_config={"model_type": "llama", **JANUS_PRO_1B, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_image_tokens": TOKENS,
                       "projection_dim": 2048},
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = JanusForConditionalGeneration(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.generation_kwargs = {"boi_token_id": 3}
    model.generation_config.pad_token_id, model.generation_config.bos_token_id = 0, 1
    return model


def resident() -> float:
    """Gigabytes of this process, now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e9


def median(run: Any, repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]


def time_generate(model: Any, tokens: int) -> float:
    """Seconds of a token of an image call, whose prompt is left out by a difference of two calls."""
    ids = torch.randint(4, 1000, (1, PROMPT))
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "generation_mode": "image", "do_sample": True}

    def run(count: int) -> float:
        model.model.vision_model.config.num_image_tokens = count
        start = time.perf_counter()
        model.generate(**options, guidance_scale=5.0)
        return time.perf_counter() - start

    run(2)
    short, long = min(run(2) for _ in range(2)), min(run(2 + tokens) for _ in range(2))
    return (long - short) / tokens


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    model = make_model(torch.bfloat16)
    print(f"bfloat16 weights: {resident():.2f} GB; torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    with torch.inference_mode():
        own = {"bfloat16": time_generate(model, given.tokens)}
        print(f"generate, bfloat16: {own['bfloat16']:.3f} s a token", flush=True)
        described = describe_language_model(model)
        parts = Int8Parts(described, quantize_layers(described))
        model.model.language_model.layers = torch.nn.ModuleList()
        gc.collect()
        print(f"int8 layers: {resident():.2f} GB")
        token_model = Int8TokenModel(describe_language_model(model), parts, 5.0)
        rows = PromptRows(torch.randint(4, 1000, (1, PROMPT)), torch.ones(1, PROMPT, dtype=torch.bool))
        rows = PromptRows(rows.ids, rows.valid, rows)
        state = token_model.allocate(rows, max(WIDTHS))
        start = time.perf_counter()
        token_model.prefill(rows, state)
        print(f"prompt of {PROMPT} tokens: {time.perf_counter() - start:.2f} s")
        token_model.rollback(state, torch.tensor([TOKENS // 2]))
        passes = {}
        for width in WIDTHS:
            tokens = torch.randint(token_model.vocab, (1, width))
            passes[width] = median(lambda: token_model.forward(tokens, state, Tree.make_chain(width - 1)), 7)  # noqa: B023
            print(f"int8 pass of {width} tokens: {passes[width]:.3f} s", flush=True)
