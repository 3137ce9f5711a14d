"""Trees against chains on the packaged model, at equal numbers of fed tokens: tokens per pass, and which siblings are accepted.

    python benchmarks/trees.py [--images 32] [--methods "scd; pac"] [--temperature 0.6] [--top-k 500]

Prompts are every 17th of `benchmarks/eval_prompts.txt`, image i is drawn with seed i: the same for all methods. One
batch, one thread; tokens per pass do not depend on either.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch

from vargen import LlamaGenPipeline
from vargen.decoding import (
    PRESETS,
    Accelerator,
    DynamicTree,
    Jacobi,
    JacobiTree,
    Sampling,
    Speculative,
    SpeculativeTree,
    decode,
    k_seq,
    recursive_rejection,
    shared_noise,
    speculative_sampling,
    traversal,
)

DYNAMIC = DynamicTree(nodes=15, depth=4, children=4)
METHODS = {
    "scd": PRESETS["scd"],
    "scd, window 24": Accelerator(drafter=Jacobi(24, "maximal"), acceptance=speculative_sampling),
    "pac": PRESETS["pac"],
    "gumbel": PRESETS["gumbel"],
    "gumbel, window 24": Accelerator(drafter=Jacobi(24, "gumbel"), acceptance=shared_noise),
    "gumbel-tree": PRESETS["gumbel-tree"],
    "speculative": PRESETS["speculative"],
    "speculative, coupled": Accelerator(drafter=Speculative(4, shared_noise=True), acceptance=shared_noise),
    "dynamic, drawn, traversal": Accelerator(drafter=SpeculativeTree(DYNAMIC), acceptance=traversal),
    "dynamic, drawn, recursive": Accelerator(drafter=SpeculativeTree(DYNAMIC), acceptance=recursive_rejection),
    "dynamic, coupled": Accelerator(drafter=SpeculativeTree(DYNAMIC, "shared-noise"), acceptance=shared_noise),
    "dynamic, most probable (EAGLE-2)": Accelerator(drafter=SpeculativeTree(DYNAMIC, "top-k"), acceptance=recursive_rejection),
    "static, drawn, traversal": Accelerator(drafter=SpeculativeTree("wide-15"), acceptance=traversal),
    "static, drawn, recursive": Accelerator(drafter=SpeculativeTree("wide-15"), acceptance=recursive_rejection),
    "static, with replacement, K-SEQ": Accelerator(drafter=SpeculativeTree("wide-15", "with-replacement"), acceptance=k_seq),
    "static, coupled": Accelerator(drafter=SpeculativeTree("wide-15", "shared-noise"), acceptance=shared_noise),
    "jacobi tree, auto": Accelerator(drafter=JacobiTree("auto", "gumbel"), acceptance=shared_noise),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--methods", default="; ".join(METHODS), help="names, with ';' between them")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--top-k", type=int, default=500)
    parser.add_argument("--guidance", type=float, default=2.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pipe = LlamaGenPipeline.from_pretrained("emoji", torch_dtype=torch.float32)
    lines = (Path(__file__).parent / "eval_prompts.txt").read_text().splitlines()
    condition, images = pipe.encode_condition([lines[index * 17 % len(lines)] for index in range(arguments.images)])
    model, sampling = pipe.decoding_model(arguments.guidance), Sampling(arguments.temperature, arguments.top_k)
    names = [name.strip() for name in arguments.methods.split(";")]
    if unknown := [name for name in names if name not in METHODS]:
        parser.error(f"unknown methods {unknown}; known: {'; '.join(METHODS)}")
    for name in names:
        start = time.process_time()
        stats = decode(model, condition, torch.arange(images), METHODS[name], sampling).stats
        turns = sum(stats.committed_histogram)
        variance = sum(n * (k - stats.tokens_per_pass) ** 2 for k, n in enumerate(stats.committed_histogram)) / turns
        row = {
            "method": name,
            "fed": max(stats.passes_by_width),
            "tokens_per_pass": round(stats.tokens_per_pass, 3),
            "standard_error": round(math.sqrt(variance / turns), 3),
            "sibling_rates": [round(rate, 3) for rate in stats.sibling_rates],
            "processor_seconds": round(time.process_time() - start, 1),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
