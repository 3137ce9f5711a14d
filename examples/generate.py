"""Draw a prompt one token a pass, and again with several tokens a pass: the same picture, sooner.

python examples/generate.py "a red apple" --seed 7
"""

from __future__ import annotations

import argparse

import torch

import vargen


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw one prompt by two methods, and compare.")
    parser.add_argument("prompt", nargs="?", default="a red apple")
    parser.add_argument("--model", default="emoji", help="packaged, a folder, or owner/name on the hub")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()

    pipe = vargen.open_pipeline(options.model)
    pictures = {}
    for method in ("ar", "gumbel"):
        generator = torch.Generator().manual_seed(options.seed)
        result = pipe(options.prompt, accelerator=method, generator=generator)
        pictures[method] = result.images[0]
        pictures[method].save(f"{method}.png")
        stats = result.stats
        print(f"{method}.png: {stats.passes} passes, {stats.tokens_per_pass:.2f} tokens a pass, {stats.seconds:.1f} s")
    same = pictures["ar"].tobytes() == pictures["gumbel"].tobytes()
    print("the same picture, pixel for pixel" if same else "not quite the same: two candidates were equal up to rounding")


if __name__ == "__main__":
    main()
