"""Relaxed settings on `emoji`: processor time, tokens per pass, relaxation, and the score beside that of the first run.

    python benchmarks/relaxed.py RUN... [--seeds 1] [--batch-size 8] [--guidance-scale X]

RUN is a method, or METHOD@LAST, whose last guided step is LAST (`guidance_interval`), such as gumbel@63. Each generates the 64
packaged prompts, with the same seeds, on one thread. Scores are those of `emoji-scorer`; of a difference, the mean over
prompts with its 95 % interval.
"""

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import vargen
from vargen.scoring import open_scorer

PROMPTS = Path(__file__).parents[1] / "assets/prompts.txt"


def measure(pipe: Any, scorer: Any, run: str, prompts: list[str], given: argparse.Namespace) -> tuple[str, torch.Tensor]:
    """Return the line of a run, and its scores by prompt."""
    method, _, last = run.partition("@")
    options = {"guidance_interval": int(last) if last else None, "guidance_scale": given.guidance_scale}
    seconds, scores, relaxation, passes = [], [], [], []
    for first in range(0, len(prompts) * given.seeds, given.batch_size):
        numbers = range(first, first + given.batch_size)
        asked = [prompts[number % len(prompts)] for number in numbers]
        seeds = [torch.Generator().manual_seed(number) for number in numbers]
        start = time.process_time()
        found = pipe(asked, accelerator=method, generator=seeds, batch_size=given.batch_size, **options)
        seconds.append((time.process_time() - start) / given.batch_size)
        scores.append(scorer.score(found.images, asked))
        relaxation += found.stats.relaxation
        passes.append(1 / found.stats.tokens_per_pass)
    parts = f"{statistics.median(seconds):.3f} s an image", f"{1 / statistics.mean(passes):.3f} tokens per pass"
    line = f"{run}: {', '.join(parts)}, relaxation {statistics.mean(relaxation):.2f}"
    return line, torch.cat(scores).view(given.seeds, -1).mean(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--seeds", type=int, default=1, help="images of each prompt")
    parser.add_argument("--batch-size", type=int, default=8, choices=(1, 2, 4, 8, 16, 32, 64))
    parser.add_argument("--guidance-scale", type=float, help="default: the model's")
    given = parser.parse_args()
    torch.set_num_threads(1)
    pipe, scorer = vargen.open_pipeline("emoji"), open_scorer("emoji-scorer")
    pipe.set_progress_bar_config(disable=True)
    prompts = [line for line in PROMPTS.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    base = None
    for run in given.runs:
        line, scores = measure(pipe, scorer, run, prompts, given)
        base = scores if base is None else base
        gained = scores - base
        interval = 1.96 * float(gained.std()) / math.sqrt(len(gained))
        print(f"{line}, score {scores.mean():.2f} ({gained.mean():+.2f} ± {interval:.2f})", flush=True)


if __name__ == "__main__":
    main()
