"""Compose a method from a drafter, a rule and a draft length; prove that it is exact; then draw with it.

python examples/compose.py "a red apple" --seed 7
vargen verify examples.compose:mine             # the same proof, from the command line
"""

from __future__ import annotations

import argparse

import torch

import vargen
from vargen import Accelerator
from vargen.decoding import Jacobi, speculative_sampling
from vargen.verify.exactness import check_exactness

mine = Accelerator(
    name="mine",
    drafter=Jacobi(
        window=24,  # tokens that a pass feeds; "auto" selects it by measured costs
        coupling="maximal",  # drafts that were not committed survive as often as any exact method allows
    ),
    acceptance=speculative_sampling,  # accept with min(1, p / q), draw a refusal from the residual
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Verify a composed method, and race it.")
    parser.add_argument("prompt", nargs="?", default="a red apple")
    parser.add_argument("--model", default="emoji", help="packaged, a folder, or owner/name on the hub")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()

    report = check_exactness(mine)
    print(f"{mine.name} is {'exact' if report.exact else 'not exact'}: total variation distance {report.worst:.1e}")
    if not (report.exact and report.detects_controls):
        raise SystemExit("no proof")

    pipe = vargen.open_pipeline(options.model)
    for method in ("ar", "scd", mine):
        generator = torch.Generator().manual_seed(options.seed)
        result = pipe(options.prompt, accelerator=method, generator=generator)
        stats = result.stats
        print(f"{stats.accelerator}: {stats.tokens_per_pass:.2f} tokens a pass, {stats.seconds:.1f} s")
        result.images[0].save(f"{stats.accelerator}.png")


if __name__ == "__main__":
    main()
