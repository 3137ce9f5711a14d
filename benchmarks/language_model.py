"""Measure what a step costs beside the forward pass, for a model of the size of Janus-Pro 1B with random weights.

    python benchmarks/language_model.py [--dtype float32] [--methods ar gumbel scd] [--passes 3] [--json figures.json]

A step is a call of the loop after the prefill. The forward pass is the body of the language model and its head, unchanged.
All else counts as beside it: the draft, cache and mask, guidance, verification, noise. Times are those of the process, in one
thread, so that other programs do not count. Passes are timed at the start of the image, and near its end with longer masks.
"""

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch

from vargen.adapters.transformers import PromptRows, TransformersTokenModel
from vargen.decoding import PRESETS, Accelerator, Sampling
from vargen.decoding.harness import Run
from vargen.decoding.next_token.loop import prefill
from vargen.models.language_models.supported import Janus

PROMPT_TOKENS = 32
GUIDANCE_SCALE = 5.0
SIDE, CODES = 24, 16384


def make_model(layers: int, width: int, dtype: torch.dtype) -> Any:
    """Return a Janus with random weights; text and vision parts that no image token passes through are small."""
    from transformers import JanusConfig, JanusForConditionalGeneration

    config = JanusConfig(
        text_config={"model_type": "llama", "hidden_size": width, "intermediate_size": 11 * width // 4, "vocab_size": 1024,
                     "num_hidden_layers": layers, "num_attention_heads": width // 128, "max_position_embeddings": 16384,
                     "pad_token_id": 0},
        vision_config={"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 384, "patch_size": 16,
                       "projection_dim": width, "num_image_tokens": SIDE**2},
        vq_config={"embed_dim": 8, "num_embeddings": CODES, "latent_channels": 32, "base_channels": 32, "num_res_blocks": 1,
                   "channel_multiplier": [1, 1], "projection_dim": width, "image_token_embed_dim": width, "num_patches": SIDE},
    )  # fmt: skip
    with torch.device("meta"):
        model = JanusForConditionalGeneration(config)
    model = model.to(dtype).to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.03, 0.03, generator=generator)
        for rotary in (module for module in model.modules() if hasattr(module, "rope_init_fn")):  # to_empty clears its buffers
            rotary.inv_freq, rotary.attention_scaling = rotary.rope_init_fn(rotary.config, "cpu")
    return model


class ModuleTimer:
    """Sums the process time spent in modules, through hooks."""

    def __init__(self, *modules: torch.nn.Module):
        self.seconds = 0.0
        for module in modules:
            module.register_forward_pre_hook(self._start)
            module.register_forward_hook(self._stop)

    def _start(self, *_: Any) -> None:
        self.seconds -= time.process_time()

    def _stop(self, *_: Any) -> None:
        self.seconds += time.process_time()


@torch.inference_mode()
def measure(model: TransformersTokenModel, timer: ModuleTimer, method: Accelerator, start: int, passes: int) -> dict[str, Any]:
    """Time passes that begin with `start` tokens in the cache. Seconds are the median over passes, of the process."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 1024, (2, PROMPT_TOKENS), generator=generator)
    run, seeds = Run(torch.device("cpu"), SIDE**2), torch.tensor([7])
    sampling = Sampling()
    valid = torch.ones(1, PROMPT_TOKENS, dtype=torch.bool)
    condition = PromptRows(ids[:1], valid, PromptRows(ids[1:], valid))
    step, state, out = prefill(run, model, condition, seeds, method, sampling)
    step.sample_first_token(state.images, out)
    if start > 1:  # as if these tokens had been generated: passes over zeros take as long
        state.images.length.fill_(start)
        state.cache.cache.length.fill_(start - 1)
    state, _ = step(state)  # warms up
    peak, found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(passes):
        timer.seconds, before = 0.0, time.process_time()
        state, (sums, position, count) = step(state)
        run.end_pass(sums, position, state.images.tokens, state.images.length, count)
        found.append((timer.seconds, time.process_time() - before - timer.seconds))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    forward, beside = (sorted(part)[len(part) // 2] for part in zip(*found, strict=True))
    return {"tokens_fed": sums.shape[1], "tokens_cached": start, "forward": forward, "beside": beside,
            "share_beside": beside / forward, "peak_growth_bytes": grown, "cache_bytes": state.cache.cache.nbytes}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--methods", nargs="+", default=["ar", "gumbel", "scd", "pac", "recycle"])
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    network = make_model(options.layers, options.width, getattr(torch, options.dtype))
    model = TransformersTokenModel(Janus(network), GUIDANCE_SCALE)
    timer = ModuleTimer(network.model.language_model, network.model.generation_head)
    rows = []
    for name in options.methods:
        method = PRESETS[name].fit_to_grid(SIDE**2, CODES)
        for start in (1, SIDE**2 - 64):
            row = {"method": name, **measure(model, timer, method, start, options.passes)}
            rows.append(row)
            print(f"{name:10} {row['tokens_fed']:3} tokens after {start:3}: forward {row['forward']:.3f} s, beside "
                  f"{1e3 * row['beside']:.1f} ms = {row['share_beside']:.1%}, peak +{row['peak_growth_bytes'] / 2**20:.0f} MiB",
                  flush=True)  # fmt: skip
    if options.json:
        parameters = sum(parameter.numel() for parameter in network.parameters())
        document = {**{k: v for k, v in vars(options).items() if k != "json"}, "parameters": parameters, "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
