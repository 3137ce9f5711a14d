"""Seconds of an image of a random model of the shape of Janus-Pro-1B on a CPU: `generate` of transformers, and 8-bit passes.

`python benchmarks/language_model.py [--dtype bfloat16] [--tokens 24] [--threads 1]`. Images are scaled from some tokens of
`generate`, and from passes in the middle of an image. `gumbel` commits as many tokens per pass as `emoji` does by passes of
this width: random weights accept no drafts.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vargen import open_pipeline
from vargen.decoding import Tree
from vargen.kernels.int8.instructions import instruction_set
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


def tokens_per_pass(width: int) -> float:
    """Tokens per pass of `emoji` by passes of `gumbel` over so many tokens."""
    pipe = open_pipeline("emoji")
    pipe.set_progress_bar_config(disable=True)
    method = "ar" if width == 1 else f"gumbel:window={width}"
    prompts = Path(__file__).with_name("eval_prompts.txt").read_text("utf-8").splitlines()[:8]
    results = [pipe(each, accelerator=method, generator=torch.Generator().manual_seed(1)).stats for each in prompts]
    return sum(each.tokens for each in results) / sum(each.passes for each in results)


def main(dtype: str, tokens: int, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = make_model(getattr(torch, dtype))
    layers = sum(each.numel() for each in model.model.language_model.layers.parameters())
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, int8 by {instruction_set()}, {threads} threads"
    )
    print(f"{layers / 1e9:.2f} billion weights of layers; with {dtype} weights {resident():.2f} GB")
    own = time_generate(model, tokens)
    print(f"generate, {dtype}: {own:.3f} s a token, {own * TOKENS:.0f} s an image", flush=True)
    described = describe_language_model(model)
    parts = Int8Parts(described, quantize_layers(described))
    model.model.language_model.layers = torch.nn.ModuleList()
    gc.collect()
    print(f"with int8 layers instead {resident():.2f} GB")
    token_model = Int8TokenModel(describe_language_model(model), parts, 5.0)
    prompt = PromptRows(torch.randint(4, 1000, (1, PROMPT)), torch.ones(1, PROMPT, dtype=torch.bool))
    state = token_model.allocate(replace(prompt, unconditional=prompt), max(WIDTHS))
    start = time.perf_counter()
    token_model.prefill(replace(prompt, unconditional=prompt), state)
    prefill = time.perf_counter() - start
    token_model.rollback(state, torch.tensor([TOKENS // 2]))
    print("| tokens of a pass | seconds | tokens per pass of emoji | image, s | times as fast |\n|---|---|---|---|---|")
    for width in WIDTHS:
        fed = torch.randint(token_model.vocab, (1, width))
        seconds = median(partial(token_model.forward, fed, state, Tree.make_chain(width - 1)), 7)
        found = tokens_per_pass(width)
        image = prefill + seconds * TOKENS / found
        print(f"| {width} | {seconds:.3f} | {found:.2f} | {image:.1f} | {own * TOKENS / image:.1f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    with torch.inference_mode():
        main(**vars(parser.parse_args()))
